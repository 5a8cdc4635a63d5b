"""The pipeline through Dagster's own doors, with the toy model: real runs, real processes."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
import yaml

from bulk_pipeline import build_bulk_inference_defs, scan_table
from bulk_pipeline.checks import CHECKS

ROOT = Path(__file__).parent.parent
KEYS = ("first", "second", "third")
TABLES = ("raw_dataset", "prompts", "completions", "output")
ROWS_IN_FILE = 4
WARNINGS = {"completions/length_rate"}  # of checks, on answers of the toy model


@pytest.fixture
def spec(tmp_path: Path, toy: Path) -> dict[str, Any]:
    """A dataset of three files; the last row of each has no text."""
    for number, key in enumerate(KEYS):
        rows = [{"text": f"question {number} {i}", "n": i} for i in range(ROWS_IN_FILE - 1)]
        lines = [json.dumps(row) for row in [*rows, {"text": None, "n": -1}]]
        path = tmp_path / "rows" / f"{key}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines))
    return {
        "name": "data",
        "source": {"path": "rows"},
        "partitions": {"by": "file"},
        "prompt": {"template": "{{ text }}"},
        "sampling": {"max_new_tokens": 6},
        "automation": {"settle_seconds": 0},
        "generator": {
            "model": str(toy),
            "device": "cpu",
            "cache_tokens": 1024,
            "max_batch_size": 4,
        },
    }


@pytest.fixture
def project(tmp_path: Path, spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dg project of ten lines that uses the component, and its DAGSTER_HOME."""
    package = tmp_path / "my_project"
    (package / "defs" / "data").mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(ROOT / "bulk_pipeline" / "definitions.py", package / "definitions.py")
    (package / "defs" / "data" / "defs.yaml").write_text(
        yaml.safe_dump({"type": "bulk_pipeline.BulkInferenceComponent", "attributes": spec})
    )
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "my-project"\nversion = "0"\n'
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "my_project"\n'
    )
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(ROOT / "dagster.yaml", home)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    return tmp_path


def run_command(project: Path, *command: str) -> str:
    done = start_command(project, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_command(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    bin_folder = Path(sys.executable).parent
    return subprocess.run(
        [str(bin_folder / command[0]), *command[1:]],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=240,
    )


def sync(project: Path) -> str:
    return run_command(
        project, "bulk-pipeline", "partitions", "sync", "-m", "my_project.definitions"
    )


def check_output(project: Path, keys: tuple[str, ...]) -> pl.DataFrame:
    """The output holds each row of `keys` once, in order, and nothing else."""
    table = scan_table(str(project / "data" / "bulk"), "data").collect()
    assert Counter(table["partition"]) == dict.fromkeys(keys, ROWS_IN_FILE)
    for key in keys:
        part = table.filter(pl.col("partition") == key)
        assert part["n"].to_list() == [0, 1, 2, -1]
        assert part["status"].to_list()[-1] == "invalid"
        assert set(part["status"][:-1]) <= {"stop", "length"}
        assert (part["completion_tokens"][:-1] > 0).all()
    return table


def check_events(instance: dg.DagsterInstance, keys: tuple[str, ...]) -> None:
    """Each partition of each asset is materialised; one model load a run; all checks passed."""
    for table in TABLES:
        asset = dg.AssetKey(["data", table])
        assert instance.get_materialized_partitions(asset) == set(keys), table
    records = instance.fetch_materializations(dg.AssetKey(["data", "completions"]), limit=100)
    loads: dict[str, set[int]] = {}
    for record in records.records:
        materialization = record.asset_materialization
        assert materialization is not None
        if "model_loads" in materialization.metadata:
            loads.setdefault(record.run_id, set()).add(
                materialization.metadata["model_loads"].value
            )
    assert loads
    assert all(counts == {1} for counts in loads.values()), loads


def test_materialize_in_process(spec, tmp_path):
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        synced = defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=instance)
        assert synced.output_for_node("data_find_partitions") == list(KEYS)
        result = dg.materialize(
            list(defs.assets or []),
            instance=instance,
            resources=defs.resources,
            tags={
                "dagster/asset_partition_range_start": KEYS[0],
                "dagster/asset_partition_range_end": KEYS[-1],
            },
        )
        assert result.success
        check_events(instance, KEYS)
        found = result.get_asset_check_evaluations()
        evaluations = {f"{e.asset_key.path[-1]}/{e.check_name}": e for e in found}
        assert {name for name, check in evaluations.items() if not check.passed} == WARNINGS
        assert set(evaluations) == {
            f"{table}/{check.name}" for table, checks in CHECKS.items() for check in checks
        }
        error_rate = evaluations["completions/error_rate"].metadata["error_rate"].value
        assert error_rate == 1 / ROWS_IN_FILE
        output = instance.fetch_materializations(dg.AssetKey(["data", "output"]), limit=1)
        metadata = output.records[0].asset_materialization.metadata
        assert metadata["dagster/partition_row_count"].value == ROWS_IN_FILE
        columns = {column.name for column in metadata["dagster/column_schema"].schema.columns}
        assert {"text", "n", "completion", "status"} <= columns
        assert "question" in metadata["preview"].value
    check_output(tmp_path, KEYS)


def range_tags(first: str, last: str) -> dict[str, str]:
    return {
        "dagster/asset_partition_range_start": first,
        "dagster/asset_partition_range_end": last,
    }


def materialize(
    defs: dg.Definitions,
    instance: dg.DagsterInstance,
    tables: tuple[str, ...] = TABLES,
    keys: tuple[str, str] = (KEYS[0], KEYS[-1]),
) -> dg.ExecuteInProcessResult:
    return dg.materialize(
        list(defs.assets or []),
        instance=instance,
        resources=defs.resources,
        selection=[dg.AssetKey(["data", table]) for table in tables],
        raise_on_error=False,
        tags=range_tags(*keys),
    )


def failure(result: dg.ExecuteInProcessResult, table: str) -> str:
    found = result.failure_data_for_node(f"data__{table}")
    assert found is not None, f"{table} did not fail"
    assert found.user_failure_data is not None
    return found.user_failure_data.description or ""


def materialized(instance: dg.DagsterInstance, table: str) -> set[str]:
    return instance.get_materialized_partitions(dg.AssetKey(["data", table]))


def test_a_bad_partition_is_named_and_the_others_are_finished(spec, tmp_path):
    bad = tmp_path / "rows" / "second.jsonl"
    rows = bad.read_text()
    bad.write_text('{"text": "fine"}\n{"text": "torn')
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=instance)
        result = materialize(defs, instance)
        assert not result.success
        assert failure(result, "output").startswith(
            "1 of 3 partitions failed: second: raw_dataset: "
        )
        assert "second.jsonl line 2" in failure(result, "output")
        for table in TABLES:
            assert materialized(instance, table) == {"first", "third"}, table
        check_output(tmp_path, ("first", "third"))
        bad.write_text(rows)
        result = materialize(defs, instance, keys=("second", "second"))
        assert result.success
        check_events(instance, KEYS)
    check_output(tmp_path, KEYS)


@pytest.mark.parametrize(
    ("redo", "requests"), [("none", 0), ("all", ROWS_IN_FILE - 1), ("error, loop", 0)]
)
def test_a_run_may_ask_to_redo_answers(spec, tmp_path, redo, requests):
    defs = build_bulk_inference_defs({**spec, "partitions": {"by": "none"}}, tmp_path)
    (tmp_path / "rows" / "second.jsonl").unlink()
    (tmp_path / "rows" / "third.jsonl").unlink()
    config = {"ops": {"data__completions": {"config": {"redo": redo}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        for run_config in ({}, config):
            result = dg.materialize(
                list(defs.assets or []), instance=instance, resources=defs.resources,
                partition_key="all", run_config=run_config,
            )  # fmt: skip
            assert result.success
        latest = instance.fetch_materializations(dg.AssetKey(["data", "completions"]), limit=1)
        metadata = latest.records[0].asset_materialization.metadata
        assert metadata["requests_run"].value == requests


def test_slices_leave_out_a_bad_partition(spec, tmp_path):
    (tmp_path / "rows" / "second.jsonl").write_text('{"text": "torn')
    defs = build_bulk_inference_defs({**spec, "partitions": {"by": "file", "slices": 2}}, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=instance)
        result = defs.resolve_job_def("data_job").execute_in_process(
            instance=instance, tags=range_tags(KEYS[0], KEYS[-1]), raise_on_error=False
        )
        assert failure(result, "output").startswith("1 of 3 partitions failed: second: ")
        for table in TABLES:
            assert materialized(instance, table) == {"first", "third"}, table
        assert metadata_of_completions(instance, "requests_from_slices") == 3
        steps = {event.step_key for event in result.all_events if event.is_step_success}
        answered = {step for step in steps if "answer_slice" in str(step)}
        assert answered == {
            f"data__slices.data__answer_slice[{place}_slice_{number}_of_2]"
            for place in (0, 2)
            for number in (1, 2)
        }
    check_output(tmp_path, ("first", "third"))


def test_a_redo_is_made_in_slices(spec, tmp_path):
    defs = build_bulk_inference_defs({**spec, "partitions": {"by": "none", "slices": 2}}, tmp_path)
    config = {"ops": {"data__completions": {"config": {"redo": "all"}}}}
    with dg.DagsterInstance.ephemeral() as instance:
        for run_config in ({}, config):
            job = defs.resolve_job_def("data_job")
            assert job.execute_in_process(
                run_config, instance=instance, partition_key="all"
            ).success
            assert metadata_of_completions(instance, "requests_from_slices") == 9
            assert metadata_of_completions(instance, "requests_run") == 0


def metadata_of_completions(instance: dg.DagsterInstance, name: str) -> Any:
    latest = instance.fetch_materializations(dg.AssetKey(["data", "completions"]), limit=1)
    materialization = latest.records[0].asset_materialization
    assert materialization is not None
    return materialization.metadata[name].value


def test_the_metadata_has_no_noise(spec, tmp_path):
    defs = build_bulk_inference_defs({**spec, "output": {"formats": ["jsonl"]}}, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=instance)
        result = materialize(defs, instance, keys=("first", "first"))
    shown = {
        table: next(
            found.metadata
            for found in result.asset_materializations_for_node(f"data__{table}")
            if "path" in found.metadata
        )
        for table in TABLES
    }
    values = [value.value for metadata in shown.values() for value in metadata.values()]
    floats = [number for number in values if isinstance(number, float)]
    assert floats
    assert all(number == float(f"{number:.4g}") for number in floats)
    assert isinstance(shown["output"]["path_jsonl"], dg.PathMetadataValue)
    assert {"id_columns", "row_errors"} <= shown["raw_dataset"].keys()
    assert [] not in values
    assert {} not in values


def test_a_bad_partition_fails_the_last_step_that_the_run_has(spec, tmp_path):
    (tmp_path / "rows" / "second.jsonl").write_text('{"text": "torn')
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=instance)
        result = materialize(defs, instance, ("raw_dataset",))
        assert failure(result, "raw_dataset").startswith("1 of 3 partitions failed: second: ")
        result = materialize(defs, instance, ("raw_dataset", "prompts"))
        assert failure(result, "prompts").startswith("1 of 3 partitions failed: second: ")
        assert materialized(instance, "prompts") == {"first", "third"}
        result = materialize(defs, instance, keys=("second", "second"))
        assert failure(result, "raw_dataset").startswith("1 of 1 partitions failed: second: ")
        assert materialized(instance, "raw_dataset") == {"first", "third"}


def test_partitions_that_fail_in_different_steps_are_all_named(spec, tmp_path):
    spec = {**spec, "output": {"max_error_rate": 0.3}}  # one of four rows has no text
    (tmp_path / "rows" / "second.jsonl").write_text('{"text": null}\n{"text": "fine"}\n')
    (tmp_path / "rows" / "third.jsonl").write_text('{"text": "torn')
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=instance)
        result = materialize(defs, instance)
        reason = failure(result, "output")
        assert reason.startswith("2 of 3 partitions failed: second: completions: ")
        assert "third: raw_dataset: " in reason
        assert materialized(instance, "output") == {"first"}
        assert materialized(instance, "prompts") == {"first", "second"}


def test_a_range_without_partitions_fails(spec, tmp_path):
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=instance)
        result = dg.materialize(
            list(defs.assets or []),
            instance=instance,
            resources=defs.resources,
            raise_on_error=False,
            tags={
                "dagster/asset_partition_range_start": KEYS[-1],
                "dagster/asset_partition_range_end": KEYS[0],
            },
        )
        assert not result.success


def test_a_sensor_run_covers_its_range(spec, tmp_path):
    """The tags of the sensor's request make one run of the dataset's job over the range."""
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        defs.resolve_job_def("data_sync_partitions").execute_in_process(instance=instance)
        result = defs.resolve_job_def("data_job").execute_in_process(
            instance=instance,
            tags={
                "dagster/asset_partition_range_start": KEYS[0],
                "dagster/asset_partition_range_end": KEYS[1],
            },
        )
        assert result.success
        check_events(instance, KEYS[:2])
    check_output(tmp_path, KEYS[:2])


def test_an_unpartitioned_dataset_has_one_partition(spec, tmp_path):
    spec = {**spec, "partitions": {"by": "none"}}
    defs = build_bulk_inference_defs(spec, tmp_path)
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize(
            list(defs.assets or []), instance=instance, resources=defs.resources,
            partition_key="all",
        )  # fmt: skip
        assert result.success
    table = scan_table(str(tmp_path / "data" / "bulk"), "data").collect()
    assert table.height == len(KEYS) * ROWS_IN_FILE


@pytest.mark.slow
def test_command_lines_with_a_partition_and_with_a_range(project):
    assert "3 new partitions: first, second, third" in sync(project)
    assert "0 new partitions" in sync(project)
    materialize = ("dagster", "asset", "materialize", "-m", "my_project.definitions")
    run_command(project, *materialize, "--select", "group:data", "--partition", "second")
    check_output(project, ("second",))
    launch = ("dg", "launch", "--assets", "group:data")
    run_command(project, *launch, "--partition-range", "first...third")
    check_output(project, KEYS)
    with dg.DagsterInstance.from_config(str(project / "home")) as instance:
        check_events(instance, KEYS)
        assert len(instance.get_runs()) == 4  # two of them of the sync job
    shown = run_command(project, "bulk-pipeline", "show", "data", "-m", "my_project.definitions")
    assert "12 rows" in shown
    assert str(project / "data" / "bulk" / "data" / "output") in shown


@pytest.mark.slow
def test_command_line_with_a_bad_partition_among_five(project):
    for key in ("fifth", "fourth"):
        shutil.copy(project / "rows" / "first.jsonl", project / "rows" / f"{key}.jsonl")
    bad = project / "rows" / "second.jsonl"
    rows = bad.read_text()
    bad.write_text('{"text": "torn')
    sync(project)
    command = ("dagster", "asset", "materialize", "-m", "my_project.definitions")
    command += ("--select", "group:data", "--partition-range")
    done = start_command(project, *command, "fifth...third")
    assert done.returncode != 0
    assert "1 of 5 partitions failed: second: raw_dataset: " in done.stdout + done.stderr
    good = ("fifth", "first", "fourth", "third")
    status = run_command(
        project, "bulk-pipeline", "partitions", "status", "-m", "my_project.definitions"
    )
    assert status.splitlines() == [
        "data: 5 partitions, 1 missing or stale",
        "  second: unfinished: raw_dataset",
    ]
    with dg.DagsterInstance.from_config(str(project / "home")) as instance:
        assert instance.get_runs(limit=1)[0].status == dg.DagsterRunStatus.FAILURE
        for table in TABLES:
            assert materialized(instance, table) == set(good), table
        bad.write_text(rows)
        run_command(project, *command, "second...second")
        for table in TABLES:
            assert materialized(instance, table) == {*good, "second"}, table
