"""Kill the four stages fifty times at random moments, and finish them every time.

Each run is the real generator over the float64 toy model in a process of its own; the kill is a
SIGKILL from outside. A partition that is finished is compared with an uninterrupted run and a new
one begins. The summary goes to benchmarks/soak.md.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bulk_pipeline.storage.schemas import COMPLETIONS, TABLES
from bulk_pipeline.storage.store import Store
from bulk_pipeline_tests.crash import KEY, Crashes
from bulk_pipeline_tests.factories import read_rows
from bulk_pipeline_tests.test_faults import finished, leftovers, real_spec, stable_tables
from bulk_pipeline_tests.toy import toy_model

NUM_ROWS, FLUSH_ROWS = 150, 20


def stage_of(spec: dict[str, Any]) -> str:
    """The first table that is not complete: where the kill landed."""
    store = Store(spec["output"]["root"], spec["name"])
    for table in TABLES:
        manifest = store.partition(table, KEY).manifest()
        if manifest is None or not manifest.complete:
            return table
    return "after the last commit"


def committed(spec: dict[str, Any]) -> int:
    """Completions on disk."""
    manifest = Store(spec["output"]["root"], "data").partition(COMPLETIONS, KEY).manifest()
    return manifest.num_rows if manifest else 0


def num_finished(spec: dict[str, Any]) -> int:
    """Completions that the generator handed out, over all runs."""
    has_run = (Path(spec["output"]["root"]).parent / "finished").exists()
    return finished(spec).total() if has_run else 0


def soak(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill, resume and compare, until there were `num_kills` kills."""
    random_ = random.Random(seed)
    model = toy_model(folder / "model", "float64")
    source = folder / "source.jsonl"
    texts = (json.dumps({"text": f"question {number}"}) for number in range(NUM_ROWS))
    source.write_text("\n".join(texts) + "\n")

    def spec_of(name: str) -> dict[str, Any]:
        spec = real_spec(folder / name, source, model)
        spec["output"]["flush_rows"] = FLUSH_ROWS
        return spec

    stages: Counter[str] = Counter()
    repeats: list[int] = []
    given_up = partitions = 0
    with Crashes() as crashes:
        assert crashes.run(spec_of("warm-up"))["error"] is None
        started = time.monotonic()
        assert crashes.run(spec_of("whole"))["error"] is None
        seconds_whole = time.monotonic() - started
        shortest = seconds_whole
        expected = stable_tables(spec_of("whole"))
        while stages.total() < num_kills:
            spec = spec_of(f"partition-{partitions}")
            while stages.total() < num_kills:
                before = num_finished(spec)
                kept = committed(spec)
                # Every third early, so that the short stages get their share.
                limit = 0.3 if random_.random() < 1 / 3 else shortest
                began = time.monotonic()
                result = crashes.run(spec, kill_after=random_.uniform(0, limit))
                if result["signal"] != 9:
                    assert result["error"] is None, result["error"]
                    shortest = min(shortest, time.monotonic() - began)
                    break
                stages[stage_of(spec)] += 1
                new = num_finished(spec) - before
                lost = max(new - (committed(spec) - kept), 0)
                assert lost <= FLUSH_ROWS, lost
                repeats.append(lost)
            result = crashes.run(spec)
            assert result["error"] is None, result["error"]
            if errors := result["metadata"][2].get("status_error", 0):
                # Killed with the same request in flight, three times alone: taken for its fault.
                given_up += errors
                result = crashes.run(spec, redo=["error"])
                assert result["error"] is None, result["error"]
            assert stable_tables(spec) == expected
            assert len(read_rows(Store(spec["output"]["root"], "data"), COMPLETIONS)) == NUM_ROWS
            assert leftovers(spec) == []
            partitions += 1
    return {
        "kills": stages.total(),
        "stages": dict(stages),
        "partitions": partitions,
        "seconds_uninterrupted": round(seconds_whole, 2),
        "repeated_in_all": sum(repeats),
        "repeated_at_most": max(repeats),
        "given_up": given_up,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), options.kills, options.seed)
    seconds = time.monotonic() - started
    stages = ", ".join(f"{count} in {stage}" for stage, count in result["stages"].items())
    text = (
        f"# Soak\n\n`make soak`: {result['kills']} SIGKILLs at random moments of the four stages "
        f"(seed {options.seed}), {NUM_ROWS} rows a partition, `flush_rows: {FLUSH_ROWS}`, the "
        f"generator over the float64 toy model on a CPU.\n\n"
        f"- Where they landed: {stages}.\n"
        f"- {result['partitions']} partitions were finished; each table equals that of an "
        f"uninterrupted run over its stable columns, no file of an interrupted write is left.\n"
        f"- Completions made and lost at a kill: {result['repeated_in_all']} in all, "
        f"{result['repeated_at_most']} at most (bound: {FLUSH_ROWS}).\n"
        f"- Requests in flight at five kills, at three of them alone, given up as `error` and "
        f"redone when asked for: "
        f"{result['given_up']}.\n"
        f"- An uninterrupted run takes {result['seconds_uninterrupted']} s; all of it took "
        f"{seconds:.0f} s.\n"
    )
    Path(__file__).with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
