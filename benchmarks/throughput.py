"""Completion tokens a second: this project's generator beside exllamav2's plain loop, same work.

    python benchmarks/throughput.py run MODEL          both generators, one process each
    python benchmarks/throughput.py floor MODEL        exllamav2's bare forward step
    python benchmarks/throughput.py breakdown MODEL    where the time of one setting goes
    python benchmarks/throughput.py report             table and chart of what was measured

Every measurement is a line of benchmarks/results/throughput.jsonl, written when it is made. A batch
of n runs at most 8 n rows (`--rows-per-place`), the first ones of the whole work. Each setting is
warmed up first, which is not measured: kernels are compiled there. The plain loop needs a GPU,
since exllamav2's sampler is part of its compiled module.
"""

import argparse
import itertools
import json
import logging
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from throughput_work import (
    PAGE_TOKENS,
    ROOT,
    SAMPLING,
    WORKLOADS,
    Row,
    describe_machine,
    describe_model,
    describe_versions,
    make_work,
    now,
    pages_of_longest,
    variant_of,
)

RESULTS = Path(__file__).parent / "results" / "throughput.jsonl"
CHART = Path(__file__).parent / "throughput.png"
GENERATORS = ("plain_loop", "bulk_pipeline")
BATCHES = ("1", "16", "64", "256", "512", "auto")
SOME_FAILED, DEVICE_LOST = 1, 3  # exit codes of a measuring process
AUTO_ROWS = 2048  # most rows of a plain loop with batch auto: exllamav2's default


def main() -> None:
    """Do what the command line asks."""
    arguments = parse(sys.argv[1:])
    sys.path.insert(0, str(ROOT))
    if arguments.command != "report" and not (Path(arguments.model) / "config.json").is_file():
        sys.exit(f"MODEL: a folder with config.json, got {arguments.model}")
    commands = {"run": run, "floor": floor, "breakdown": breakdown, "report": report}
    sys.exit(commands[arguments.command](arguments))


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the command line's values."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--results", type=Path, default=RESULTS, help="file of measurements")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    measuring = argparse.ArgumentParser(add_help=False)
    add = measuring.add_argument
    add("model", help="model folder")
    add("--model-name", help="name in the results (default: the folder's)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--rows", type=int, default=1024, help="most rows of a run")
    add("--rows-per-place", type=int, default=8, help="most rows of a run, for each of its batch")
    add("--set", action="append", default=[], metavar="NAME=JSON",
        help="a setting of the product's generator (GeneratorSettings), such as "
        "cache_tokens=131072; repeatable")  # fmt: skip
    add("--commit", help="bulk_pipeline's commit, where git is missing")
    add("--max-seconds", type=float, default=120, help="of a measurement of the product; 0: none")
    add("--baseline-seconds", type=float, default=30,
        help="the plain loop stops after so long, with its rate so far; 0: whole run")  # fmt: skip

    one = commands.add_parser("run", parents=[common, measuring], help="measure the generators")
    add = one.add_argument
    add("--generators", nargs="+", choices=GENERATORS, default=GENERATORS)
    add("--workloads", nargs="+", choices=WORKLOADS, default=["mixed"])
    add("--batches", nargs="+", default=BATCHES, type=batch_name, metavar="N|auto")
    add("--sampling", nargs="+", choices=tuple(SAMPLING), default=("sampled", "greedy"))
    add("--repeat", type=int, default=1, help="full passes; the median one is the result")
    add("--warmup-rows", type=int, help="of the product; default: twice the batch; 0: none")
    add("--label", help="what is special about the product's settings; its own row in the report")
    add("--here", choices=GENERATORS, help=argparse.SUPPRESS)
    add("--begun", type=Path, help=argparse.SUPPRESS)

    one = commands.add_parser("floor", parents=[common, measuring], help="time the forward step")
    one.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256, 512, 1024])
    one.add_argument("--seconds", type=float, default=2.0, help="of a batch size")

    one = commands.add_parser("breakdown", parents=[common, measuring], help="show a step's parts")
    add = one.add_argument
    add("--generator", choices=GENERATORS, default="bulk_pipeline")
    add("--workload", choices=WORKLOADS, default="mixed")
    add("--batch", default="256", type=batch_name)
    add("--sampling", choices=tuple(SAMPLING), default="sampled")
    add("--kernels", type=int, default=12, help="list so many kernels of a second, short run")

    one = commands.add_parser("report", parents=[common], help="table and chart of the results")
    one.add_argument("--chart", type=Path, default=CHART)
    one.add_argument("--workload", choices=WORKLOADS, default="mixed", help="of the chart")
    one.add_argument("--model", default="", help="part of the charted model's name; default: all")
    return parser.parse_args(argv)


def batch_name(text: str) -> str:
    """Check a batch size: a number from 1, or auto."""
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"a number from 1, or auto, got {text}")
    return text


def run(arguments: argparse.Namespace) -> int:
    """Measure each generator in a process of its own; return 0 where nothing failed."""
    if arguments.here is not None:
        return measure_here(arguments)
    failed = False
    for generator in arguments.generators:
        pending = list(arguments.batches)
        while pending:
            code, num_begun = _measure_in_process(generator, pending)
            failed |= code != 0
            if code in (0, SOME_FAILED) or not num_begun:
                break
            say(f"{generator}: the process ended with {code} at batch {pending[num_begun - 1]}")
            pending = pending[num_begun:]  # what is left of that batch is lost
    return int(failed)


def _measure_in_process(generator: str, batches: list[str]) -> tuple[int, int]:
    """Return the process's exit code, and how many of the batches it began."""
    with tempfile.TemporaryDirectory() as folder:
        begun = Path(folder) / "begun"
        begun.touch()
        extra = ["--here", generator, "--begun", str(begun), "--batches", *batches]
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], *extra], check=False)
        return done.returncode, len(begun.read_text().split())


def measure_here(arguments: argparse.Namespace) -> int:
    """Measure one generator at all settings; one that fails does not stop the others."""
    generator = arguments.here
    on_gpu = is_on_gpu(arguments.device)
    if generator == "plain_loop" and not on_gpu:
        say("plain_loop: left out, it needs a GPU: its sampler is in exllamav2's compiled module")
        return 0
    about = describe(arguments, on_gpu)
    attempts = Attempts()
    loop = make_loop(arguments, generator, arguments.workloads, arguments.batches)
    for batch in arguments.batches:
        with arguments.begun.open("a") as file:
            file.write(f"{batch}\n")
        with attempts.at(f"{generator} batch {batch}: making it ready") as ready:
            started = time.perf_counter()
            loop.open(batch)
            say(f"{generator} batch {batch}: ready after {time.perf_counter() - started:.1f} s")
        if not ready:
            continue
        for workload, sampling in itertools.product(arguments.workloads, arguments.sampling):
            with attempts.at(f"{generator} batch {batch} {workload} {sampling}"):
                found = measure(arguments, loop, workload, batch, sampling)
                keep(arguments.results, found | about | {"date": now()})
    loop.close()
    return SOME_FAILED if attempts.num_failed else 0


def measure(
    arguments: argparse.Namespace, loop: Any, workload: str, batch: str, sampling: str
) -> dict[str, Any]:
    """Warm one setting up and measure it; return the median of the passes."""
    generator = arguments.here
    num_rows = rows_of(arguments, batch)

    def work(number: int, count: int = num_rows) -> list[Row]:
        variant = variant_of(workload, batch, sampling, number)
        return make_work(workload, count, loop.vocab_size, variant)

    places = num_rows if batch == "auto" else int(batch)
    warmup_rows = min(num_rows, 2 * places)
    if arguments.warmup_rows is not None:
        warmup_rows = min(num_rows, arguments.warmup_rows)
    if warmup_rows:
        started = time.perf_counter()
        loop.warm_up(work(-1, warmup_rows), sampling)
        say(f"  warm-up, not measured: {time.perf_counter() - started:.1f} s")
    is_product = generator == "bulk_pipeline"
    limit = arguments.max_seconds if is_product else arguments.baseline_seconds
    passes = []
    for number in range(arguments.repeat):
        passes.append(loop.run(work(number), sampling, limit))
        say(f"  pass {number + 1}: {json.dumps(passes[-1])}")
    passes.sort(key=lambda one: one["tokens_per_second"])
    return {
        "generator": generator,
        "workload": workload,
        "batch": batch if batch == "auto" else int(batch),
        "sampling": sampling,
        "label": arguments.label if is_product else None,
        "rows": num_rows,
        **passes[(len(passes) - 1) // 2],
        "all_passes": [one["tokens_per_second"] for one in passes],
        "warmup_rows": warmup_rows,
        "peak_gpu_gib": peak_gpu_gib(),
        "settings": loop.settings,
    }


def floor(arguments: argparse.Namespace) -> int:
    """Time exllamav2's bare forward step at each batch size."""
    from throughput_loops import FLOOR_CONTEXT, FLOOR_PAGES, forward_step_seconds, load_exllamav2

    if not is_on_gpu(arguments.device):
        sys.exit("floor: it needs a GPU, and exllamav2's compiled module")
    about = describe(arguments, on_gpu=True)
    cache_tokens = max(arguments.batches) * FLOOR_PAGES * PAGE_TOKENS
    model, cache, _, attention = load_exllamav2(arguments.model, cache_tokens)
    attempts = Attempts()
    for batch in arguments.batches:
        with attempts.at(f"forward_pass batch {batch}"):
            seconds = forward_step_seconds(model, cache, batch, arguments.seconds)
            say(f"forward_pass batch {batch}: {seconds * 1000:.2f} ms a step")
            found = {
                "generator": "forward_pass",
                "workload": f"context of {FLOOR_CONTEXT} tokens",
                "batch": batch,
                "tokens_per_second": round(batch / seconds, 1),
                "step_milliseconds": round(seconds * 1000, 3),
                "settings": {"attention": attention, "cache_tokens": cache.max_seq_len},
            }
            keep(arguments.results, found | about | {"date": now()})
    return SOME_FAILED if attempts.num_failed else 0


def breakdown(arguments: argparse.Namespace) -> int:
    """Print where the time of one setting goes."""
    from throughput_breakdown import Phases, kernel_table

    if arguments.generator == "plain_loop" and not is_on_gpu(arguments.device):
        sys.exit("breakdown: the plain loop needs a GPU")
    loop = make_loop(arguments, arguments.generator, [arguments.workload], [arguments.batch])
    loop.open(arguments.batch)
    num_rows = rows_of(arguments, arguments.batch)

    def work(number: int) -> list[Row]:
        return make_work(arguments.workload, num_rows, loop.vocab_size, number)

    is_product = arguments.generator == "bulk_pipeline"
    limit = arguments.max_seconds if is_product else arguments.baseline_seconds
    places = num_rows if arguments.batch == "auto" else int(arguments.batch)
    loop.warm_up(work(1)[: 2 * places], arguments.sampling)
    say("warmed up")
    with Phases(on_gpu=is_on_gpu(arguments.device)) as phases:
        outcome = loop.run(work(2), arguments.sampling, limit)
    say(json.dumps(outcome))
    print(phases.table(outcome["seconds"], outcome["steps"]))
    if arguments.kernels and is_on_gpu(arguments.device):
        few = work(3)[: max(1, num_rows // 8)]
        print(kernel_table(lambda: loop.run(few, arguments.sampling, 20), arguments.kernels))
    loop.close()
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Print the results as Markdown, and draw the chart."""
    from throughput_report import draw_chart, read_results, tables

    lines = read_results(arguments.results)
    print(tables(lines))
    charted = draw_chart(lines, arguments.chart, arguments.workload, arguments.model)
    say(f"{arguments.chart}: {charted}")
    return 0


class Attempts:
    """Counts what failed; each failure is printed and the next thing tried."""

    def __init__(self) -> None:
        self.num_failed = 0

    @contextmanager
    def at(self, what: str) -> Iterator[list[str]]:
        """Try the block; what it gives is not empty once the block came through."""
        say(what)
        came_through = [what]
        try:
            yield came_through
        except Exception as error:
            came_through.clear()
            self.num_failed += 1
            traceback.print_exc()
            say(f"FAILED: {what}: {type(error).__name__}: {error}")
            if _is_device_lost():
                sys.exit(DEVICE_LOST)


def _is_device_lost() -> bool:
    """Whether an error on the GPU makes every later call in this process fail."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def make_loop(
    arguments: argparse.Namespace, generator: str, workloads: list[str], batches: list[str]
) -> Any:
    """Return the generator behind its common interface; the plain loop's model is loaded."""
    from throughput_loops import PlainLoop, Product

    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stdout)
    if generator == "bulk_pipeline":
        changes = dict(setting_of(text) for text in arguments.set)
        return Product(arguments.model, arguments.device, changes)
    most = min(AUTO_ROWS, arguments.rows)
    rows = max(most if batch == "auto" else int(batch) for batch in batches)
    tokens = rows * pages_of_longest(workloads) * PAGE_TOKENS
    return PlainLoop(arguments.model, tokens)


def add_options(parser: argparse.ArgumentParser, results: Path) -> None:
    """Add the options that benchmarks of one setting after the other share."""
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--set", action="append", default=[], metavar="NAME=JSON",
        help="a setting of the generator (GeneratorSettings); repeatable")  # fmt: skip
    add("--results", type=Path, default=results, help="file of measurements")
    add("--model-name", help="name in the results (default: the folder's)")
    add("--commit", help="bulk_pipeline's commit, where git is missing")


def setting_of(text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=JSON."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a plain word


def rows_of(arguments: argparse.Namespace, batch: str) -> int:
    """Return the rows that a run at this batch size has."""
    if batch == "auto":
        return arguments.rows
    return min(arguments.rows, arguments.rows_per_place * int(batch))


def is_on_gpu(device: str) -> bool:
    """Whether the model runs on a GPU."""
    import torch

    return device != "cpu" and torch.cuda.is_available()


def peak_gpu_gib() -> float | None:
    """Return the most GPU memory that tensors held so far in this process; None on a CPU."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    devices = range(torch.cuda.device_count())
    return round(sum(torch.cuda.max_memory_allocated(i) for i in devices) / (1 << 30), 1)


def describe(arguments: argparse.Namespace, on_gpu: bool) -> dict[str, Any]:
    """Return what every line says of model, machine and versions."""
    return {
        "model": describe_model(arguments.model, arguments.model_name),
        "machine": describe_machine(on_gpu),
        "versions": describe_versions(arguments.commit),
    }


def keep(results: Path, line: dict[str, Any]) -> None:
    """Append one measurement to the results."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
