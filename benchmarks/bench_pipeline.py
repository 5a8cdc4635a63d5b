"""Measure the four stages around a trivial stand-in for the model: rows/s and memory.

    python benchmarks/bench_pipeline.py 100000 1000000

Each size runs in a process of its own. The prompts stage is compared with rendering and batch
encoding alone, on the first of the same rows, before and after it in the same process. Results:
benchmarks/bench_pipeline.json.
"""

import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

RESULTS = Path(__file__).with_suffix(".json")
MODEL = Path(__file__).parent.parent / "data/models/smollm2-135m-instruct"
MAX_RSS_GIB = 1.5
MIN_SHARE_OF_BARE = 0.8
MIN_COMPLETIONS_PER_SECOND = 5000
MOST_BARE_ROWS = 50_000
TEXT = (
    "what is the capital of and how many people live there explain why water boils at lower "
    "temperature on a mountain write short story about robot who learns to paint translate this "
    "sentence into french summarise following paragraph list three reasons for against please"
)


class StandIn:
    """Answers at once with a few fixed tokens, a batch of 64 at a time."""

    provenance: ClassVar[dict[str, Any]] = {"generator": "stand-in"}

    def run(
        self, requests: Iterable[Any], on_step: Callable[[], None] | None = None
    ) -> Iterator[Any]:
        """Yield a completion a request."""
        from bulk_pipeline.engine.request import Completion, Status

        for number, request in enumerate(requests):
            yield Completion(
                request.request_id,
                Status.STOP,
                text="This is an answer of usual length, as a small model gives it. " * 4,
                token_ids=tuple(range(64)),
                stop_reason="2",
                prompt_tokens=len(request.input_ids),
            )
            if on_step is not None and number % 64 == 63:
                on_step()


def write_source(path: Path, num_rows: int) -> None:
    """Chats of 8 to 40 words, every one different."""
    words, random_ = TEXT.split(), random.Random(0)
    with path.open("w") as file:
        for number in range(num_rows):
            text = " ".join(random_.choices(words, k=random_.randint(8, 40)))
            file.write(json.dumps({"number": number, "text": f"{text} {number}?"}) + "\n")


def bare_rows_per_second(store: Any, spec: Any) -> float:
    """Rendering and batch encoding alone, as transformers and tokenizers do them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec.generator.model)
    partition = store.partition("raw_dataset", "all")
    rows, seconds = 0, 0.0
    for batch in partition.read(["text"], 1024):
        texts = batch.column("text").to_pylist()
        started = time.perf_counter()
        chats = [[{"role": "user", "content": text}] for text in texts]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        tokenizer._tokenizer.encode_batch(prompts, add_special_tokens=False)
        seconds += time.perf_counter() - started
        rows += len(texts)
        if rows >= MOST_BARE_ROWS:
            break
    return rows / seconds


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(num_rows: int) -> dict[str, Any]:
    """All four stages of one partition of `num_rows`, in this process."""
    from bulk_pipeline.engine.tokenizer import load_tokenizer
    from bulk_pipeline.spec import load_spec
    from bulk_pipeline.stages.complete import complete_partition
    from bulk_pipeline.stages.format import format_partition
    from bulk_pipeline.stages.ingest import ingest_partition
    from bulk_pipeline.stages.join import join_partition
    from bulk_pipeline.storage.store import Store

    with tempfile.TemporaryDirectory() as folder:
        write_source(Path(folder, "source.jsonl"), num_rows)
        spec = load_spec(
            {
                "name": "bench",
                "source": {"path": f"{folder}/source.jsonl"},
                "prompt": {"column": "text"},
                "sampling": {"temperature": 0.7, "max_new_tokens": 128},
                "generator": {"model": str(MODEL)},
                "output": {"root": f"{folder}/tables"},
            }
        )
        store = Store(spec.output.root, spec.name)
        load_tokenizer(MODEL)  # imports transformers, which takes seconds
        assert spec.generator is not None
        settings = spec.generator
        stages: dict[str, Callable[[], Any]] = {
            "raw_dataset": lambda: ingest_partition(spec, store, "all"),
            "prompts": lambda: format_partition(spec, store, "all", settings),
            "completions": lambda: complete_partition(spec, store, "all", StandIn, "model"),
            "output": lambda: join_partition(spec, store, "all"),
        }
        result: dict[str, Any] = {"rows": num_rows, "stages": {}}
        bare = []
        for name, stage in stages.items():
            if name in ("prompts", "completions"):  # before and after the prompts stage
                bare.append(bare_rows_per_second(store, spec))
            started = time.perf_counter()
            assert stage().rows == num_rows
            seconds = time.perf_counter() - started
            result["stages"][name] = {
                "rows_per_second": round(num_rows / seconds),
                "seconds": round(seconds, 2),
                "peak_mib_so_far": round(peak_mib()),
            }
        result["peak_mib"] = round(peak_mib())
        result["bare_rows_per_second"] = round(max(bare))
        result["prompts_share_of_bare"] = round(
            result["stages"]["prompts"]["rows_per_second"] / max(bare), 3
        )
        assert (
            pq.read_metadata(
                store.partition("output", "all").part_path(
                    store.partition("output", "all").complete_manifest().parts[0]
                )
            ).num_rows
            == num_rows
        )
    return result


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(int(sys.argv[2]))))
        return
    runs = []
    for num_rows in map(int, sys.argv[1:] or ["100000", "1000000"]):
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(num_rows)], stdout=subprocess.PIPE, check=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(runs[-1]), flush=True)
    about = {
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
    }
    RESULTS.write_text(json.dumps({"about": about, "runs": runs}, indent=1) + "\n")
    for run in runs:
        assert run["peak_mib"] < MAX_RSS_GIB * 1024, run["peak_mib"]
        assert run["stages"]["completions"]["rows_per_second"] >= MIN_COMPLETIONS_PER_SECOND
        assert run["prompts_share_of_bare"] >= MIN_SHARE_OF_BARE, run["prompts_share_of_bare"]


if __name__ == "__main__":
    main()
