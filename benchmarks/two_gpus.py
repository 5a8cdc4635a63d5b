"""Measure two GPUs of one machine: two partitions, one in slices, and one model over both.

    PYTHONPATH=. python benchmarks/two_gpus.py MODEL --rows 1024

Each process takes a GPU as `completions` does, loads the model, warms up, waits for the other, and
answers greedily; rows are those of throughput.py's workload `mixed`. The rate of two is what both
answered by the time that the slower one took. Results: a line in benchmarks/results/two_gpus.jsonl.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from throughput_work import describe_machine, describe_model, describe_versions, make_work, now

from bulk_pipeline import ExLlamaV2Resource
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.spec import load_spec
from bulk_pipeline.stages.complete import complete_partition, complete_slice
from bulk_pipeline.storage.schemas import COMPLETIONS, PROMPTS
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.factories import make_prompt, read_rows, write_prompts

RESULTS = Path(__file__).parent / "results" / "two_gpus.jsonl"
WARM_UP, WAIT_SECONDS, SAME_TOKENS = 64, 1800, 8


def write_partition(store: Store, key: str, rows: Sequence[Any]) -> None:
    """Prompts of a partition, which ask for greedy answers that only their limit ends."""
    prompts = [
        make_prompt(
            number,
            input_ids=row.input_ids,
            sampling={"max_new_tokens": row.max_new_tokens},
        )
        for number, row in enumerate(rows)
    ]
    write_prompts(store, prompts, key=key)


def work(folder: Path, settings: dict[str, Any], key: str, cut: list[int], others: int) -> None:
    """What a process does; prints its numbers as JSON."""
    spec = load_spec(spec_values(folder, settings))
    store = Store(spec.output.root, spec.name)
    resource = ExLlamaV2Resource(**settings)
    load_seconds = 0.0

    def generator() -> Any:
        nonlocal load_seconds
        started = time.monotonic()
        made = resource.generator(f"{key} {cut}")
        load_seconds = time.monotonic() - started
        params = SamplingParams(temperature=0, max_new_tokens=16)
        list(made.run(Request(i, [5 + i, 6, 7], params) for i in range(WARM_UP)))
        meet(folder / f"ready-{others}-{bool(cut)}", f"{key}-{cut}", others)
        return made

    arguments = (generator, "model")
    if cut:
        report = complete_slice(spec, store, key, *cut, *arguments)
    else:
        report = complete_partition(spec, store, key, *arguments)
    resource.close()
    print(json.dumps(report.metadata | {"load_seconds": load_seconds}))


def meet(folder: Path, name: str, others: int) -> None:
    """Wait until so many processes are ready."""
    folder.mkdir(exist_ok=True)
    (folder / name.replace(" ", "")).touch()
    until = time.monotonic() + WAIT_SECONDS
    while len(list(folder.iterdir())) < others:
        if time.monotonic() > until:
            raise TimeoutError("the other process did not get so far; is there a second GPU?")
        time.sleep(0.01)


def spec_values(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The dataset."""
    return {
        "name": "bench",
        "source": {"path": "none"},
        "prompt": {"column": "text"},
        "generator": settings,
        "output": {"root": str(folder / "tables")},
    }


def run_at_once(
    folder: Path, settings: dict[str, Any], jobs: Sequence[tuple[str, list[int]]]
) -> dict[str, Any]:
    """Processes for partitions or slices at the same time; what they did together."""
    order = {"folder": str(folder), "settings": settings, "others": len(jobs)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(order | {"key": key, "cut": cut})],
            stdout=subprocess.PIPE, text=True,
        )
        for key, cut in jobs
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a process failed; see above")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    seconds = max(each["generation_seconds"] for each in found)
    tokens = sum(each["completion_tokens"] for each in found)
    return {
        "completion_tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "load_seconds": [round(each["load_seconds"], 1) for each in found],
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All measurements, with the share of rows that the slices answer as one process does."""
    config = json.loads((Path(options.model) / "config.json").read_text())
    rows = make_work("mixed", 3 * options.rows, int(config["vocab_size"]))
    settings = {"model": options.model, "device": options.device} | json.loads(options.settings)
    store = Store(str(folder / "tables"), "bench")
    parts = {name: rows[n * options.rows : (n + 1) * options.rows] for n, name in enumerate("abc")}
    for name, part in parts.items():
        write_partition(store, name, part)
    found = {"one": run_at_once(folder, settings, [("a", [])])}
    found["two"] = run_at_once(folder, settings, [("b", []), ("c", [])])
    sliced = Store(str(folder / "sliced" / "tables"), "bench")
    write_partition(sliced, "a", parts["a"])
    cuts = [("a", [1, 2]), ("a", [2, 2])]
    found["sliced"] = run_at_once(folder / "sliced", settings, cuts)
    spec = load_spec(spec_values(folder / "sliced", settings))
    report = complete_partition(spec, sliced, "a", _nothing_left, "model")
    found["sliced"] |= {
        "rows": report.rows,
        "same": round(_same(store, sliced), 4),
        "requests_run_after": report.metadata["requests_run"],
    }
    if not options.without_split:
        split = Store(str(folder / "split" / "tables"), "bench")
        write_partition(split, "a", parts["a"])
        two = settings | {"gpus": 2}
        found["split"] = run_at_once(folder / "split", two, [("a", [])])
        found["split"]["same"] = round(_same(store, split), 4)
    one, two_at_once = found["one"]["tokens_per_second"], found["two"]["tokens_per_second"]
    return {"rows": options.rows, "times_one": round(two_at_once / one, 3), **found}


def _nothing_left() -> Any:
    raise AssertionError("the slices left requests")


def _same(store: Store, other: Store) -> float:
    """Share of rows whose first tokens agree; the batch around them differs."""
    ids = [
        [tuple(row["completion_ids"][:SAME_TOKENS]) for row in read_rows(each, COMPLETIONS, "a")]
        for each in (store, other)
    ]
    assert len(ids[0]) == len(ids[1]) == len(read_rows(store, PROMPTS, "a"))
    return sum(a == b for a, b in zip(*ids, strict=True)) / len(ids[0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and add a line to the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="model folder")
    parser.add_argument("--rows", type=int, default=1024, help="of a partition")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--settings", default="{}", help="of generator, as JSON")
    parser.add_argument("--without-split", action="store_true", help="no model over both GPUs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        order = json.loads(options.worker)
        work(Path(order.pop("folder")), **order)
        return
    if not options.model:
        parser.error("give a model folder")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    found |= {
        "model": describe_model(options.model, None),
        "machine": describe_machine(options.device == "cuda"),
        "versions": describe_versions(None),
        "date": now(),
    }
    with options.results.open("a") as results:
        results.write(json.dumps(found) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
