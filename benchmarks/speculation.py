"""Tokens a second with and without drafts, at small batches.

    python benchmarks/speculation.py run MODEL       measure; MODEL is a folder
    python benchmarks/speculation.py report          table of what was measured

A batch of n is kept full from a queue of several times n requests, twice with the same ones: the
second time is measured, when kernels are compiled and the prompts are in the cache. Work for a
model that can talk (with a chat template): `edit` and `summarise` have much to copy, `story` has
nothing. Work for any model, also one with random weights: answers of `few1`, `few2`, `few4` can
only have so many different tokens, so that nearly all, some and few drafts are right.
Every measurement is a line of benchmarks/results/speculation.jsonl.
"""

import argparse
import itertools
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

from throughput import describe, is_on_gpu, keep, say, setting_of
from throughput_work import ROOT, SAMPLING, now

RESULTS = Path(__file__).parent / "results" / "speculation.jsonl"
TASKS = {
    "edit": "Correct the spelling of this text. Change nothing else.\n\n{text}",
    "summarise": "Summarise this text.\n\n{text}",
    "story": "Write a story about the number {number}.",
}
FEW = {"few1": 1, "few2": 2, "few4": 4}
BIAS = 1e5  # beyond any logit, also when a temperature of 1,000 divides it
PROMPT_TOKENS = 300  # of a random prompt
TEXT_LENGTHS = (200, 1200)  # characters of a paragraph


def main() -> int:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    add = one.add_argument
    add("model")
    add("--batches", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    add("--work", nargs="+", choices=[*TASKS, *FEW], default=list(TASKS))
    add("--sampling", nargs="+", choices=tuple(SAMPLING), default=["greedy", "sampled"])
    add("--max-new-tokens", type=int, default=200)
    add("--fills", type=int, default=8, help="requests, in batches")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--set", action="append", default=[], metavar="NAME=JSON",
        help="a setting of the generator, such as weights=quantized or "
        "num_speculative_tokens=8; repeatable")  # fmt: skip
    add("--model-name", help="name in the results (default: the folder's)")
    add("--label", help="what is special about the settings")
    add("--commit", help="bulk_pipeline's commit, where git is missing")
    commands.add_parser("report")
    for each in commands.choices.values():
        each.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.command == "run":
        measure(arguments)
    print(table(arguments.results))
    return 0


def measure(arguments: argparse.Namespace) -> None:
    """Measure all settings with one loaded model."""
    from bulk_pipeline.engine.loading import load_generator
    from bulk_pipeline.spec import GeneratorSettings

    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stdout)
    changes = dict(setting_of(text) for text in arguments.set)
    for batch in arguments.batches:
        settings = GeneratorSettings(
            **{
                "model": arguments.model,
                "device": arguments.device,
                "max_batch_size": batch,
                "speculative": "ngram",
            }
            | changes
        )
        generator = load_generator(settings)
        drafter = generator._loop.drafter  # type: ignore[union-attr]
        about = describe(arguments, is_on_gpu(arguments.device)) | {
            "label": arguments.label,
            "settings": changes | {"weights": generator.provenance["weights"]},
        }
        for work, sampling in itertools.product(arguments.work, arguments.sampling):
            for drafts in (False, True):
                generator._loop.drafter = drafter if drafts else None  # type: ignore[union-attr]
                found = run(generator, arguments, work, sampling, batch)
                setting = {"work": work, "sampling": sampling, "batch": batch, "drafts": drafts}
                say(json.dumps(setting | found))
                keep(arguments.results, setting | found | about | {"date": now()})
        generator.close()


def run(
    generator: Any, arguments: argparse.Namespace, work: str, sampling: str, batch: int
) -> dict[str, Any]:
    """Run the requests twice; return the numbers of the second time."""
    stats = generator.stats
    counters = ("steps", "completion_tokens", "drafted_tokens", "accepted_tokens")
    requests = make_requests(generator, arguments, work, sampling, arguments.fills * batch)
    list(generator.run(requests))
    before = {name: getattr(stats, name) for name in counters}
    rows, graphs = stats.rows, num_graphs(generator)
    started = time.perf_counter()
    for completion in generator.run(requests):
        if completion.error is not None:
            raise RuntimeError(completion.error)
    seconds = time.perf_counter() - started
    totals = {name: getattr(stats, name) - before[name] for name in counters}
    return totals | {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(totals["completion_tokens"] / seconds, 1),
        "tokens_per_row_and_step": round(totals["completion_tokens"] / (stats.rows - rows), 2),
        "step_milliseconds": round(1000 * seconds / totals["steps"], 3),
        "acceptance_rate": round(totals["accepted_tokens"] / max(totals["drafted_tokens"], 1), 3),
        "graphs_recorded": num_graphs(generator) - graphs,
    }


def num_graphs(generator: Any) -> int:
    """CUDA graphs of the model so far: a step of a new size takes long once."""
    return len(getattr(generator._loop.model, "_graphs", ()))


def make_requests(
    generator: Any,
    arguments: argparse.Namespace,
    work: str,
    sampling: str,
    count: int,
) -> list[Any]:
    """Return so many requests."""
    from bulk_pipeline.engine.request import Request, SamplingParams

    temperature, top_p = SAMPLING[sampling]
    params = {
        "temperature": temperature, "top_p": top_p, "max_new_tokens": arguments.max_new_tokens,
    }  # fmt: skip
    config = json.loads((Path(arguments.model) / "config.json").read_text())
    rng = random.Random(work)
    if work in FEW:
        ids = range(config["vocab_size"] // 4, config["vocab_size"] // 2)  # no special ones
        kept = rng.sample(ids, FEW[work])
        params["logit_bias"] = tuple((token, BIAS) for token in kept)
        if temperature:
            params["temperature"] = 1e3  # any of them, as likely as another
        prompts = [rng.choices(ids, k=PROMPT_TOKENS) for _ in range(count)]
    else:
        ends = config["eos_token_id"]
        params["stop_token_ids"] = tuple(ends) if isinstance(ends, list) else (ends,)
        prompts = talk(arguments.model, work, count, rng)
    return [
        Request(place, ids, SamplingParams(seed=place, **params))
        for place, ids in enumerate(prompts)
    ]


def talk(model: str, work: str, count: int, rng: random.Random) -> list[list[int]]:
    """Return prompts in the model's own chat format, about paragraphs of this project's docs."""
    from transformers import AutoTokenizer

    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    paragraphs = [
        text
        for page in pages
        for text in page.read_text().split("\n\n")
        if TEXT_LENGTHS[0] <= len(text) <= TEXT_LENGTHS[1] and text[0].isalpha()
    ]
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for text in rng.choices(paragraphs, k=count):
        content = TASKS[work].format(text=text, number=rng.randrange(100))
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
        )
        prompts.append(list(ids))
    return prompts


def table(path: Path) -> str:
    """Return the results as Markdown: rates without and with drafts."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[tuple[Any, ...], dict[bool, dict[str, Any]]] = {}
    for line in lines:
        model = f"{line['model']['name']}, weights {line['settings']['weights']}"
        if line["label"]:
            model += f" ({line['label']})"
        where = line["machine"]["gpu"] or f"CPU, {line['machine']['cores']} cores"
        setting = (model, where, line["work"], line["sampling"], line["batch"])
        found.setdefault(setting, {})[line["drafts"]] = line
    out = [
        "| model | machine | work | sampling | batch | tokens/s without | with drafts | ratio "
        "| drafts right | tokens a row and step | ms a step without, with |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for setting, pair in found.items():
        if len(pair) == 2:
            plain, drafted = pair[False], pair[True]
            ratio = drafted["tokens_per_second"] / plain["tokens_per_second"]
            out.append(
                f"| {' | '.join(map(str, setting))} | {plain['tokens_per_second']:,.0f} "
                f"| {drafted['tokens_per_second']:,.0f} | {ratio:.2f} "
                f"| {drafted['acceptance_rate']:.0%} | {drafted['tokens_per_row_and_step']:.2f} "
                f"| {plain['step_milliseconds']:.2f}, {drafted['step_milliseconds']:.2f} |"
            )
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
