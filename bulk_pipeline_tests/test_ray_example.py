"""examples/ray on a Ray cluster of this machine: two workers, one of which dies in the middle."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from bulk_pipeline import scan_table
from bulk_pipeline.automation import RANGE_TAGS
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, TABLES
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.dev import Dev, dagster_dev, free_port, kill_tree, wait_for

pytest.importorskip("dagster_ray", reason="run it with: make ray")
pytest.importorskip("ray", reason="run it with: make ray")

ROOT = Path(__file__).parent.parent
KEYS = ["geography", "kitchen", "language", "science"]
ROWS = 192  # of a partition: enough that a worker can be killed in the middle of one
PATIENCE = 400  # seconds; each step is a process of its own, and CI has two cores
SETTINGS = (
    ('"max_new_tokens": 48', '"max_new_tokens": 160, "ignore_eos": True'),
    (  # float64: other batches, the same tokens
        '"data/models/smollm2-135m-instruct"',
        '"data/models/toy", "device": "cpu", "dtype": "float64", "max_batch_size": 4',
    ),
    ('"op_tags"', '"output": {"flush_rows": 4, "flush_seconds": 1},\n    "op_tags"'),
)


@pytest.fixture
def project(tmp_path: Path, toy_float64: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example, with the toy model and more rows."""
    folder = tmp_path / "ray"
    shutil.copytree(ROOT / "examples" / "ray", folder)
    (folder / "data" / "models").mkdir()
    (folder / "data" / "models" / "toy").symlink_to(toy_float64)
    text = (folder / "definitions.py").read_text()
    for old, new in SETTINGS:
        assert old in text
        text = text.replace(old, new)
    (folder / "definitions.py").write_text(text)
    for key in KEYS:
        rows = [json.dumps({"question": f"{key} {index}?"}) + "\n" for index in range(ROWS)]
        (folder / "data" / "questions" / f"{key}.jsonl").write_text("".join(rows))
    home = folder / ".dagster_home"
    home.mkdir()
    shutil.copy(folder / "dagster.yaml", home)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that runs no steps, and two workers with a GPU each, or so they say."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # what a cluster's nodes start is `dagster`, also where no environment is activated
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    dashboard = free_port()
    monkeypatch.setenv("RAY_DASHBOARD", f"http://127.0.0.1:{dashboard}")

    def node(**settings: Any) -> dict[str, Any]:
        # Nodes of one host, and of clusters beside this one, would share the agent's usual port.
        port = free_port()
        return {"object_store_memory": 80 << 20, "dashboard_agent_listen_port": port, **settings}

    head = {"include_dashboard": True, "dashboard_port": dashboard}
    cluster = Cluster(initialize_head=True, head_node_args=node(num_cpus=0, num_gpus=0, **head))
    for _ in range(2):
        cluster.add_node(**node(num_cpus=4, num_gpus=1))
    yield cluster
    cluster.shutdown()


def load(folder: Path) -> dict[str, Any]:
    """What the example's definitions.py defines."""
    namespace: dict[str, Any] = {"__file__": str(folder / "definitions.py"), "__name__": "example"}
    exec(compile((folder / "definitions.py").read_text(), "definitions.py", "exec"), namespace)
    return namespace


def answers(root: Path) -> pl.DataFrame:
    table = scan_table(str(root / "data" / "bulk"), "questions").collect()
    return table.sort("partition", "row_index", "sample_index")


def run_locally(project: Path, folder: Path) -> pl.DataFrame:
    """The answers of the same dataset, from one process."""
    from bulk_pipeline import build_bulk_inference_defs

    shutil.copytree(project, folder, symlinks=True, ignore=shutil.ignore_patterns("bulk", ".*"))
    definitions = dg.Definitions.merge(
        build_bulk_inference_defs(load(project)["QUESTIONS"], folder),
        dg.Definitions(executor=dg.in_process_executor),
    )
    job = definitions.resolve_job_def("questions_job")
    with dg.instance_for_test() as instance:
        instance.add_dynamic_partitions("questions_partitions", KEYS)
        for key in KEYS:
            assert job.execute_in_process(instance=instance, partition_key=key).success
    return answers(folder)


def num_stored(store: Store, key: str) -> int:
    """How many completions of an unfinished partition are stored."""
    manifest = store.partition(COMPLETIONS, key).manifest()
    return manifest.num_rows if manifest is not None and not manifest.complete else 0


def nodes_of_completions(client: Any, dev: Dev, statuses: tuple[str, ...]) -> dict[str, set[str]]:
    """The nodes on which the steps that hold a GPU run or ran, by partition."""
    keys = {run.run_id: run.tags[RANGE_TAGS[0]] for run in dev.runs()}
    found: dict[str, set[str]] = {}
    for job in client.list_jobs():
        is_completions = job.metadata.get("dagster/op", "").endswith(COMPLETIONS)
        if is_completions and job.status.value in statuses and job.driver_node_id:
            found.setdefault(keys[job.metadata["dagster/run-id"]], set()).add(job.driver_node_id)
    return found


@pytest.mark.cluster
def test_partitions_spread_and_survive_a_worker(project: Path, cluster: Any) -> None:
    from ray.job_submission import JobSubmissionClient

    store = Store(str(project / "data" / "bulk"), "questions")
    with dagster_dev(project) as dev:
        client = JobSubmissionClient(os.environ["RAY_DASHBOARD"])
        dev.instance.add_dynamic_partitions("questions_partitions", KEYS)
        backfill = dev.launch_backfill("questions", KEYS)

        # Two partitions are in generation at a time, on two workers, for there are two GPUs.
        wait_for(
            lambda: sum(num_stored(store, key) > 0 for key in KEYS) == 2, "two partitions", PATIENCE
        )
        running = nodes_of_completions(client, dev, ("RUNNING",))
        assert len(running) == 2, running
        (first,), (second,) = running.values()
        assert first != second

        # One of the workers dies, with what runs on it.
        victim = min(running, key=lambda key: num_stored(store, key))
        node = next(node for node in cluster.worker_nodes if node.node_id in running[victim])
        kill_tree(node.all_processes["raylet"][0].process.pid)  # and with it the jobs
        assert 0 < num_stored(store, victim) < ROWS
        cluster.remove_node(node, allow_graceful=False)
        wait_for(
            lambda: all(
                (m := store.partition(OUTPUT, key).manifest()) and m.complete for key in KEYS
            ),
            "all partitions",
            PATIENCE,
        )
        wait_for(lambda: dev.backfill_status(backfill).startswith("COMPLETED"), "the end")
        for table in TABLES:
            assert dev.materialized("questions", table) == set(KEYS), table

        # What the dead worker had finished of its partition was not done again.
        retries = [
            run.run_id for run in dev.runs() if run.parent_run_id
        ]  # other runs were there, too
        done_again = [
            found[victim]
            for found in (dev.completions_metadata("questions", i, "requests_run") for i in retries)
            if victim in found
        ]
        assert len(done_again) == 1
        assert 0 < done_again[0] < ROWS
        survivors = nodes_of_completions(client, dev, ("SUCCEEDED",))
        assert survivors.keys() == set(KEYS)
    there = answers(project)
    assert len(there) == ROWS * len(KEYS)
    local = run_locally(project, project.parent / "local")
    stable = ["partition", "row_id", "row_index", "question", "status", "completion", "request_key"]
    assert there.select(stable).equals(local.select(stable))
