"""The whole way with its tables on s3:// and gs://, killed and resumed, and two runs at once."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from bulk_pipeline import build_bulk_inference_defs, scan_table
from bulk_pipeline.cli import main
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.journal import GIVE_UP_AFTER, JOURNAL, REMOTE_AHEAD
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.crash import KEY, Crashes
from bulk_pipeline_tests.factories import (
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    read_rows,
    stable,
    write_prompts,
)
from bulk_pipeline_tests.s3 import S3

NUM_ROWS, FLUSH_ROWS = 12, 4
TEXTS = [f"question {i}" for i in range(NUM_ROWS)]
POINTS = [
    *(f"manifest {step}:{nth}" for step in ("open", "uploaded") for nth in (1, 6)),
    *(f"part {step}:{nth}" for step in ("upload", "uploaded") for nth in (2, 4)),
    "piece uploaded:1",
    f"{JOURNAL} upload:1",
    f"{JOURNAL} uploaded:1",
    "commit:5",
    "delete part:1",
    "delete piece:1",
    "journal delete:1",
    "output.jsonl upload:1",
]
GOOGLE_POINTS = ["manifest uploaded:6", "part uploaded:2", "commit:5", "delete part:1"]
RUNS = [("s3", point) for point in POINTS] + [("google", point) for point in GOOGLE_POINTS]


@pytest.fixture(scope="module")
def crashes(s3_process: S3, google_process: S3) -> Iterator[Crashes]:
    with Crashes() as crashes:
        yield crashes


def real_spec(root: str, model: Path, **changes: Any) -> dict[str, Any]:
    """The real generator over the float64 toy, with rows and tables in one place."""
    return {
        "name": "data",
        "source": {"path": f"{root}/in/*.jsonl"},
        "prompt": {"column": "text"},
        "generator": {
            "model": str(model),
            "device": "cpu",
            "dtype": "float64",
            "max_batch_size": 4,
            "cache_tokens": 2048,
        },
        "sampling": {"temperature": 0.8, "max_new_tokens": 6},
        "output": {"root": f"{root}/tables", "flush_rows": FLUSH_ROWS, "formats": ["jsonl"]},
    } | changes


def new_root(server: S3, texts: list[str] = TEXTS) -> str:
    """A bucket with rows in it."""
    root = server.new_bucket()
    server.fill(
        root, ["in/rows.jsonl"], "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    )
    return root


def stable_tables(spec: dict[str, Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
    """The tables' stable columns, and what is written beside them."""
    store = Store(spec["output"]["root"], spec["name"])
    tables: dict[str, Any] = {
        table: stable(read_rows(store, table), but) for table in (COMPLETIONS, OUTPUT)
    }
    return tables | {"jsonl": store.fs.cat_file(f"{store.path}/{OUTPUT}/{KEY}/output.jsonl")}


@pytest.fixture(scope="module")
def local_tables(crashes, toy_float64, tmp_path_factory) -> dict[str, Any]:
    """The tables of a run on a local disk that nothing disturbed."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "in").mkdir()
    (folder / "in" / "rows.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in TEXTS)
    )
    spec = real_spec(str(folder), toy_float64)
    assert crashes.run(spec)["error"] is None
    return stable_tables(spec)


@pytest.mark.parametrize(("kind", "point"), RUNS)
def test_a_run_that_is_killed_is_finished_by_the_next(
    crashes, request, toy_float64, local_tables, tmp_path, kind, point
):
    server = request.getfixturevalue(kind)
    root = new_root(server)
    spec = real_spec(root, toy_float64)
    assert crashes.run(spec, fault=f"{point}:KILL", folder=str(tmp_path))["signal"] == 9
    resumed = crashes.run(spec, folder=str(tmp_path))
    assert resumed["error"] is None
    assert stable_tables(spec) == local_tables
    counts = Counter((tmp_path / "finished").read_text().split())
    assert len(counts) == NUM_ROWS
    assert counts.total() - NUM_ROWS <= FLUSH_ROWS
    left = [key for key in server.keys(root) if "/.tmp-" in key or key.endswith(JOURNAL)]
    assert left == []


def test_a_row_that_kills_the_process_is_found_out(crashes, s3, toy_float64, tmp_path):
    from transformers import AutoTokenizer

    (poison,) = set(AutoTokenizer.from_pretrained(toy_float64).encode("§")[-1:])
    root = new_root(s3, [f"question {i}" + (" §" if i == 5 else "") for i in range(20)])
    spec = real_spec(root, toy_float64)
    order = {"generator": "answer", "poison": poison, "folder": str(tmp_path)}
    num_deaths = 0
    while (report := crashes.run(spec, **order))["signal"] == 9:
        num_deaths += 1
        assert num_deaths <= GIVE_UP_AFTER
    assert report["error"] is None
    rows = read_rows(Store(spec["output"]["root"], "data"), COMPLETIONS)
    assert [row["status"] for row in rows] == ["error" if i == 5 else "stop" for i in range(20)]


def test_the_whole_way_through_dagster_is_as_on_a_local_disk(
    server, toy_float64, local_tables, tmp_path
):
    root = new_root(server)
    spec = real_spec(root, toy_float64)
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            list(defs.assets or []), instance=instance, resources=defs.resources, partition_key=KEY
        )
    assert result.success
    local = [
        [{name: value for name, value in row.items() if name != "request_key"} for row in rows]
        for rows in (local_tables[COMPLETIONS], local_tables[OUTPUT])
    ]  # whose key is of a model by another name
    tables = stable_tables(spec, but=("request_key",))
    assert [tables[COMPLETIONS], tables[OUTPUT]] == local
    materialized = result.asset_materializations_for_node("data__output")[0].metadata
    assert materialized["path"].value.startswith(f"{root}/tables/data/output/{KEY}/part-")
    assert materialized["path_report"].value.startswith(f"{root}/tables/")
    answers = scan_table(f"{root}/tables", "data").collect()
    assert answers["text"].to_list() == TEXTS
    kept = {
        key.rpartition("/")[2] for key in server.keys(root) if key.startswith("tables/data/output")
    }
    assert {"manifest.json", "output.jsonl", "report.html"} <= kept


# --- two runs at once ----------------------------------------------------------------------------


def test_of_two_runs_at_once_the_later_goes_on_and_nothing_is_lost(server):
    spec = make_spec(server.new_bucket(), output={"flush_rows": 2})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(9)])
    later = EchoGenerator()

    class Overtaken(EchoGenerator):
        def _answer(self, request):
            if request.input_ids[-1] == 6:
                complete_partition(spec, make_store(spec), KEY, lambda: later, "model")
            return super()._answer(request)

    earlier = Overtaken()
    with pytest.raises(RuntimeError, match=r"data/completions/all is being written by a run on"):
        complete_partition(spec, store, KEY, lambda: earlier, "model")
    assert [row["status"] for row in read_rows(store, COMPLETIONS)] == ["stop"] * 9
    assert [request.input_ids[-1] for request in later.requests] == [6, 7, 8]
    again = EchoGenerator()
    complete_partition(spec, store, KEY, lambda: again, "model")
    assert again.requests == []


# --- what it costs -------------------------------------------------------------------------------


def test_the_requests_of_a_run_are_as_the_page_says(s3):
    """A PUT for each 256 requests that start, two for each flush, and few others."""
    num_rows, flush_rows = 1024, 256
    spec = make_spec(s3.new_bucket(), output={"flush_rows": flush_rows})
    store = make_store(spec)
    write_prompts(store, [make_prompt(i) for i in range(num_rows)])
    s3.requests.clear()
    complete_partition(spec, store, KEY, EchoGenerator, "model")
    assert s3.counts(JOURNAL)["PUT"] == num_rows / REMOTE_AHEAD
    flushes = num_rows / flush_rows
    parts = [key for method, key, _ in s3.requests if method == "PUT" and "/part-" in key]
    assert len(parts) == flushes + 1  # and the sorted one
    assert s3.counts("manifest.json")["PUT"] <= flushes + 4


def test_many_partitions_are_looked_at_for_answers_at_the_same_time(s3):
    spec = make_spec(s3.new_bucket())
    store = make_store(spec)
    for i in range(20):
        write_prompts(store, [make_prompt(i)], key=f"p{i:02}", renumber=True)
        complete_partition(spec, store, f"p{i:02}", EchoGenerator, "model")
    write_prompts(store, [make_prompt(i) for i in (19, 3, 50)], renumber=True)
    asked: list[str] = []
    enough, in_time = threading.Event(), []

    def wait_for_others(method: str, key: str) -> None:
        if key.endswith("/manifest.json") and "/completions/p" in key:
            asked.append(key)
            if len(asked) >= 8:
                enough.set()
            in_time.append(enough.wait(10))
            enough.set()

    s3.before = wait_for_others
    generator = EchoGenerator()
    report = complete_partition(spec, store, KEY, lambda: generator, "model")
    assert all(in_time)
    assert report.metadata["requests_copied"] == 2
    assert [request.input_ids[-1] for request in generator.requests] == [50]
    completions = [row["completion"] for row in read_rows(store, COMPLETIONS)]
    assert completions == ["1 2 3 19", "1 2 3 3", "1 2 3 50"]


# --- the command line ----------------------------------------------------------------------------


def test_commands_tell_in_one_line_what_storage_refuses(s3, tmp_path, monkeypatch):
    spec = real_spec("s3://nowhere-at-all", Path("owner/name"))
    (tmp_path / "remote_defs.py").write_text(
        "from bulk_pipeline import build_bulk_inference_defs\n"
        f"defs = build_bulk_inference_defs({spec!r}, '.')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    for command in ("status", "plan", "show", "export"):
        options = ["--out", str(tmp_path / "x.csv")] if command == "export" else []
        done = CliRunner().invoke(main, [command, *options, "-m", "remote_defs", "data"])
        assert done.exit_code == 1, command
        lines = done.output.strip().splitlines()
        message = r"Error: (data: )?s3://nowhere-at-all/.*: there is no bucket nowhere-at-all; make"
        assert re.match(message, lines[-1]), command
