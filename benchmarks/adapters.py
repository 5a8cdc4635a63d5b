"""What LoRA adapters cost: the rate with one in use, and the time that a switch takes.

    python benchmarks/adapters.py MODEL

One process, one loaded model, adapters of random weights on all seven matrices of every layer. The
rate is that of rows which all use one adapter, between two runs without. A switch is timed by
requests of one token in turn: two with the same adapter after one another, then another adapter;
the difference of the medians is the switch. The first use of an adapter also keeps the matrices as
they were on the host, once. Every measurement is a line of benchmarks/results/adapters.jsonl.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from throughput import add_options, describe, is_on_gpu, keep, peak_gpu_gib, say, setting_of
from throughput_loops import Product, make_requests
from throughput_work import ROOT, now, variant_of
from throughput_work import make_work as make_rows

RESULTS = Path(__file__).parent / "results" / "adapters.jsonl"
NAMES = ("a", "b")


def main() -> int:
    """Measure the rates, then the switches."""
    arguments = parse(sys.argv[1:])
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(Path(arguments.model), Path(folder), arguments.rank)
        settings = dict(setting_of(text) for text in arguments.set) | {"adapters": adapters}
        product = Product(arguments.model, arguments.device, settings)
        product.open(str(arguments.batch))
        shown = product.settings | {"adapters": len(adapters)}
        about = describe(arguments, is_on_gpu(arguments.device)) | {"settings": shown}
        found = {"first_use_seconds": first_use(product)}
        found |= rates(arguments, product) | switches(product, arguments.switches)
        product.close()
    line = {"rank": arguments.rank, "batch": arguments.batch, "sampling": arguments.sampling}
    line |= found | {"peak_gpu_gib": peak_gpu_gib()}
    keep(arguments.results, line | about | {"date": now()})
    say(", ".join(f"{name} {value:,.4g}" for name, value in found.items()))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="model folder")
    add("--rank", type=int, default=16, help="of the adapters")
    add("--batch", type=int, default=256)
    add("--rows", type=int, help="of a run; default: twice the batch")
    add("--switches", type=int, default=8, help="timed")
    add("--sampling", choices=("greedy", "sampled"), default="sampled")
    add_options(parser, RESULTS)
    return parser.parse_args(argv)


def make_adapters(model: Path, folder: Path, rank: int) -> dict[str, str]:
    """Write adapters of random weights; small ones, so that no value overflows."""
    from bulk_pipeline_tests.adapters import make_adapter

    return {
        name: str(make_adapter(folder / name, model, seed=seed, rank=rank, strength=0.01))
        for seed, name in enumerate(NAMES)
    }


def one_token(product: Product, adapter: str | None) -> float:
    """Seconds of a request of one token."""
    from bulk_pipeline.engine.request import Request, SamplingParams

    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    started = time.perf_counter()
    product.run_requests([Request(0, (1, 2, 3), params, adapter=adapter)], 0)
    return time.perf_counter() - started


def first_use(product: Product) -> float:
    """Seconds until an adapter's first token, once the model's own kernels are warm."""
    for _ in range(3):
        plain = one_token(product, None)
    return one_token(product, NAMES[0]) - plain


def rates(arguments: argparse.Namespace, product: Product) -> dict[str, Any]:
    """Tokens per second with an adapter on all rows, and without before and after."""
    measured = []
    for number, adapter in enumerate((None, None, NAMES[0], None)):  # the first one warms up
        variant = variant_of("adapters", number, arguments.sampling)
        num_rows = arguments.rows or 2 * arguments.batch
        rows = make_rows("mixed", num_rows, product.vocab_size, variant)
        requests = make_requests(rows, arguments.sampling, adapter=adapter)
        measured.append(product.run_requests(requests, 0)["tokens_per_second"])
    _, before, with_adapter, after = measured
    return {
        "plain_before": before,
        "tokens_per_second": with_adapter,
        "plain_after": after,
        "ratio": round(with_adapter / ((before + after) / 2), 4),
    }


def switches(product: Product, number: int) -> dict[str, float]:
    """Median seconds of a switch from one adapter to another, and back to none."""
    for name in NAMES:
        one_token(product, name)
    same, other, back = [], [], []
    for _ in range(number):
        for name in NAMES:
            other.append(one_token(product, name))
            same.append(one_token(product, name))
    for _ in range(number):
        one_token(product, NAMES[0])
        back.append(one_token(product, None))
    plain = statistics.median(same)
    return {
        "switch_seconds": statistics.median(other) - plain,
        "switch_seconds_most": max(other) - plain,
        "switch_back_seconds": statistics.median(back) - plain,
    }


if __name__ == "__main__":
    sys.exit(main())
