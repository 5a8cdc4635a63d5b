"""A running `dagster dev` with its daemon, for tests that drive Dagster as a user would."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import psutil

from bulk_pipeline.gpu_pool import GPU_POOL
from bulk_pipeline.storage.schemas import COMPLETIONS, TABLES

LOCATION = "my_project.definitions"


class Dev:
    """A running `dagster dev`, asked through GraphQL, and its instance."""

    def __init__(self, url: str, instance: dg.DagsterInstance):
        self.url, self.instance = url, instance

    def ask(self, query: str, **variables: Any) -> Any:
        """The only field of the answer."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
        assert "errors" not in found, found
        (value,) = found["data"].values()
        return value

    def launch_backfill(self, dataset: str, keys: list[str]) -> str:
        answer = self.ask(
            """mutation($params: LaunchBackfillParams!) {
              launchPartitionBackfill(backfillParams: $params) {
                __typename ... on LaunchBackfillSuccess { backfillId }
                ... on PythonError { message } } }""",
            params={
                "assetSelection": [{"path": [dataset, table]} for table in TABLES],
                "partitionNames": keys,
            },
        )
        assert answer["__typename"] == "LaunchBackfillSuccess", answer
        return answer["backfillId"]

    def terminate(self, run_id: str) -> None:
        answer = self.ask(
            """mutation($id: String!) { terminateRun(runId: $id) {
              __typename ... on PythonError { message } } }""",
            id=run_id,
        )
        assert answer["__typename"] == "TerminateRunSuccess", answer

    def start_sensor(self, name: str, location: str = LOCATION) -> None:
        answer = self.ask(
            """mutation($selector: SensorSelector!) { startSensor(sensorSelector: $selector) {
              __typename ... on PythonError { message } } }""",
            selector={
                "repositoryName": "__repository__",
                "repositoryLocationName": location,
                "sensorName": name,
            },
        )
        assert answer["__typename"] == "Sensor", answer

    def backfill_status(self, backfill_id: str) -> str:
        query = """query($id: String!) { partitionBackfillOrError(backfillId: $id) {
              ... on PartitionBackfill { status } } }"""
        return self.ask(query, id=backfill_id)["status"]

    def runs(self, **filters: Any) -> list[dg.DagsterRun]:
        return list(self.instance.get_runs(filters=dg.RunsFilter(**filters)))

    def num_waiting_for_gpu(self) -> int:
        return self.instance.event_log_storage.get_concurrency_info(GPU_POOL).pending_step_count

    def generation_times(self) -> list[tuple[float, float]]:
        """When steps that hold the GPU began and ended, of all runs, in order."""
        times = []
        for run in self.runs():
            for step in self.instance.get_run_step_stats(run.run_id):
                if step.step_key.endswith(COMPLETIONS) and step.start_time and step.end_time:
                    times.append((step.start_time, step.end_time))
        return sorted(times)

    def materialized(self, dataset: str, table: str) -> set[str]:
        return self.instance.get_materialized_partitions(dg.AssetKey([dataset, table]))

    def completions_metadata(self, dataset: str, run_id: str, name: str) -> dict[str, int]:
        """A number of the completions that a run materialised, by partition."""
        records = self.instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=dg.AssetKey([dataset, COMPLETIONS])), limit=1000
        ).records
        found = {}
        for record in records:
            materialization = record.asset_materialization
            if record.run_id != run_id or materialization is None:
                continue
            if name in materialization.metadata:
                found[materialization.partition] = materialization.metadata[name].value
        return found


@contextmanager
def dagster_dev(project: Path, *arguments: str) -> Iterator[Dev]:
    """Start it in the project's folder; when the block ends, all its processes are gone.

    The instance is that of DAGSTER_HOME.
    """
    port = free_port()
    command = [str(Path(sys.executable).parent / "dagster"), "dev", *arguments]
    with (
        dg.DagsterInstance.get() as instance,
        (project / "dev.log").open("w") as log,
    ):
        instance.get_runs()  # makes the databases, before several processes try to
        instance.get_dynamic_partitions("any")
        instance.all_instigator_state()
        process = subprocess.Popen(
            [*command, "--port", str(port), "--host", "127.0.0.1"],
            cwd=project,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            dev = Dev(f"http://127.0.0.1:{port}/graphql", instance)
            wait_for(lambda: dev.ask("{ version }"), "dagster dev")
            yield dev
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kill_tree(pid: int) -> None:
    """Kill a process and all that it started, at once."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except urllib.error.URLError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"{what}: not within {seconds} s")
