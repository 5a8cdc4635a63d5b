"""Export: what went in comes out, in each format, whatever the partitions' columns."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_pipeline import scan_table
from bulk_pipeline.cli import main
from bulk_pipeline.export import export_output
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline_tests.factories import (
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    write_prompts,
    write_raw,
)


def fill(spec, store, key: str, values: list, type_=None, column: str = "text") -> None:
    """A finished partition whose source has one column."""
    write_prompts(store, [make_prompt(i) for i in range(len(values))], key=key)
    rows = [{column: value, "row_id": f"row-{i}", "row_index": i} for i, value in enumerate(values)]
    write_raw(store, rows, pa.schema([(column, type_ or pa.string())]), key)
    complete_partition(spec, store, key, EchoGenerator, "model")
    join_partition(spec, store, key)


def exported(store, keys, format_: str) -> bytes:
    file = io.BytesIO()
    export_output(store, keys, format_, file)
    return file.getvalue()


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


@pytest.fixture
def store(spec):
    return make_store(spec)


@pytest.fixture
def project(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A dataset with two finished partitions and one that is not, and the export command."""
    values = {
        "name": "data",
        "source": {"path": "rows"},
        "partitions": {"by": "file"},
        "prompt": {"column": "text"},
        "generator": {"model": str(toy), "device": "cpu"},
    }
    module = f"defs_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(
        "from bulk_pipeline import build_bulk_inference_defs\n"
        f"defs = build_bulk_inference_defs({values!r}, {str(tmp_path)!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = make_spec(tmp_path, output={"root": f"{tmp_path}/data/bulk"})
    store = make_store(spec)
    fill(spec, store, "a", ["one", 'two\n"quoted", ünï'])
    fill(spec, store, "b", [None])
    write_prompts(store, [make_prompt(0)], key="c")
    with store.partition("output", "c").writer():
        pass

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["export", "-m", module, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.output

    return SimpleNamespace(call=call, root=spec.output.root, folder=tmp_path, module=module)


READERS = {
    "jsonl": lambda path: pl.read_ndjson(path, infer_schema_length=None),
    "json": lambda path: pl.DataFrame(json.loads(path.read_text()), infer_schema_length=None),
    "csv": lambda path: pl.read_csv(path, infer_schema=False),
    "parquet": pl.read_parquet,
}


@pytest.mark.parametrize("format_", READERS)
def test_each_format_holds_the_finished_partitions(project, format_):
    out = project.folder / f"out.{format_}"
    code, message = project.call("--out", str(out), "data")
    assert code == 0
    assert message == f"3 rows of 2 partitions: {out}\n"
    table = scan_table(project.root, "data").collect()
    found = READERS[format_](out)
    assert found.columns == table.columns
    for name in ("text", "completion", "row_id", "partition", "status"):
        assert found[name].to_list() == table[name].to_list(), name


def test_one_partition_to_standard_output(project):
    arguments = ["export", "-m", project.module, "--to", "jsonl", "--out", "-"]
    result = CliRunner().invoke(main, [*arguments, "--partition", "b", "data"])
    assert result.exit_code == 0
    row = json.loads(result.stdout)
    assert (row["text"], row["partition"]) == (None, "b")


def test_a_file_that_is_there_stays_unless_forced(project):
    out = project.folder / "out.csv"
    out.write_text("mine")
    code, message = project.call("--out", str(out), "data")
    assert code == 2
    assert "is there already; name another file or add --force" in message
    assert out.read_text() == "mine"
    assert project.call("--out", str(out), "--force", "data")[0] == 0
    assert out.read_text().startswith("text,row_id")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--out", "x.xlsx", "data"],
            2,
            "--to must be one of jsonl, json, csv, openai_batch, parquet",
        ),
        (["--out", "x.csv", "other"], 2, "no dataset other"),
        (["--out", "x.csv", "--partition", "z", "data"], 2, "data has no z; there are a, b, c"),
        (["--out", "x.csv", "--partition", "c", "data"], 1, "partition c of output is unfinished"),
        (["--out", "no/folder/x.csv", "data"], 1, "no/folder"),
    ],
)
def test_what_cannot_be_exported_is_one_line(project, arguments, code, message):
    found, output = project.call(*arguments)
    assert (found, len(output.strip().splitlines())) == (code, 1)
    assert message in output
    assert not Path("x.csv").exists()


def test_columns_of_all_partitions_are_there(spec, store):
    fill(spec, store, "a", [1, 2], pa.int64(), column="number")
    fill(spec, store, "b", [0.5], pa.float64(), column="number")
    fill(spec, store, "c", ["x"])
    table = pl.read_parquet(exported(store, ["a", "b", "c"], "parquet"))
    assert table["number"].to_list() == [1.0, 2.0, 0.5, None]
    assert table["text"].to_list() == [None, None, None, "x"]


def test_columns_that_do_not_go_together_are_named(spec, store):
    fill(spec, store, "a", [1], pa.int64(), column="number")
    fill(spec, store, "b", ["x"], column="number")
    with pytest.raises(ValueError, match=r"number.*export them one at a time"):
        exported(store, ["a", "b"], "csv")


def test_a_source_column_named_partition_stays(spec, store):
    fill(spec, store, "a", ["mine"], column="partition")
    assert json.loads(exported(store, ["a"], "jsonl"))["partition"] == "mine"


def test_a_failed_export_leaves_no_file(project, monkeypatch):
    from bulk_pipeline import export

    def fail(*arguments):
        raise ValueError("broken on the way")

    monkeypatch.setattr(export, "_conform", fail)
    code, message = project.call("--out", str(project.folder / "out.csv"), "data")
    assert code == 1
    assert "broken on the way" in message
    assert not list(project.folder.glob("*out.csv*"))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
@settings(max_examples=25, deadline=None)
def test_any_text_comes_through_parquet_and_jsonl(tmp_path_factory, texts):
    spec = make_spec(tmp_path_factory.mktemp("any"))
    store = make_store(spec)
    fill(spec, store, "a", texts)
    assert pl.read_parquet(exported(store, ["a"], "parquet"))["text"].to_list() == texts
    lines = exported(store, ["a"], "jsonl").decode().split("\n")[:-1]
    assert [json.loads(line)["text"] for line in lines] == texts
