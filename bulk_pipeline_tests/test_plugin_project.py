"""The example project: another Dagster project that uses this package as a plugin."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from bulk_pipeline import scan_table

ROOT = Path(__file__).parent.parent
RUN = """
import dagster as dg
from plugin_project.definitions import defs

definitions = defs()
with dg.DagsterInstance.get() as instance:
    for job in ("answer_tickets", "reviews_job"):
        definitions.resolve_job_def(job).execute_in_process(instance=instance, partition_key="all")
"""


@pytest.fixture
def project(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example, with the toy model where it expects the small one."""
    folder = tmp_path / "plugin_project"
    shutil.copytree(ROOT / "examples" / "plugin_project", folder)
    (folder / "data" / "models").mkdir()
    (folder / "data" / "models" / "smollm2-135m-instruct").symlink_to(toy)
    (folder / ".dagster_home").mkdir()
    shutil.copy(ROOT / "dagster.yaml", folder / ".dagster_home")
    monkeypatch.setenv("DAGSTER_HOME", str(folder / ".dagster_home"))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    return folder


def run(project: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dagster_finds_the_component_and_the_definitions(project):
    dg = str(Path(sys.executable).with_name("dg"))
    assert "bulk_pipeline.BulkInferenceComponent" in run(project, dg, "list", "components")
    run(project, dg, "check", "defs")


def test_both_datasets_run_between_the_project_s_own_assets(project):
    run(project, sys.executable, "-c", RUN)
    lengths = pl.read_csv(project / "data" / "answer_lengths.csv")
    assert lengths["number"].to_list() == ["T-1", "T-2", "T-3"]
    reviews = scan_table(str(project / "data" / "bulk"), "reviews").collect()
    assert reviews["product"].to_list() == ["lamp", "lamp", "kettle", "kettle"]
    assert set(reviews["status"]) <= {"stop", "length"}
