"""The command line in process: what it prints, and its exit codes."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from click.testing import CliRunner

from bulk_pipeline import gpu_pool, scan_table
from bulk_pipeline.cli import main
from bulk_pipeline.gpu_pool import GPU_POOL


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


def test_show_tells_white_space_from_nothing(project):
    notes = ["\n\n", " \t", "", None, "two\n words"]
    rows = [json.dumps({"text": f"{i}", "note": note}) for i, note in enumerate(notes)]
    (project.folder / "rows" / "first.jsonl").write_text("\n".join(rows))
    (project.folder / "rows" / "second.jsonl").unlink()
    assert project.call("run", "data")[0] == 0
    code, shown = project.call("show", "--columns", "note", "data")
    assert code == 0, shown
    cells = [line.strip("│ ") for line in shown.splitlines() if line.startswith("│")]
    assert cells == ["note", r'"\n\n"', r'" \t"', "", "null", "two words"]


def test_run_takes_what_is_new_in_the_source_and_says_so(project):
    code, output = project.call("run", "--until", "raw_dataset", "data")
    assert code == 0, output
    assert output.startswith("data: 2 new partitions: first, second\n")
    (project.folder / "rows" / "third.jsonl").write_text('{"text": "new"}')
    (project.folder / "rows" / "fourth.jsonl").write_text('{"text": "new"}')
    code, output = project.call("run", "--partition", "first", "--until", "raw_dataset", "data")
    assert code == 0, output
    assert "new partitions" not in output
    code, output = project.call("run", "--until", "raw_dataset", "data")
    assert code == 0, output
    assert output.startswith("data: 2 new partitions: fourth, third\n")
    assert scan_table(project.root, "data", "raw_dataset").collect().height == 8
    assert "new partitions" not in project.call("run", "--until", "raw_dataset", "data")[1]


def test_run_with_nothing_in_the_source_is_one_line(project):
    for path in (project.folder / "rows").iterdir():
        path.unlink()
    code, output = project.call("run", "data")
    assert code == 1
    assert output.startswith("Error: data: source.path: no files match")
    assert len(output.splitlines()) == 1


UNTIL_ROWS = ("run", "--until", "raw_dataset")


def test_run_leaves_out_what_is_gone_from_the_source_and_names_it(project):
    for key in ("alpha", "middle"):
        (project.folder / "rows" / f"{key}.jsonl").write_text('{"text": "new"}')
    assert project.call(*UNTIL_ROWS, "data")[0] == 0
    for key in ("first", "middle"):
        (project.folder / "rows" / f"{key}.jsonl").unlink()
    code, output = project.call(*UNTIL_ROWS, "data")
    assert code == 0, output
    assert output.splitlines()[0] == (
        "data: 2 partitions left out, source gone, results stay: first, middle; "
        "bulk-pipeline partitions forget data KEY... drops them"
    )
    assert output.splitlines()[-1] == "data: 2 partitions up to raw_dataset: 2 finished"
    assert scan_table(project.root, "data", "raw_dataset").collect().height == 8
    code, output = project.call(*UNTIL_ROWS, "--partition", "first", "data")
    assert code == 1
    assert "partition 'first' is not in the source of data, which has 2 partitions" in output


def forget(project, *keys: str) -> tuple[int, str]:
    return project.call("partitions", "forget", "data", *keys)


def test_partitions_whose_source_is_gone_can_be_forgotten_and_come_back(project):
    project.call(*UNTIL_ROWS, "data")
    file = project.folder / "rows" / "first.jsonl"
    rows = file.read_text()
    file.unlink()
    assert forget(project, "first") == (
        0,
        "data: 1 partition forgotten: first\n"
        f"  first: its tables stay: {project.root}/data/*/first (raw_dataset)\n",
    )
    assert scan_table(project.root, "data", "raw_dataset").collect().height == 6
    code, output = project.call(*UNTIL_ROWS, "data")
    assert (code, "left out" in output) == (0, False)
    file.write_text(rows)
    assert "data: 1 new partition: first\n" in project.call(*UNTIL_ROWS, "data")[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["first", "second"],
            "second is still in the source, so the next sync would register it again; remove its "
            "files first",
        ),
        (["first", "nope"], "Dagster knows no partition nope; there are first, second"),
    ],
)
def test_forget_refuses_as_a_whole(project, keys, message):
    project.call("partitions", "sync", "data")
    (project.folder / "rows" / "first.jsonl").unlink()
    assert forget(project, *keys) == (2, f"Error: data: {message}\n")
    assert "1 partition left out" in project.call(*UNTIL_ROWS, "data")[1]


def test_all_may_be_forgotten_once_the_source_is_empty(project):
    project.call("partitions", "sync", "data")
    for path in (project.folder / "rows").iterdir():
        path.unlink()
    assert forget(project, "first", "second") == (
        0, "data: 2 partitions forgotten: first, second\n",
    )  # fmt: skip


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
    ("arguments", "code", "message"),
    [
        (
            ["run", "--partition", "nope", "data"],
            2,
            "data has no partitions yet; run bulk-pipeline partitions sync data first",
        ),
        (["run", "other"], 2, "no dataset other in "),
        (["run", "--redo", "all", "--until", "prompts", "data"], 2, "--redo needs completions"),
        (
            ["run", "--redo", "stopp", "data"],
            2,
            "--redo must be none, all or statuses out of empty, error, invalid, length, loop, stop,"
            " too_long, got stopp",
        ),
        (["run", "--redo", "length,stopp", "data"], 2, "too_long, got stopp"),
        (["run", "--redo", "", "data"], 2, "too_long, got ''"),
        (["plan", "other"], 2, "no dataset other in "),
        (["plan", "--partition", "nope", "data"], 2, "has no nope; there are first, second"),
        (["plan", "--picture", "p.jpg", "data"], 2, "--picture must end in .png or .svg"),
        (["show", "data"], 1, "no finished partition; materialise data/output first"),
        (["show", "other"], 2, "no dataset other in "),
    ],
)
def test_what_cannot_be_done_is_one_line(project, arguments, code, message):
    found, output = project.call(*arguments)
    assert found == code
    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_run_of_a_partition_that_is_not_there(project):
    project.call("partitions", "sync", "data")
    code, output = project.call("run", "--partition", "nope", "data")
    assert code == 2
    assert output == "Error: --partition: data has no nope; there are first, second\n"


def test_a_run_that_fails_ends_with_the_reason(project):
    project.call("partitions", "sync", "data")
    for path in (project.folder / "rows").iterdir():
        path.write_text('{"other": 1}')
    code, output = project.call("run", "--partition", "first", "data")
    assert code == 1
    lines = output.strip().splitlines()
    assert lines[-1].startswith("Error: data: the run over first failed: 1 of 1 partitions failed")
    assert "prompt.column: the source has no column 'text'" in lines[-1]
    assert "data: 1 partition: 1 stopped" in lines


def test_a_run_that_waits_for_the_gpu_says_for_whom(project, monkeypatch):
    project.call("partitions", "sync", "data")
    with (project.folder / "home" / "dagster.yaml").open("a") as settings:
        settings.write("concurrency: {pools: {default_limit: 1, granularity: op}}\n")

    @dg.job
    def other_job():
        pass

    with dg.DagsterInstance.get() as instance:
        storage = instance.event_log_storage
        storage.initialize_concurrency_limit_to_default(GPU_POOL)
        other = instance.create_run_for_job(other_job).run_id
        instance.report_dagster_event(
            dg.DagsterEvent("PIPELINE_START", "other_job", message="start", pid=os.getpid()), other
        )
        assert storage.claim_concurrency_slot(GPU_POOL, other, "work").is_claimed

        read = type(storage).get_concurrency_info

        def look(storage, key):
            """What the run sees; what it waits for ends once it has seen that."""
            info = read(storage, key)
            if info.pending_run_ids:
                storage.free_concurrency_slots_for_run(other)
            return info

        monkeypatch.setattr(type(storage), "get_concurrency_info", look)
        monkeypatch.setattr(gpu_pool, "LOOK_SECONDS", 0.05)
        code, output = project.call("run", "--partition", "first", "data")
    assert code == 0
    assert output.count("waiting for the pool gpu") == 1
    assert (
        f"waiting for the pool gpu (1 at once), held by run {other} of other_job (process "
        f"{os.getpid()}); see bulk-pipeline status"
    ) in output


def test_without_a_home_nothing_is_run(project, monkeypatch):
    monkeypatch.delenv("DAGSTER_HOME")
    for command in (["partitions", "sync", "data"], ["run", "data"]):
        code, output = project.call(*command)
        assert code == 2
        assert output.startswith("Error: DAGSTER_HOME is not set")


def test_sync_goes_on_past_a_dataset_whose_source_is_gone(project):
    for path in (project.folder / "rows").iterdir():
        path.unlink()
    code, output = project.call("partitions", "sync", "data")
    assert code == 1
    assert output.startswith("Error: data: source.path: no files match")


def test_plan_before_and_after_a_run(project):
    project.call("partitions", "sync", "data")
    code, text = project.call("plan", "data")
    assert code == 0
    assert "data: 2 partitions, 6 rows, 0 requests, 6 to run" in text
    assert "first, second: no prompts yet" in text
    project.call("run", "--partition", "first", "data")
    code, text = project.call("plan", "--json", "--price-per-hour", "3600", "data")
    assert code == 0
    plan = json.loads(text)
    assert [each["to_run"] for each in plan["partitions"]] == [0, 0]
    assert plan["answered"] == 3
    assert plan["estimate"]["requests"] == 3
    assert plan["estimate"]["cost"] == pytest.approx(plan["estimate"]["seconds"])
    assert plan["last_run"]["done"] == 3


def test_a_run_may_end_at_the_prompts_for_the_plan_to_count(project):
    project.call("partitions", "sync", "data")
    code, text = project.call("run", "--until", "prompts", "data")
    assert code == 0
    assert text.splitlines()[-1] == "data: 2 partitions up to prompts: 2 finished"
    _, text = project.call("status", "data")
    assert text.startswith("data: 2 partitions: 2 unfinished\n")
    _, text = project.call("plan", "--json", "data")
    plan = json.loads(text)
    assert (plan["to_run"], plan["answered"]) == (6, 0)
    assert not (project.folder / "data" / "bulk" / "data" / "completions").exists()


def test_plan_names_as_many_bad_rows_as_asked_for(project):
    lines = [json.dumps({"text": None}) for i in range(12)]
    (project.folder / "rows" / "first.jsonl").write_text("\n".join(lines))
    project.call("run", "--until", "prompts", "data")
    _, text = project.call("plan", "data")
    assert text.count("  first row ") == 10
    assert "  2 more; --bad-rows 0 names all" in text
    _, text = project.call("plan", "--bad-rows", "0", "data")
    assert text.count("  first row ") == 12
    assert "more; " not in text
    _, text = project.call("plan", "--bad-rows", "3", "--json", "data")
    assert [len(each["cannot_run"]) for each in json.loads(text)["partitions"]] == [3, 0]


def test_plan_with_a_cache_too_small_says_so_and_ends_with_1(project):
    (project.folder / "rows" / "first.jsonl").write_text(json.dumps({"text": "what " * 900}))
    project.call("partitions", "sync", "data")
    project.call("run", "--until", "prompts", "data")
    code, text = project.call("plan", "data")
    assert code == 1
    assert "problem: first: generator.cache_tokens must hold the longest request" in text


@pytest.mark.parametrize(
    "command", [[], ["plan"], ["run"], ["show"], ["doctor"], ["partitions", "sync"]]
)
def test_help_tells_what_a_command_does(command):
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.output
    assert len(result.output.splitlines()) > 6


@pytest.mark.parametrize(
    ("settings", "module"),
    [
        (None, "bulk_pipeline.definitions"),
        ('[project]\nname = "x"\n', "bulk_pipeline.definitions"),
        ('[tool.dg.project]\nroot_module = "gone"\n', "gone.definitions"),
        (
            '[tool.dg.project]\nroot_module = "x"\ncode_location_target_module = "gone.defs"\n',
            "gone.defs",
        ),
    ],
    ids=["no project", "another project", "dg project", "named module"],
)
def test_the_definitions_are_those_of_the_project_in_this_folder(
    tmp_path, monkeypatch, settings, module
):
    monkeypatch.chdir(tmp_path)
    if settings is not None:
        (tmp_path / "pyproject.toml").write_text(settings)
    result = CliRunner().invoke(main, ["status", "nothing"])
    assert result.exit_code == 2
    assert module in result.output


def test_a_broken_pyproject_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool")
    result = CliRunner().invoke(main, ["status"])
    assert result.exit_code == 2
    assert result.output.startswith("Error: pyproject.toml: ")
