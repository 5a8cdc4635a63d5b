"""Estimate what a dataset costs on so many GPUs, from what was measured: a calculation.

    python benchmarks/cost.py --rows 10000000 --gpus 1 8 64

A partition is a run of its own, and a GPU answers one at a time. A GPU is taken from the start of
the step `completions` to its end: the process starts, the model is loaded, requests are planned,
answered and dealt out. Other steps run beside the GPUs, those of the first and the last partitions
apart. GPUs are taken to be alike and not to disturb each other, which was not measured.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS = 4  # of a run, each a process that starts and imports
PER_GPU = (1, 4, 16)  # partitions that a GPU answers, one after the other
LOAD_SECONDS = 60.0  # ASSUMED, not measured: weights of 8B parameters from a local disk


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was measured, in rows or tokens a second, seconds, and tokens a row."""

    gpu_tokens: float  # completion tokens, prompts and the ends of batches included
    row_tokens: float
    raw_dataset: float
    prompts: float
    completions: float  # around a generator that takes no time
    output: float
    run: float  # Dagster, a run of one partition
    load: float = LOAD_SECONDS

    @property
    def gpu_rows(self) -> float:
        """Rows a second of one GPU while it generates."""
        return self.gpu_tokens / self.row_tokens


def read_inputs(workload: str = "mixed", sampling: str = "sampled") -> Inputs:
    """The newest measurements of this folder: H200, 8B shape, largest batch; two cores."""
    lines = (HERE / "results" / "throughput.jsonl").read_text().splitlines()
    wanted = {"generator": "bulk_pipeline", "workload": workload, "batch": "auto",
              "sampling": sampling, "label": None}  # fmt: skip
    found = [line for line in map(json.loads, lines) if wanted.items() <= line.items()]
    gpu = found[-1]
    stages = json.loads((HERE / "bench_pipeline.json").read_text())["runs"][-1]["stages"]
    overhead = json.loads((HERE / "dagster_overhead.json").read_text())
    return Inputs(
        gpu_tokens=round(gpu["tokens_per_second"]),
        row_tokens=round(gpu["completion_tokens"] / gpu["rows"], 1),
        **{name: float(stage["rows_per_second"]) for name, stage in stages.items()},
        run=round(overhead["run_of_one"]["seconds"], 1),
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a dataset takes, cut into equal partitions; times in seconds.

    Attributes
    ----------
    wall
        From start to end.
    generation, start, host, idle
        Shares of the time that all GPUs are there for: they generate; wait for a process and for
        the model; for the host, which plans requests and deals answers out; or have nothing to do,
        while the first partitions are read and formatted and the last ones are written.
    """

    gpus: int
    partitions: int
    partition_rows: int
    wall: float
    generation: float
    start: float
    host: float
    idle: float

    @property
    def gpu_hours(self) -> float:
        """Hours that GPUs are paid for."""
        return self.gpus * self.wall / 3600


def estimate(inputs: Inputs, rows: int, gpus: int, per_gpu: int) -> Estimate:
    """Estimate a dataset that is cut into `per_gpu` partitions for each GPU."""
    size = math.ceil(rows / (gpus * per_gpu))
    start = inputs.run / STEPS + inputs.load
    generation, host = size / inputs.gpu_rows, size / inputs.completions
    before = 2 * inputs.run / STEPS + size / inputs.raw_dataset + size / inputs.prompts
    after = inputs.run / STEPS + size / inputs.output
    wall = before + per_gpu * (start + generation + host) + after
    parts = (per_gpu * generation, per_gpu * start, per_gpu * host, before + after)
    return Estimate(gpus, gpus * per_gpu, size, wall, *(part / wall for part in parts))


def smallest_partition(inputs: Inputs, share: float = 0.05) -> int:
    """Rows of a partition whose start takes that share of the time of its GPU."""
    start = inputs.run / STEPS + inputs.load
    row = 1 / inputs.gpu_rows + 1 / inputs.completions
    return round(start * (1 - share) / share / row)


def gpus_fed(inputs: Inputs) -> int:
    """GPUs for which one process that formats makes prompts fast enough."""
    return int(inputs.prompts / inputs.gpu_rows)


def table(inputs: Inputs, rows: int, gpus: Sequence[int]) -> str:
    """The estimates as a Markdown table."""
    lines = [
        "| GPUs | partitions | rows in each | wall clock | GPU-hours | generation | start, loading "
        "| host | first and last |",
        "|" + " --- |" * 9,
    ]
    for count in gpus:
        for each in (estimate(inputs, rows, count, per_gpu) for per_gpu in PER_GPU):
            shares = (each.generation, each.start, each.host, each.idle)
            lines.append(
                f"| {count} | {each.partitions:,} | {each.partition_rows:,} | {_time(each.wall)} | "
                f"{each.gpu_hours:.1f} | {' | '.join(f'{share:.1%}' for share in shares)} |"
            )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the inputs and the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    for name in Inputs.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help="in place of what was "
                            "measured")  # fmt: skip
    options = vars(parser.parse_args(arguments))
    rows, gpus = options.pop("rows"), options.pop("gpus")
    measured = read_inputs()
    values: dict[str, Any] = {
        name: getattr(measured, name) if options[name] is None else options[name]
        for name in Inputs.__dataclass_fields__
    }
    inputs = Inputs(**values)
    for name, value in values.items():
        print(f"{name:12} {value:12,.1f}")
    print(f"{'gpu_rows':12} {inputs.gpu_rows:12,.1f}\n")
    print(table(inputs, rows, gpus))
    print(f"\nstart and loading take 5% of a partition of {smallest_partition(inputs):,} rows")
    print(f"one process that formats feeds {gpus_fed(inputs)} GPUs")


if __name__ == "__main__":
    main()
