import os
import shutil
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.launcher import RunLauncher
from dagster._serdes import ConfigurableClass

from bulk_pipeline.gpu_pool import GPU_POOL, pool_problem, release_dead_runs

CLAIM = """
import os, sys
import dagster as dg
from bulk_pipeline.gpu_pool import GPU_POOL

@dg.op
def work():
    pass

@dg.job
def job():
    work()

with dg.DagsterInstance.from_config(sys.argv[1]) as instance:
    run = instance.create_run_for_job(job)
    event = dg.DagsterEvent(
        event_type_value="PIPELINE_START", job_name="job", message="start", pid=os.getpid()
    )
    instance.report_dagster_event(event, run.run_id)
    claim = instance.event_log_storage.claim_concurrency_slot(GPU_POOL, run.run_id, "work")
    assert claim.is_claimed
    print(run.run_id, flush=True)
    if len(sys.argv) > 2:
        sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).parent.parent / "dagster.yaml", tmp_path)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        instance.event_log_storage.initialize_concurrency_limit_to_default(GPU_POOL)
    return tmp_path


def claim(home: Path, *stays: str) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(home), *stays],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_dead_run_gives_its_place_back_and_is_failed(home):
    process, run_id = claim(home, "stays")
    process.kill()
    process.wait()
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert len(instance.event_log_storage.get_concurrency_info(GPU_POOL).claimed_slots) == 1
        assert release_dead_runs(instance) == [run_id]
        assert instance.event_log_storage.get_concurrency_info(GPU_POOL).claimed_slots == []
        run = instance.get_run_by_id(run_id)
        assert run is not None
        assert run.status == dg.DagsterRunStatus.FAILURE
        assert release_dead_runs(instance) == []


def test_a_living_run_keeps_its_place(home):
    process, _ = claim(home, "stays")
    try:
        with dg.DagsterInstance.from_config(str(home)) as instance:
            assert release_dead_runs(instance) == []
            info = instance.event_log_storage.get_concurrency_info(GPU_POOL)
            assert len(info.claimed_slots) == 1
    finally:
        process.kill()
        process.wait()


def test_runs_that_are_launched_elsewhere_are_not_judged_by_this_machine_s_processes(home):
    process, _ = claim(home, "stays")
    process.kill()
    process.wait()
    with (home / "dagster.yaml").open("a") as settings:
        settings.write(
            "run_launcher: {module: bulk_pipeline_tests.test_gpu_pool, class: OtherLauncher}\n"
        )
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert release_dead_runs(instance) == []
        assert len(instance.event_log_storage.get_concurrency_info(GPU_POOL).claimed_slots) == 1


class OtherLauncher(RunLauncher, ConfigurableClass):
    """A run launcher that is not Dagster's own, as that of Ray or Kubernetes."""

    inst_data = launch_run = terminate = None

    def __init__(self, inst_data=None):
        self.inst_data = inst_data
        super().__init__()

    @classmethod
    def config_type(cls):
        return {}

    @classmethod
    def from_config_value(cls, inst_data, config_value):
        return cls(inst_data)


@pytest.mark.parametrize(
    ("limit", "gpus", "each", "problem"),
    [
        (None, 1, 1, None),
        (None, 4, 1, "lets 1 at once, and here are 4 GPUs for steps that take 1: 3 idle; dagster"),
        (None, 4, 4, None),
        (4, 4, 1, None),
        (2, 4, 2, None),
        (4, 4, 2, "lets 4 at once, and here are 4 GPUs for steps that take 2: the others hold"),
        (2, 1, 2, None),  # which the machine itself does not do
    ],
)
def test_a_limit_that_does_not_fit_the_gpus_is_told(home, limit, gpus, each, problem):
    with dg.DagsterInstance.from_config(str(home)) as instance:
        if limit is not None:
            instance.event_log_storage.set_concurrency_slots(GPU_POOL, limit)
        found = pool_problem(instance, gpus, each)
        assert (problem or "") in (found or "")
        assert (problem is None) == (found is None), found
        if found:
            assert f"dagster instance concurrency set gpu {gpus // each}" in found


def test_a_pool_without_a_limit_is_told(tmp_path):
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert "the pool gpu has no limit" in (pool_problem(instance, 2, 1) or "")
