"""How far a run is: the status command, observations in Dagster, and the bar on a terminal."""

import itertools
import json
import os
import pty
import socket
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner

from bulk_pipeline import build_bulk_inference_defs, progress_view
from bulk_pipeline.cli import main
from bulk_pipeline.stages import sink as sink_module
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline.stages.progress import PROGRESS_FILE, Progress
from bulk_pipeline.status import read_status, to_text
from bulk_pipeline.storage.partition_writer import SET_ASIDE
from bulk_pipeline.storage.schemas import COMPLETIONS
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.factories import (
    KEY,
    EchoGenerator,
    make_prompt,
    make_spec,
    make_store,
    write_prompts,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture
def spec(tmp_path):
    return make_spec(tmp_path)


@pytest.fixture
def store(spec):
    return make_store(spec)


@pytest.fixture
def dataset(tmp_path: Path, toy: Path) -> dict:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "q {i}"}}\n' for i in range(6)))
    return {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "sampling": {"max_new_tokens": 6},
        "generator": {"model": str(toy), "device": "cpu", "cache_tokens": 1024},
    }


@pytest.fixture
def module(tmp_path: Path, dataset: dict, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of definitions, and its DAGSTER_HOME."""
    name = f"defs_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "from bulk_pipeline import build_bulk_inference_defs\n"
        f"defs = build_bulk_inference_defs({dataset!r}, {str(tmp_path)!r})\n"
    )
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    return name


def complete(spec, store, generator=None):
    generator = generator or EchoGenerator()
    return complete_partition(spec, store, KEY, lambda: generator, "model")


def put_progress(store, **changes) -> None:
    """A progress file as a running process leaves it."""
    partition = store.partition(COMPLETIONS, KEY)
    os.makedirs(partition.path, exist_ok=True)
    here = {"host": socket.gethostname(), "pid": os.getpid(), "updated": time.time()}
    record = Progress(KEY, requests=10).record() | here | changes
    (Path(partition.path) / PROGRESS_FILE).write_text(json.dumps(record))


def test_a_partition_from_its_prompts_to_its_end(spec, store):
    assert read_status(store) == []
    write_prompts(store, [make_prompt(i) for i in range(3)])
    (found,) = read_status(store)
    assert (found.state, found.table) == ("unfinished", "completions")
    complete(spec, store)
    (found,) = read_status(store)
    assert (found.state, found.table) == ("unfinished", "output")
    join_partition(spec, store, KEY)
    (found,) = read_status(store)
    assert (found.state, found.table) == ("finished", None)
    assert to_text("data", [found]) == "data: 1 partition: 1 finished"


def test_a_running_partition_tells_rate_and_rest(store):
    numbers = {"completion_tokens": 80, "seconds": 8.0, "mean_batch": 2.5, "cache_use": 0.4}
    put_progress(store, requests=25, done=10, **numbers)
    (found,) = read_status(store)
    assert (found.state, found.tokens_per_second, found.seconds_left) == ("running", 10.0, 12.0)
    text = to_text("data", [found])
    assert "10 of 25" in text
    assert "10.0 tokens/s, 2.5 at once, 40% of the cache, 12 s left" in text


def test_a_partition_that_drafts_tells_how_often_that_is_right(store):
    put_progress(store, done=4, seconds=8.0, mean_batch=2.5, drafted_tokens=8, accepted_tokens=2)
    (found,) = read_status(store)
    assert "25% of drafted tokens right" in to_text("data", [found])
    assert found.to_json()["drafted_tokens"] == 8


def test_a_run_that_loads_its_model_says_so(store):
    put_progress(store)
    assert "loading the model" in to_text("data", read_status(store))


def test_a_run_that_failed_or_died_is_stopped(spec, store):
    write_prompts(store, [make_prompt(i) for i in range(6)])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    put_progress(store, pid=ended.pid, done=2, seconds=1.0)
    (found,) = read_status(store)
    assert (found.state, found.progress["done"]) == ("stopped", 2)


def test_status_on_the_command_line(module, tmp_path, monkeypatch):
    store = Store(str(tmp_path / "data" / "bulk"), "data")
    numbers = {"completion_tokens": 80, "seconds": 8.0, "mean_batch": 2.5}
    put_progress(store, requests=25, done=10, **numbers)
    result = CliRunner().invoke(main, ["status", "-m", module])
    assert result.exit_code == 0
    assert "data: 1 partition: 1 running" in result.output
    result = CliRunner().invoke(main, ["status", "-m", module, "--json", "data"])
    (found,) = json.loads(result.output)["data"]
    assert (found["state"], found["seconds_left"]) == ("running", 12.0)
    aside = Path(store.partition(COMPLETIONS, KEY).path) / SET_ASIDE
    aside.mkdir()
    (aside / "part-torn.parquet").write_bytes(bytes(2_500_000))
    result = CliRunner().invoke(main, ["status", "-m", module])
    line = "data: 1 files set aside, 2.5 MB, in folders _set_aside; nothing reads them"
    assert line in result.output
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            os.remove(Path(store.partition(COMPLETIONS, KEY).path) / PROGRESS_FILE)

    monkeypatch.setattr(time, "sleep", nap)
    arguments = ["status", "-m", module, "--follow", "--seconds", "7", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert naps == [7.0, 7.0]
    states = [json.loads(line)["data"][0]["state"] for line in result.output.splitlines()]
    assert states == ["running", "running", "unfinished"]


def test_a_run_is_observed_in_dagster(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(sink_module, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(progress_view, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(progress_view, "MOST_SECONDS", 0.0)
    defs = build_bulk_inference_defs(dataset, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        assert dg.materialize(
            list(defs.assets or []), instance=instance, resources=defs.resources,
            partition_key="all",
        ).success  # fmt: skip
        records = instance.fetch_observations(dg.AssetKey(["data", "completions"]), limit=100)
    found = [record.asset_observation for record in reversed(records.records)]
    assert {observation.partition for observation in found} == {"all"}
    done = [observation.metadata["rows_done"].value for observation in found]
    assert done == sorted(done)
    assert found[-1].metadata["rows_to_do"].value == 6 - done[-1]
    assert found[-1].metadata["tokens_per_second"].value > 0
    assert found[-1].metadata["mean_batch"].value > 0
    assert any(0 < observation.metadata["cache_use"].value <= 1 for observation in found)


def test_observations_come_more_rarely_as_time_goes_on(monkeypatch):
    events, now = [], 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    class Context:
        asset_key = dg.AssetKey("a")

        class log:
            info = staticmethod(lambda text: None)

        @staticmethod
        def log_event(event):
            events.append(now)

    observe = progress_view.observer(Context)
    progress = Progress("all", requests=10_000)
    progress.start({})
    for step in range(720):
        now = step * 5
        observe(progress)
    pauses = [later - earlier for earlier, later in itertools.pairwise(events)]
    assert events[0] == 10
    assert pauses[0] == 10
    assert pauses[-1] == 60
    assert pauses == sorted(pauses)
    assert len(events) < 75


def run_on_a_terminal(command: list[str], cwd: Path) -> tuple[int, str]:
    """Run with standard error on a pseudo terminal; the exit code and what it showed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    assert process.stdout is not None
    out = process.stdout.read().decode()
    return process.wait(), out + shown.decode(errors="replace")


@pytest.mark.slow
def test_a_terminal_shows_a_bar_and_a_pipe_shows_lines(module, tmp_path):
    command = [sys.executable, "-m", "bulk_pipeline.cli", "run", "-m", module, "data"]
    code, shown = run_on_a_terminal(command, tmp_path)
    assert code == 0, shown
    assert "6/6" in shown
    assert "\x1b[" in shown
    assert "data: 1 partition: 1 finished" in shown
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert "\x1b[?25l" not in done.stderr
    assert "partition all: 6 rows" in done.stderr
