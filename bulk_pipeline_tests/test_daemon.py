"""One `dagster dev` with its daemon: a sensor, a schedule, a backfill that is stopped, one GPU."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from bulk_pipeline import load_spec
from bulk_pipeline.automation import RANGE_TAGS, UNFINISHED
from bulk_pipeline.engine.loading import settings_fingerprint
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.format import format_partition
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.stages.join import join_partition
from bulk_pipeline.stages.staleness import find_missing_or_stale
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, TABLES
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.dev import LOCATION, dagster_dev, wait_for
from bulk_pipeline_tests.factories import EchoGenerator

ROOT = Path(__file__).parent.parent
LONG_ROWS = 500  # of the partition in which the backfill is stopped, while others come
DATASETS: dict[str, dict[str, Any]] = {
    "stopped": {
        "sampling": {"max_new_tokens": 120, "ignore_eos": True},
        "output": {"flush_rows": 4, "flush_seconds": 1},
    },
    "watched": {"automation": {"sensor_seconds": 1, "settle_seconds": 0}},
    "nightly": {"automation": {"mode": "none", "settle_seconds": 0, "cron": "* * * * *"}},
}


def write(root: Path, dataset: str, key: str, num_rows: int = 2) -> None:
    path = root / dataset / f"{key}.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = [json.dumps({"text": f"{dataset} {key} {index}"}) for index in range(num_rows)]
    path.write_text("\n".join(rows) + "\n")


def values(name: str, model: Path) -> dict[str, Any]:
    return {
        "name": name,
        "source": {"path": name},
        "partitions": {"by": "file"},
        "prompt": {"column": "text"},
        "sampling": {"max_new_tokens": 6},
        "generator": {"model": str(model), "device": "cpu", "max_batch_size": 4},
    } | DATASETS[name]


@pytest.fixture
def project(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the three datasets, and its DAGSTER_HOME."""
    package = tmp_path / "my_project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "definitions.py").write_text((ROOT / "bulk_pipeline/definitions.py").read_text())
    for name in DATASETS:
        folder = package / "defs" / name
        folder.mkdir(parents=True)
        component = "bulk_pipeline.BulkInferenceComponent"
        attributes = values(name, toy)
        (folder / "defs.yaml").write_text(
            yaml.safe_dump({"type": component, "attributes": attributes})
        )
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "my-project"\nversion = "0"\n'
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "my_project"\n'
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    return tmp_path


def run_range(run: dg.DagsterRun) -> tuple[str, str]:
    return run.tags[RANGE_TAGS[0]], run.tags[RANGE_TAGS[1]]


def open_dataset(project: Path, name: str, toy: Path) -> tuple[BulkInferenceSpec, Store]:
    spec = load_spec(values(name, toy)).resolve_paths(project)
    return spec, Store(spec.output.root, name)


def finish_outside_dagster(spec: BulkInferenceSpec, store: Store, key: str) -> None:
    assert spec.generator is not None
    ingest_partition(spec, store, key)
    format_partition(spec, store, key, spec.generator)
    fingerprint = settings_fingerprint(spec.generator)
    complete_partition(spec, store, key, EchoGenerator, fingerprint)
    join_partition(spec, store, key)


@pytest.mark.slow
def test_sensor_schedule_backfill_and_the_gpu_pool(project: Path, toy: Path) -> None:
    keys = ["p1", "p2", "p3", "p4", "p5"]
    for key in keys:
        write(project, "stopped", key, LONG_ROWS if key == "p3" else 2)
    for key in ("one", "three", "two"):
        write(project, "watched", key)
    for key in ("a", "b", "c", "d"):
        write(project, "nightly", key)
    nightly, nightly_store = open_dataset(project, "nightly", toy)
    _, stopped_store = open_dataset(project, "stopped", toy)
    finish_outside_dagster(nightly, nightly_store, "b")
    with dagster_dev(project, "-m", LOCATION) as dev:
        # A backfill of five partitions, and meanwhile a sensor that finds three new files.
        dev.instance.add_dynamic_partitions("stopped_partitions", keys)
        first = dev.launch_backfill("stopped", keys)
        dev.start_sensor("watched_new_partitions")
        wait_for(dev.num_waiting_for_gpu, "a second step that waits for the GPU")

        # The backfill is stopped in the middle of the third partition.
        wait_for(lambda: is_begun(stopped_store, "p3"), "the middle of p3")
        (run,) = dev.runs(tags={"dagster/backfill": first})
        dev.terminate(run.run_id)
        wait_for(lambda: dev.runs(run_ids=[run.run_id])[0].is_finished, "the backfill's end")
        assert dev.runs(run_ids=[run.run_id])[0].status == dg.DagsterRunStatus.CANCELED
        assert dev.materialized("stopped", COMPLETIONS) == {"p1", "p2"}
        stored = stopped_store.partition(COMPLETIONS, "p3").manifest()
        assert stored is not None
        assert 0 < stored.num_rows < LONG_ROWS

        # Its re-run is one run too, and does only the rest.
        second = dev.launch_backfill("stopped", keys)
        wait_for(lambda: dev.backfill_status(second).startswith("COMPLETED"), "the re-run")
        assert dev.backfill_status(second) == "COMPLETED_SUCCESS"
        (run,) = dev.runs(tags={"dagster/backfill": second})
        left = {"p1": 0, "p2": 0, "p3": LONG_ROWS - stored.num_rows, "p4": 2, "p5": 2}
        assert dev.completions_metadata("stopped", run.run_id, "requests_run") == left
        loads = dev.completions_metadata("stopped", run.run_id, "model_loads")
        assert loads == dict.fromkeys(keys, 1)
        for table in TABLES:
            assert dev.materialized("stopped", table) == set(keys), table

        # The sensor asked for one run over the new files.
        wait_for(lambda: len(dev.materialized("watched", OUTPUT)) == 3, "the watched dataset")
        (run,) = dev.runs(job_name="watched_job")
        assert run_range(run) == ("one", "two")

        # The schedule ran what was missing, in contiguous ranges, and then nothing.
        wait_for(lambda: not find_missing_or_stale(nightly, nightly_store), "the nightly dataset")
        wait_for(lambda: not dev.runs(statuses=list(UNFINISHED)), "the end of all runs")
        runs = dev.runs(job_name="nightly_job")
        assert sorted(map(run_range, runs)) == [("a", "a"), ("c", "d")]

        # No two steps have had the GPU at a time.
        times = dev.generation_times()
        assert len(times) == 5
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times)), times


def is_begun(store: Store, key: str) -> bool:
    """Whether completions of an unfinished partition are stored."""
    manifest = store.partition(COMPLETIONS, key).manifest()
    return manifest is not None and not manifest.complete and manifest.num_rows > 0
