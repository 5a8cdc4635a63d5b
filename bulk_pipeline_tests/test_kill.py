"""A whole `dagster` run, killed five times in the middle of a stage, is finished by the sixth."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bulk_pipeline.storage.schemas import COMPLETIONS, OUTPUT, PROMPTS, RAW_DATASET
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.factories import read_rows, stable

ROOT = Path(__file__).parent.parent
KEY, NUM_ROWS, FLUSH_ROWS = "all", 300, 5
PATIENCE_SECONDS = 240  # for a run to reach a stage, on a busy machine

DEFINITIONS = """
from pathlib import Path
import json
from bulk_pipeline import build_bulk_inference_defs
folder = Path(__file__).parent
defs = build_bulk_inference_defs(json.loads((folder / "spec.json").read_text()), folder)
"""


def write_project(folder: Path, model: Path) -> Store:
    folder.mkdir()
    (folder / "home").mkdir()
    (folder / "definitions.py").write_text(DEFINITIONS)
    rows = (json.dumps({"text": f"question {number}"}) for number in range(NUM_ROWS))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    spec = {
        "name": "data",
        "source": {"path": "rows.jsonl"},
        "prompt": {"column": "text"},
        "sampling": {"max_new_tokens": 8},
        "generator": {
            "model": str(model),
            "device": "cpu",
            "dtype": "float64",
            "max_batch_size": 4,
            "cache_tokens": 2048,
        },
        "output": {"root": str(folder / "tables"), "flush_rows": FLUSH_ROWS},
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    return Store(str(folder / "tables"), "data")


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start `dagster` in a process group of its own, which runs all steps itself."""
    command = [str(Path(sys.executable).parent / "dagster"), "asset", "materialize"]
    options = ["-f", "definitions.py", "--select", "*", "--partition", KEY]
    options += ["--config-json", '{"execution": {"config": {"in_process": {}}}}']
    return subprocess.Popen(
        [*command, *options],
        cwd=folder,
        env=os.environ | {"DAGSTER_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=(folder / "log").open("ab"),
        stderr=subprocess.STDOUT,
    )


def kill_when(run: subprocess.Popen[bytes], folder: Path, reached: Callable[[], bool]) -> None:
    """Kill the run and all of its processes as soon as it has reached a state."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        log = (folder / "log").read_text()[-3000:]
        assert run.poll() is None, f"the run ended before: {log}"
        assert time.monotonic() < until, f"the run did not come so far: {log}"
        time.sleep(0.002)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def is_complete(store: Store, table: str) -> bool:
    manifest = store.partition(table, KEY).manifest()
    return manifest is not None and manifest.complete


def num_stored(store: Store) -> int:
    manifest = store.partition(COMPLETIONS, KEY).manifest()
    return manifest.num_rows if manifest else 0


def stable_rows(store: Store) -> list[list[dict[str, Any]]]:
    return [stable(read_rows(store, table)) for table in (COMPLETIONS, OUTPUT)]


@pytest.mark.slow
def test_a_run_that_is_killed_five_times_is_finished(tmp_path, toy_float64):
    folder = tmp_path / "killed"
    store = write_project(folder, toy_float64)
    stages = [
        ("prompts", lambda: is_complete(store, RAW_DATASET)),
        *(
            (f"completions from {least}", lambda least=least: num_stored(store) >= least)
            for least in (20, 110, 200)
        ),
        ("output", lambda: is_complete(store, COMPLETIONS)),
    ]
    stored = []
    for stage, reached in stages:
        kill_when(start(folder), folder, reached)
        assert is_complete(store, RAW_DATASET), stage
        assert is_complete(store, PROMPTS) == (stage != "prompts"), stage
        assert is_complete(store, COMPLETIONS) == (stage == "output"), stage
        assert not is_complete(store, OUTPUT), stage
        stored.append(num_stored(store))
    assert stored[0] == 0
    assert stored == sorted(stored), "no answer was lost"
    assert stored[3] < NUM_ROWS, "the kills came in the middle"

    assert start(folder).wait(PATIENCE_SECONDS) == 0, (folder / "log").read_text()[-3000:]
    whole = tmp_path / "whole"
    expected = write_project(whole, toy_float64)
    assert start(whole).wait(PATIENCE_SECONDS) == 0, (whole / "log").read_text()[-3000:]
    assert stable_rows(store) == stable_rows(expected)
    assert len(read_rows(store, OUTPUT)) == NUM_ROWS
