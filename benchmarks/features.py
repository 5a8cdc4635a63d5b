"""What each setting of a row costs: the same work with it on all rows, beside runs without.

    python benchmarks/features.py MODEL                       all settings, at batch 256
    python benchmarks/features.py MODEL --features json_schema regex --sampling greedy
    python benchmarks/features.py report

One process, one loaded model. Each setting is warmed up, then measured between two plain runs; its
ratio is to the mean of those two. Every measurement is a line of benchmarks/results/features.jsonl.
Settings are chosen so that rows do not end before their max_new_tokens, whatever the model says:
grammars that go on, strings that do not come. Where some do, that is said.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from throughput import (
    Attempts,
    add_options,
    describe,
    is_on_gpu,
    keep,
    peak_gpu_gib,
    say,
    setting_of,
)
from throughput_loops import Product, make_requests
from throughput_work import ROOT, SAMPLING, WORKLOADS, make_work, now, variant_of

RESULTS = Path(__file__).parent / "results" / "features.jsonl"
NEVER = "\u2603\u2604\u2603\u2604"  # no model says it
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["lamp", "kettle", "chair"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "count", "kind", "tags", "is_new"],
    "additionalProperties": False,
}
BAD_WORDS = ("unfortunately", "as an ai", "sorry", "delve into", "tapestry", "a testament to")
MIN_ITEMS = 500  # more than any row has room for
ITEMS = "([a-z]{2,12} [0-9]{1,4}, )"

# what is changed in `SamplingParams`, for a number that each row of each run has to itself
Changes = Callable[[int], dict[str, Any]]


def main() -> None:
    """Do what the command line asks."""
    arguments = parse(sys.argv[1:])
    sys.path.insert(0, str(ROOT))
    if arguments.model == "report":
        print(table(read_results(arguments.results)))
        return
    if not (Path(arguments.model) / "config.json").is_file():
        sys.exit(f"MODEL: a folder with config.json, got {arguments.model}")
    sys.exit(run(arguments))


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="model folder; or report, for a table of what was measured")
    add("--features", nargs="+", choices=tuple(features()), default=tuple(features()))
    add("--batch", type=int, default=256)
    add("--rows", type=int, help="of a run; default: twice the batch")
    add("--sampling", choices=tuple(SAMPLING), default="sampled")
    add("--workload", choices=WORKLOADS, default="mixed")
    add("--most-tokens", type=int, help="most max_new_tokens of a row; default: the workload's")
    add_options(parser, RESULTS)
    return parser.parse_args(argv)


def features() -> dict[str, Changes]:
    """Return what can be measured."""
    return {
        "json_schema": lambda row: {"structured": _json_schema(ITEM)},
        "json_schema_of_each_row": lambda row: {"structured": _json_schema(_item_of(row))},
        # a row may end after each item, which few do; or must count to MIN_ITEMS
        "regex": lambda row: {"structured": _structured("regex", f"{ITEMS}*")},
        "regex_that_counts": lambda row: {
            "structured": _structured("regex", f"{ITEMS}{{{MIN_ITEMS},}}")
        },
        "logprobs_0": lambda row: {"logprobs": 0},
        "logprobs_5": lambda row: {"logprobs": 5},
        "prompt_logprobs": lambda row: {},  # of the request
        "repetition_penalty": lambda row: {"repetition_penalty": 1.1},
        "frequency_penalty": lambda row: {"frequency_penalty": 0.2},
        "presence_penalty": lambda row: {"presence_penalty": 0.2},
        "top_k": lambda row: {"top_k": 50},
        "min_p": lambda row: {"min_p": 0.05},
        "logit_bias": lambda row: {
            "logit_bias": tuple((300 + 7 * i, (-1.0) ** i) for i in range(20))
        },
        "banned_token_ids": lambda row: {"banned_token_ids": tuple(range(300, 320))},
        "min_new_tokens": lambda row: {"min_new_tokens": 32, "stop_token_ids": (2,)},
        "stop_strings": lambda row: {"stop": (NEVER, NEVER[::-1])},
        "loop_guard": lambda row: {"loop_guard": _loop_guard()},
        "allowed_token_ids": lambda row: {"allowed_token_ids": tuple(range(100, 400))},
        "bad_words": lambda row: {"bad_words": BAD_WORDS},
        "banned_strings": lambda row: {"banned_strings": tuple(f"{NEVER} {i}" for i in range(20))},
        "banned_strings_that_come": lambda row: {"banned_strings": ("qx", "zj")},
        "thinking_token_budget": lambda row: {"thinking": _budget()},
    }


def run(arguments: argparse.Namespace) -> int:
    """Measure each setting between two plain runs; return 0 where nothing failed."""
    product = Product(arguments.model, arguments.device, settings_of(arguments))
    product.open(str(arguments.batch))
    about = describe(arguments, is_on_gpu(arguments.device)) | {"settings": product.settings}
    attempts = Attempts()
    plain: float | None = None
    for feature in arguments.features:
        with attempts.at(feature) as measured:
            if plain is None:
                measure(arguments, product, None, "warm-up")
                plain = measure(arguments, product, None, "first")["tokens_per_second"]
            measure(arguments, product, feature, "warm-up")
            found = measure(arguments, product, feature, "measured")
            after = measure(arguments, product, None, feature)["tokens_per_second"]
            ratio = found["tokens_per_second"] / ((plain + after) / 2)
            line = {
                "feature": feature,
                "ratio": round(ratio, 4),
                "plain_before": plain,
                "plain_after": after,
                "batch": arguments.batch,
                "sampling": arguments.sampling,
                "workload": arguments.workload,
                **found,
                "peak_gpu_gib": peak_gpu_gib(),
            }
            keep(arguments.results, line | about | {"date": now()})
            say(f"{feature}: {ratio:.3f} of plain ({plain:,.0f} before, {after:,.0f} after)")
            plain = after
        if not measured:
            plain = None  # what failed may have left the machine otherwise
    product.close()
    return int(attempts.num_failed > 0)


def measure(
    arguments: argparse.Namespace, product: Product, feature: str | None, number: str
) -> dict[str, Any]:
    """Run the work once, with a feature or without."""
    num_rows = arguments.rows or 2 * arguments.batch
    variant = variant_of(feature, number, arguments.sampling)
    rows = make_work(arguments.workload, num_rows, product.vocab_size, variant)
    changes = features()[feature] if feature is not None else lambda row: {}
    started = time.perf_counter()
    requests = make_requests(
        rows,
        arguments.sampling,
        lambda row: (
            changes(variant + row) | _limit(rows[row].max_new_tokens, arguments.most_tokens)
        ),
        prompt_logprobs=feature == "prompt_logprobs",
    )
    found = product.run_requests(requests, 0)
    wanted = sum(request.sampling.max_new_tokens for request in requests)
    if found["completion_tokens"] != wanted:
        say(f"  rows ended early: {found['completion_tokens']} of {wanted} tokens")
    say(f"  {feature or 'plain'} ({number}): {time.perf_counter() - started:.1f} s, "
        f"{found['tokens_per_second']:,.0f} tokens/s")  # fmt: skip
    return found | {"rows": num_rows, "tokens_wanted": wanted}


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the generator's settings that were given."""
    return dict(setting_of(text) for text in arguments.set)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the last measurement of each feature at each setting."""
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        key = (line["model"]["name"], line["batch"], line["sampling"], line["feature"])
        latest[key] = line
    return list(latest.values())


def table(lines: list[dict[str, Any]]) -> str:
    """Return the measurements as Markdown."""
    rows = [
        "| model | batch | sampling | with | tokens/s | plain before, after | of plain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        plain = f"{line['plain_before']:,.0f}, {line['plain_after']:,.0f}"
        rows.append(
            f"| {line['model']['name']} | {line['batch']} | {line['sampling']} | {line['feature']} "
            f"| {line['tokens_per_second']:,.0f} | {plain} | {line['ratio']:.1%} |"
        )
    return "\n".join(rows)


def _limit(limit: int, most: int | None) -> dict[str, int]:
    return {"max_new_tokens": limit if most is None else min(limit, most)}


def _item_of(row: int) -> dict[str, Any]:
    """Return the item of a schema that no other row has."""
    return ITEM | {"properties": ITEM["properties"] | {"kind": {"enum": ["lamp", f"kind {row}"]}}}


def _json_schema(item: dict[str, Any]) -> Any:
    schema = {"type": "array", "items": item, "minItems": MIN_ITEMS}
    return _structured("json_schema", json.dumps(schema))


def _structured(kind: Any, value: str) -> Any:
    from bulk_pipeline.engine.request import StructuredOutput

    return StructuredOutput(kind, value)


def _loop_guard() -> Any:
    from bulk_pipeline.engine.request import LoopGuard

    return LoopGuard(ngram=8, repeats=4)


def _budget() -> Any:
    from bulk_pipeline.engine.request import ThinkingBudget

    return ThinkingBudget(32, "[[", "]]", is_open=True)


if __name__ == "__main__":
    main()
