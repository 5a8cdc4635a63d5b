"""examples/postgres with a real PostgreSQL: launches at once, a sensor, a schedule, a dead run."""

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import pytest

from bulk_pipeline import scan_table
from bulk_pipeline.automation import RANGE_TAGS, UNFINISHED
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, TABLES
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.dev import Dev, dagster_dev, kill_tree, wait_for
from bulk_pipeline_tests.postgres import find_program, run_postgres

pytest.importorskip("dagster_postgres", reason="run it with: make postgres")
if find_program("initdb") is None:
    pytest.skip("apt-get install postgresql, then: make postgres", allow_module_level=True)

ROOT = Path(__file__).parent.parent
LAUNCHED = ["l1", "l2", "l3"]  # by backfills, all launched at once
LONG, LONG_ROWS = "l2", 64  # the partition whose run is killed
SENSED = ["s1"]
PATIENCE = 600  # seconds; each step is a process of its own, and CI has two cores
SETTINGS = (
    ('"max_new_tokens": 48', '"max_new_tokens": 120, "ignore_eos": True'),
    (
        '"data/models/smollm2-135m-instruct"',
        '"data/models/toy", "device": "cpu", "max_batch_size": 4',
    ),
    ('"sensor_seconds": 60, "settle_seconds": 60', '"sensor_seconds": 1, "settle_seconds": 0'),
    ('"0 2 * * *"', '"* * * * *"'),
    ('"generator":', '"output": {"flush_rows": 4, "flush_seconds": 1},\n    "generator":'),
)


@pytest.fixture(scope="module")
def database() -> Iterator[dict[str, str]]:
    with run_postgres() as environment:
        yield environment


@pytest.fixture
def project(
    tmp_path: Path, toy: Path, database: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy of the example with the toy model, quicker settings and no rows yet."""
    folder = tmp_path / "postgres"
    shutil.copytree(ROOT / "examples" / "postgres", folder)
    (folder / "data" / "models").mkdir()
    (folder / "data" / "models" / "toy").symlink_to(toy)
    text = (folder / "definitions.py").read_text()
    for old, new in SETTINGS:
        assert old in text
        text = text.replace(old, new)
    (folder / "definitions.py").write_text(text)
    for path in (folder / "data" / "tickets").iterdir():
        path.unlink()
    home = folder / ".dagster_home"
    home.mkdir()
    shutil.copy(folder / "dagster.yaml", home)
    for name, value in database.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def write(project: Path, key: str, num_rows: int = 3) -> None:
    rows = [json.dumps({"text": f"{key} {index}"}) + "\n" for index in range(num_rows)]
    (project / "data" / "tickets" / f"{key}.jsonl").write_text("".join(rows))


def begun(store: Store, key: str) -> int:
    """How many completions of an unfinished partition are stored."""
    manifest = store.partition(COMPLETIONS, key).manifest()
    return manifest.num_rows if manifest is not None and not manifest.complete else 0


def is_done(store: Store, key: str) -> bool:
    manifest = store.partition(OUTPUT, key).manifest()
    return manifest is not None and manifest.complete


def kill_run(dev: Dev, key: str) -> dg.DagsterRun:
    """Kill the processes of the run that makes a partition."""
    started = dev.runs(statuses=[dg.DagsterRunStatus.STARTED])
    (run,) = (run for run in started if run.tags[RANGE_TAGS[0]] == key)
    (start,) = dev.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_START)
    assert start.dagster_event is not None
    assert start.dagster_event.pid is not None
    kill_tree(start.dagster_event.pid)
    return run


@pytest.mark.cluster
def test_launches_at_once_a_sensor_a_schedule_and_a_dead_run(project: Path) -> None:
    store = Store(str(project / "data" / "bulk"), "tickets")
    with dagster_dev(project) as dev:
        # Three backfills at once, from three threads; their runs queue up.
        dev.instance.add_dynamic_partitions("tickets_partitions", LAUNCHED)
        with ThreadPoolExecutor(len(LAUNCHED)) as threads:
            backfills = list(threads.map(lambda k: dev.launch_backfill("tickets", [k]), LAUNCHED))
        wait_for(dev.runs, "the first run")  # before that, the schedule would take the files
        for key in LAUNCHED:
            write(project, key, LONG_ROWS if key == LONG else 3)
        wait_for(dev.num_waiting_for_gpu, "a second step that waits for the GPU", PATIENCE)

        # One run is killed while it holds the GPU.
        wait_for(lambda: begun(store, LONG), "the long partition", PATIENCE)
        killed = kill_run(dev, LONG)
        kept = begun(store, LONG)
        assert 0 < kept < LONG_ROWS

        # Meanwhile the sensor finds a file.
        for key in SENSED:
            write(project, key)
        dev.start_sensor("tickets_new_partitions", "postgres-example")
        keys = [*LAUNCHED, *SENSED]
        wait_for(lambda: all(is_done(store, key) for key in keys), "all partitions", PATIENCE)
        wait_for(lambda: not dev.runs(statuses=list(UNFINISHED)), "the end of all runs", PATIENCE)
        for backfill in backfills:
            wait_for(lambda: dev.backfill_status(backfill).startswith("COMPLETED"), "the end")  # noqa: B023
        assert dev.runs(run_ids=[killed.run_id])[0].status == dg.DagsterRunStatus.FAILURE

        # What the dead run had finished was not done again, whoever ran the rest.
        again = [
            done[LONG]
            for run in dev.runs()
            if LONG in (done := dev.completions_metadata("tickets", run.run_id, "requests_run"))
        ]
        assert sum(again) <= LONG_ROWS - kept
        assert dev.runs(job_name="tickets_job")  # the sensor's, and the schedule's if it was due

        # A partition that goes missing is made by the schedule.
        shutil.rmtree(project / "data" / "bulk" / "tickets" / OUTPUT / "s1")
        wait_for(lambda: is_done(store, "s1"), "the schedule", PATIENCE)
        wait_for(lambda: not dev.runs(statuses=list(UNFINISHED)), "the end of all runs", PATIENCE)

        # No two steps have had the GPU at a time, and no place of the pool is left taken.
        times = dev.generation_times()
        assert len(times) >= len(keys)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times)), times
        pool = dev.instance.event_log_storage.get_concurrency_info("gpu")
        assert pool.claimed_slots == []
        for table in TABLES:
            assert dev.materialized("tickets", table) == set(keys), table
    rows = scan_table(str(project / "data" / "bulk"), "tickets").collect()
    counts = Counter(rows["partition"])
    assert counts == {key: LONG_ROWS if key == LONG else 3 for key in keys}
    assert not list((project / ".dagster_home").rglob("*.db"))  # all history is in PostgreSQL
