"""The command line in process: what it prints, and its exit codes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from bulk_pipeline import scan_table
from bulk_pipeline.cli import main


@pytest.fixture
def project(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module with one dataset of two files, and what calls the command line on it."""
    for key in ("first", "second"):
        (tmp_path / "rows").mkdir(exist_ok=True)
        lines = [json.dumps({"text": f"{key} {i}"}) for i in range(3)]
        (tmp_path / "rows" / f"{key}.jsonl").write_text("\n".join(lines))
    spec = {
        "name": "data",
        "source": {"path": "rows"},
        "partitions": {"by": "file"},
        "prompt": {"column": "text"},
        "sampling": {"max_new_tokens": 4},
        "generator": {"model": str(toy), "device": "cpu", "cache_tokens": 1024},
    }
    module = f"defs_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(
        "from bulk_pipeline import build_bulk_inference_defs\n"
        f"defs = build_bulk_inference_defs({spec!r}, {str(tmp_path)!r})\n"
    )
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))

    def call(*arguments: str) -> tuple[int, str]:
        *command, last = arguments
        result = CliRunner().invoke(main, [*command, "-m", module, last])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.output

    return SimpleNamespace(call=call, root=str(tmp_path / "data" / "bulk"), folder=tmp_path)


def answers(project) -> dict[str, int]:
    table = scan_table(project.root, "data", "completions").collect()
    return dict(zip(table["row_id"], table["attempts"], strict=True))


def test_run_does_the_partitions_named_and_then_the_rest(project):
    assert project.call("partitions", "sync", "data")[0] == 0
    assert project.call("run", "--partition", "second", "data")[0] == 0
    table = scan_table(project.root, "data").collect()
    assert table["partition"].to_list() == ["second"] * 3
    assert project.call("run", "data")[0] == 0
    assert scan_table(project.root, "data").collect().height == 6
    code, shown = project.call("show", "data")
    assert code == 0
    assert "6 rows" in shown


def test_run_redoes_what_is_asked_for(project):
    project.call("partitions", "sync", "data")
    project.call("run", "data")
    before = scan_table(project.root, "data", "completions").collect()
    assert project.call("run", "--redo", "all", "data")[0] == 0
    after = scan_table(project.root, "data", "completions").collect()
    assert after["completion_ids"].to_list() == before["completion_ids"].to_list()
    assert (after["queue_seconds"] != before["queue_seconds"]).any()
    again = scan_table(project.root, "data", "completions").collect()
    assert project.call("run", "data")[0] == 0
    assert again["queue_seconds"].to_list() == after["queue_seconds"].to_list()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "data"], "data has no partitions; there are none: run partitions sync first"),
        (["run", "--partition", "nope", "data"], "--partition: data has no nope"),
        (["run", "other"], "no dataset other in "),
        (["show", "data"], "no finished partition; materialise data/output first"),
        (["show", "other"], "no dataset other in "),
    ],
)
def test_what_cannot_be_done_is_one_line(project, arguments, message):
    code, output = project.call(*arguments)
    assert code == 1
    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_without_a_home_nothing_is_run(project, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME")
    for command in (["partitions", "sync", "data"], ["run", "data"]):
        code, output = project.call(*command)
        assert code == 1
        assert output.startswith("Error: DAGSTER_HOME is not set")


def test_sync_goes_on_past_a_dataset_whose_source_is_gone(project):
    for path in (project.folder / "rows").iterdir():
        path.unlink()
    code, output = project.call("partitions", "sync", "data")
    assert code == 1
    assert output.startswith("Error: data: source.path: no files match")
