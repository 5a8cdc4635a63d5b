"""Measure what Dagster costs around the work: seconds of a run, and of each partition in it.

    PYTHONPATH=. python benchmarks/dagster_overhead.py

Runs of `dagster asset materialize` over one and over several partitions of two rows, with a toy
model on the CPU: nearly all of their time is starting processes, importing, and Dagster's events.
A run has four steps, each in a process of its own. Results: benchmarks/dagster_overhead.json.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dagster as dg

from bulk_pipeline_tests.toy import toy_model

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_suffix(".json")
DEFINITIONS = """
import json
from pathlib import Path
from bulk_pipeline import build_bulk_inference_defs
folder = Path(__file__).parent
defs = build_bulk_inference_defs(json.loads((folder / "spec.json").read_text()), folder)
"""


def write_project(folder: Path, keys: list[str]) -> None:
    """A dataset of small files, and its DAGSTER_HOME."""
    (folder / "rows").mkdir()
    (folder / "home").mkdir()
    for key in keys:
        lines = (json.dumps({"text": f"{key} {number}"}) for number in range(2))
        (folder / "rows" / f"{key}.jsonl").write_text("\n".join(lines))
    (folder / "definitions.py").write_text(DEFINITIONS)
    spec = {
        "name": "data",
        "source": {"path": "rows"},
        "partitions": {"by": "file"},
        "prompt": {"column": "text"},
        "sampling": {"max_new_tokens": 2},
        "generator": {"model": str(toy_model(folder / "toy")), "device": "cpu"},
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    shutil.copy(ROOT / "dagster.yaml", folder / "home")
    with dg.DagsterInstance.from_config(str(folder / "home")) as instance:
        instance.add_dynamic_partitions("data_partitions", keys)


def measure(folder: Path, first: str, last: str) -> dict[str, float]:
    """Wall-clock and processor seconds of a run over a range of partitions."""
    command = [str(Path(sys.executable).parent / "dagster"), "asset", "materialize"]
    command += ["-f", "definitions.py", "--select", "*", "--partition-range", f"{first}...{last}"]
    environment = os.environ | {"DAGSTER_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 2), "processor_seconds": round(used, 2)}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--partitions", type=int, default=10, help="of the larger run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    keys = [f"p{number:03d}" for number in range(options.partitions + 1)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_project(folder, keys)
        measure(folder, keys[0], keys[0])  # what is made on first use
        one = measure(folder, keys[0], keys[0])
        many = measure(folder, keys[1], keys[-1])
    found: dict[str, Any] = {
        "about": {
            "python": platform.python_version(),
            "dagster": dg.__version__,
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
        },
        "partitions": options.partitions,
        "run_of_one": one,
        "run_of_many": many,
    }
    options.results.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
