"""How many completion tokens a second: the engine against exllamav2's plain loop, same work.

    python benchmarks/bench_throughput.py MODEL [--rows 1024] [--batch 256] [--greedy]
        [--baseline-seconds 25] [--out FILE]

The work: prompts of 64-320 random token ids, completions of exactly 64-256 tokens, one seed. The
rate counts tokens produced over the whole run, prefill included. The baseline (DynamicGenerator,
every job enqueued, iterated) runs for the seconds given, with its prefill, on the same model.
"""

import argparse
import json
import random
import time
from pathlib import Path

import exllamav2
import torch
from exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
)

from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.spec import GeneratorSettings

SEED = 1


def workload(rows: int, vocab: int) -> list[tuple[list[int], int]]:
    """Prompt ids and the number of tokens to generate, a row each."""
    rnd = random.Random(SEED)
    return [
        (
            [rnd.randrange(300, vocab - 300) for _ in range(rnd.randint(64, 320))],
            rnd.randint(64, 256),
        )
        for _ in range(rows)
    ]


def ours(generator, work, greedy: bool) -> dict:
    requests = [
        Request(
            i,
            ids,
            SamplingParams(temperature=0.0 if greedy else 1.0, top_p=0.6, max_new_tokens=n, seed=i),
        )
        for i, (ids, n) in enumerate(work)
    ]
    torch.cuda.synchronize()
    before = (generator.stats.steps, generator.stats.rows)
    started = time.perf_counter()
    tokens = rows = 0
    for completion in generator.run(iter(requests)):
        tokens += len(completion.token_ids)
        rows += 1
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    assert rows == len(work)
    assert tokens == sum(n for _, n in work)
    steps = generator.stats.steps - before[0]
    return {
        "completion_tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "steps": steps,
        "mean_batch": round((generator.stats.rows - before[1]) / steps, 1),
    }


def baseline(model, cache, work, batch: int, greedy: bool, seconds: float) -> dict:
    """exllamav2's own generator on the same loaded model."""
    settings = (
        ExLlamaV2Sampler.Settings.greedy()
        if greedy
        else ExLlamaV2Sampler.Settings(
            temperature=1.0, top_k=0, top_p=0.6, token_repetition_penalty=1.0
        )
    )
    tokenizer = exllamav2.ExLlamaV2Tokenizer(model.config)
    generator = ExLlamaV2DynamicGenerator(
        model=model, cache=cache, tokenizer=tokenizer, max_batch_size=batch, max_q_size=1
    )
    for i, (ids, n) in enumerate(work):
        generator.enqueue(
            ExLlamaV2DynamicJob(
                input_ids=torch.tensor([ids]), max_new_tokens=n, gen_settings=settings, seed=i
            )
        )
    started = time.perf_counter()
    tokens = 0
    while generator.num_remaining_jobs() and time.perf_counter() - started < seconds:
        tokens += sum(result["stage"] == "streaming" for result in generator.iterate())
    torch.cuda.synchronize()
    took = time.perf_counter() - started
    return {"seconds": round(took, 2), "tokens_per_second": round(tokens / took, 1)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--baseline-seconds", type=float, default=0)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    generator = load_generator(
        GeneratorSettings(
            model=arguments.model,
            device="cuda",
            max_batch_size=arguments.batch,
            cache_tokens=arguments.batch * 768,
            max_seq_len=4096,
            max_chunk_size=8192,
        )
    )
    model = generator._models[0].exllamav2
    work = workload(arguments.rows, model.config.vocab_size)
    ours(generator, work[:64], arguments.greedy)  # warm-up: kernels are chosen and compiled
    runs = [ours(generator, work, arguments.greedy) for _ in range(arguments.repeats)]
    best = sorted(runs, key=lambda run: run["tokens_per_second"])[len(runs) // 2]
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "exllamav2": exllamav2.__version__,
        "model": Path(arguments.model).name,
        "batch": arguments.batch,
        "rows": arguments.rows,
        "sampling": "greedy" if arguments.greedy else "temperature 1, top_p 0.6",
        "ours": best,
        "all_runs": [run["tokens_per_second"] for run in runs],
    }
    if arguments.baseline_seconds:
        result["baseline"] = baseline(
            model, generator._generator.cache, work, arguments.batch, arguments.greedy,
            arguments.baseline_seconds,
        )  # fmt: skip
        result["ratio"] = round(
            best["tokens_per_second"] / result["baseline"]["tokens_per_second"], 2
        )
    print(json.dumps(result))
    if arguments.out:
        with open(arguments.out, "a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
