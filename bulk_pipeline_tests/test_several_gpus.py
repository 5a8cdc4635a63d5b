"""Two GPUs of one machine, through `dagster`: a GPU for each run, and for each slice.

The GPUs are those that a stand-in for nvidia-smi shows; the model runs on the CPU. It waits, once
its process has a GPU, until another process has one too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import torch

from bulk_pipeline.engine.loading import load_generator, settings_fingerprint
from bulk_pipeline.gpu_pool import GPU_POOL
from bulk_pipeline.spec import load_spec
from bulk_pipeline.stages.complete import complete_partition
from bulk_pipeline.stages.format import format_partition
from bulk_pipeline.stages.ingest import ingest_partition
from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, SLICES
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.factories import read_rows, stable

ROOT = Path(__file__).parent.parent
NUM_ROWS = 40
GPUS = ("GPU-aa-11", "GPU-bb-22")
TAKE = """
import json, os, sys
from bulk_pipeline import ExLlamaV2Resource
from bulk_pipeline.engine.request import Request, SamplingParams

settings = json.loads(sys.argv[1])
resource = ExLlamaV2Resource(device="cuda", cache_tokens=8192, **settings)
generator = resource.generator("tickets")
import torch

params = SamplingParams(temperature=0, max_new_tokens=8)
[answer] = generator.run([Request(0, list(range(300, 340)), params)])
taken = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
print(json.dumps([taken, torch.cuda.device_count(), list(answer.token_ids)]), flush=True)
sys.stdin.read()
resource.close()
"""
DEFINITIONS = """
import json, os, tempfile, time
from pathlib import Path

from bulk_pipeline import build_bulk_inference_defs, resources
from bulk_pipeline.engine import loading

folder = Path(__file__).parent
tempfile.tempdir = str(folder)  # where the locks are
fingerprint_extras, load_on_cpu = loading.fingerprint_extras, loading._load_on_cpu
loading.resolve_device = lambda settings: "cuda"
loading.device_extras = lambda settings, on_cpu: {}


def load(settings):
    (folder / "taken" / os.environ["CUDA_VISIBLE_DEVICES"]).touch(exist_ok=False)
    until = time.monotonic() + 200
    while len(list((folder / "taken").iterdir())) < 2:
        assert time.monotonic() < until, "no other process took a GPU meanwhile"
        time.sleep(0.05)
    return load_on_cpu(settings)


loading.load_generator = load
resources.check_taken = lambda taken: None
defs = build_bulk_inference_defs(json.loads((folder / "spec.json").read_text()), folder)
"""


@pytest.fixture
def project(tmp_path: Path, toy_float64: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "definitions.py").write_text(DEFINITIONS)
    for name in ("bin", "home", "rows", "taken"):
        (tmp_path / name).mkdir()
    for key in ("first", "second"):
        rows = (json.dumps({"text": f"{key} {number}"}) for number in range(NUM_ROWS))
        (tmp_path / "rows" / f"{key}.jsonl").write_text("\n".join(rows))
    smi = tmp_path / "bin" / "nvidia-smi"
    lines = [f"GPU {index}: NVIDIA H200 (UUID: {uuid})" for index, uuid in enumerate(GPUS)]
    smi.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    smi.chmod(0o755)
    settings = (ROOT / "dagster.yaml").read_text()
    assert "default_limit: 1" in settings
    (tmp_path / "home" / "dagster.yaml").write_text(
        settings.replace("default_limit: 1", "default_limit: 2")
    )
    monkeypatch.setenv("PATH", f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = {
        "name": "data",
        "source": {"path": str(tmp_path / "rows")},
        "prompt": {"column": "text"},
        "sampling": {"max_new_tokens": 6, "temperature": 1},
        "generator": {"model": str(toy_float64), "dtype": "float64", "cache_tokens": 1024,
                      "max_batch_size": 4},
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    return tmp_path


def change(project: Path, **changes: Any) -> dict[str, Any]:
    values = json.loads((project / "spec.json").read_text()) | changes
    (project / "spec.json").write_text(json.dumps(values))
    return values


def start(project: Path, key: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "dagster"), "asset", "materialize"]
    command += ["-f", "definitions.py", "--select", "*", "--partition", key]
    log = (project / f"{key}.log").open("wb")
    return subprocess.Popen(command, cwd=project, stdout=log, stderr=subprocess.STDOUT)


def check_ended(project: Path, key: str, run: subprocess.Popen[bytes]) -> None:
    assert run.wait(400) == 0, (project / f"{key}.log").read_text()[-4000:]


def expected_rows(project: Path, values: dict[str, Any], keys: Sequence[str]) -> list[Any]:
    """The rows as one process makes them, without Dagster."""
    values = values | {
        "output": {"root": str(project / "expected")},
        "generator": values["generator"] | {"device": "cpu"},
    }
    spec = load_spec(values)
    assert spec.generator is not None
    store, generator = Store(spec.output.root, "data"), load_generator(spec.generator)
    for key in keys:
        ingest_partition(spec, store, key)
        format_partition(spec, store, key, spec.generator)
        fingerprint = settings_fingerprint(spec.generator)
        complete_partition(spec, store, key, lambda: generator, fingerprint)
    return [rows_of(store, key) for key in keys]


def rows_of(store: Store, key: str) -> list[dict[str, Any]]:
    rows = read_rows(store, COMPLETIONS, key)
    return stable(rows, but=["request_key"])  # which is of another device


def table(project: Path) -> Store:
    return Store(str(project / "data" / "bulk"), "data")


@pytest.fixture
def model(exl2: Path) -> str:
    return str(exl2)


def take(model: str, **settings: Any) -> subprocess.Popen[str]:
    """A process that takes GPUs, answers, and keeps them until its input ends."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", TAKE, json.dumps({"model": model, **settings})]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def taken_by(process: subprocess.Popen[str]) -> list[Any]:
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    return json.loads(line or process.stderr.read())


@pytest.mark.gpu
def test_a_process_sees_the_gpu_that_it_took_and_no_other(model, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    first = take(model)
    try:
        taken, count, tokens = taken_by(first)
        assert (len(taken), count, len(tokens)) == (1, 1, 8)
        assert taken[0].startswith("GPU-")
        second = take(model, gpu_wait_seconds=0)
        _, error = second.communicate(timeout=300)
        assert second.returncode == 1
        assert "is held by a script of tickets" in error
    finally:
        first.kill()
        first.communicate()
    third = take(model, gpu_wait_seconds=0)
    assert taken_by(third) == [taken, count, tokens]
    third.communicate("")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_processes_take_a_gpu_each(model, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    processes = [take(model), take(model)]
    try:
        (one, _, tokens), (other, _, same) = map(taken_by, processes)
        assert len(one) == len(other) == 1
        assert one != other
        assert tokens == same
    finally:
        for process in processes:
            process.communicate("")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_takes_two_gpus(model, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    process = take(model, gpus=2)
    taken, count, _ = taken_by(process)
    process.communicate("")
    assert len(set(taken)) == count == 2


@pytest.mark.slow
def test_two_runs_take_a_gpu_each(project):
    values = change(project, partitions={"by": "file", "max_per_run": 1})
    with dg.DagsterInstance.from_config(str(project / "home")) as instance:
        instance.add_dynamic_partitions("data_partitions", ["first", "second"])
        instance.event_log_storage.initialize_concurrency_limit_to_default(GPU_POOL)
    runs = {key: start(project, key) for key in ("first", "second")}
    for key, run in runs.items():
        check_ended(project, key, run)
    assert sorted(path.name for path in (project / "taken").iterdir()) == list(GPUS)
    expected = expected_rows(project, values, ["first", "second"])
    assert [rows_of(table(project), key) for key in ("first", "second")] == expected


@pytest.mark.slow
def test_two_slices_of_a_partition_take_a_gpu_each(project):
    values = change(project, partitions={"by": "none", "slices": 2})
    check_ended(project, "all", start(project, "all"))
    assert sorted(path.name for path in (project / "taken").iterdir()) == list(GPUS)
    assert [rows_of(table(project), "all")] == expected_rows(project, values, ["all"])
    with dg.DagsterInstance.from_config(str(project / "home")) as instance:
        for name in (SLICES, COMPLETIONS, OUTPUT):
            assert instance.get_materialized_partitions(dg.AssetKey(["data", name])) == {"all"}
        (event,) = instance.fetch_materializations(
            dg.AssetKey(["data", COMPLETIONS]), limit=1
        ).records
        assert event.asset_materialization is not None
        metadata = event.asset_materialization.metadata
        assert metadata["requests_from_slices"].value == 2 * NUM_ROWS
        assert metadata["requests_run"].value == 0
