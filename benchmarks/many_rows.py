"""Does the generator grow or slow down over many short rows? 20,000 of them, on a CPU.

    python benchmarks/many_rows.py [ROWS]

A tiny random Llama, prompts of 4 to 300 tokens that now and then share their beginning, answers
of 1 to 12 tokens, greedy and sampled, in a cache that is full throughout. Prints a line a thousand
rows: the processor time they took, and the memory of the process after them.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline_tests.toy import VOCAB_SIZE, toy_model


def requests(count: int):
    rnd = random.Random(0)
    shared = [rnd.randrange(5, VOCAB_SIZE) for _ in range(280)]
    for i in range(count):
        own = [rnd.randrange(5, VOCAB_SIZE) for _ in range(rnd.randint(4, 20))]
        ids = shared + own if i % 10 == 0 else own
        params = SamplingParams(
            temperature=float(i % 2), top_p=0.9, seed=i, max_new_tokens=rnd.randint(1, 12)
        )
        yield Request(i, ids, params)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = toy_model(Path(folder) / "toy")
        generator = load_generator(
            GeneratorSettings(model=str(model), device="cpu", max_batch_size=32, cache_tokens=8192)
        )
    process, started = psutil.Process(), time.process_time()
    done = 0
    print("| rows | processor seconds | memory in MiB |\n| --- | --- | --- |")
    for completion in generator.run(requests(rows)):
        assert completion.error is None
        done += 1
        if done % 1000 == 0:
            now = time.process_time()
            print(f"| {done} | {now - started:.2f} | {process.memory_info().rss / 2**20:.0f} |")
            started = now
    assert done == rows


if __name__ == "__main__":
    main()
