"""How right the GPU side is: agreement with transformers, batch invariance, caches, mixed lengths.

    python benchmarks/gpu_correctness.py FP16_FOLDER EXL2_FOLDER OUT.json [MEASUREMENT ...]

FP16_FOLDER and EXL2_FOLDER hold the same model. Prints a line a measurement, and writes the
measurements (all, or those named) into OUT.json.
"""

import json
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from exllamav2 import ExLlamaV2Tokenizer
from exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from bulk_pipeline.engine.cuda import load_cuda_model
from bulk_pipeline.engine.loading import load_generator
from bulk_pipeline.engine.request import Request, SamplingParams
from bulk_pipeline.spec import GeneratorSettings

DATA = Path(__file__).parent.parent / "data" / "demo"
NUM_PROMPTS = 200
NEW_TOKENS = 40
AGREED_TOKENS = 32
END = (2,)
WORKERS = 5
CHUNK = 64  # tokens a pass when perplexity is measured: later chunks read what the cache holds


def prompts(tokenizer) -> list[list[int]]:
    """200 different chats: the questions of the sample data, and the same with a rider."""
    questions: dict[str, None] = {}
    for path in sorted(DATA.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            text = json.loads(line)["question"]
            if text and text.strip() and "\ud83d" not in text:
                questions[text] = None
    asked = [*questions, *(f"{text}\n\nAnswer in one sentence." for text in questions)]
    assert len(asked) >= NUM_PROMPTS
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True,
            return_dict=False,
        )
        for text in asked[:NUM_PROMPTS]
    ]  # fmt: skip


def complete(generator, all_ids, **changes) -> list[tuple[int, ...]]:
    params = SamplingParams(
        **{"temperature": 0, "max_new_tokens": NEW_TOKENS, "stop_token_ids": END} | changes
    )
    requests = [Request(i, ids, params) for i, ids in enumerate(all_ids)]
    found = {c.request_id: c.token_ids for c in generator.run(requests)}
    assert len(found) == len(all_ids)
    return [found[i] for i in range(len(all_ids))]


def settings(model, **changes) -> GeneratorSettings:
    return GeneratorSettings(
        **{"model": str(model), "device": "cuda", "cache_tokens": 65536, "max_batch_size": 64}
        | changes
    )


def first_difference(a, b) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def generate(folder, all_ids, dtype="float16", attention="sdpa", batch=1) -> list[list[int]]:
    """Generate greedily with transformers, padded on the left where the batch is above 1."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    model = model.cuda().eval()
    answers = []
    for first in range(0, len(all_ids), batch):
        some = all_ids[first : first + batch]
        width = max(map(len, some))
        given = torch.tensor([[END[0]] * (width - len(ids)) + ids for ids in some], device="cuda")
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in some]).cuda()
        with torch.inference_mode():
            found = model.generate(
                given, attention_mask=mask, do_sample=False,
                max_new_tokens=NEW_TOKENS, eos_token_id=list(END), pad_token_id=END[0],
            )  # fmt: skip
        answers += [_to_the_end(row) for row in found[:, width:].tolist()]
    return answers


def _to_the_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(END[0]) + 1] if END[0] in ids else ids


def agreement(folder, all_ids) -> dict:
    """Compare with transformers' generate, and transformers with itself run in other ways."""
    ways = {
        "reference": {},  # float16, sdpa, a prompt at a time without padding
        "eager": {"attention": "eager"},
        "float32": {"dtype": "float32"},
    }
    shares = [(name, i) for name in ways for i in range(WORKERS)]
    context = torch.multiprocessing.get_context("spawn")  # launching kernels is what takes long
    answers: dict[str, list] = {name: [None] * len(all_ids) for name in ways}
    with context.Pool(len(shares)) as pool:
        pending = [
            pool.apply_async(generate, (folder, all_ids[i::WORKERS]), ways[name])
            for name, i in shares
        ]
        for batch in (1, 64):
            generator = load_generator(settings(folder, max_batch_size=batch))
            answers[f"ours_batch_{batch}"] = [list(a) for a in complete(generator, all_ids)]
            generator.close()
        for batch in (8, 64):
            answers[f"batch_{batch}"] = generate(folder, all_ids, batch=batch)
        for (name, i), share in zip(shares, pending, strict=True):
            answers[name][i::WORKERS] = share.get()
    reference, exact = answers["reference"], answers["float32"]
    return {
        "prompts": len(all_ids),
        "agree_for_32_tokens_with_reference": {
            name: agreeing(found, reference) for name, found in answers.items()
        },
        "agree_for_32_tokens_with_float32": {
            name: agreeing(found, exact) for name, found in answers.items()
        },
        "differences": differences(folder, all_ids, answers["ours_batch_64"], reference),
    }


def agreeing(some, others) -> int:
    """Count the rows that agree for at least the first AGREED_TOKENS."""
    places = [first_difference(a, b) for a, b in zip(some, others, strict=True)]
    return sum(place is None or place >= AGREED_TOKENS for place in places)


def differences(folder, all_ids, ours, theirs) -> list[dict]:
    """Say how far apart the logits of both tokens are, where rows differ for the first time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).cuda().eval()
    found = []
    for ids, our, their in zip(all_ids, ours, theirs, strict=True):
        place = first_difference(our, their)
        if place is None or place >= min(len(our), len(their)):
            continue
        whole = torch.tensor([ids + their[:place]], device="cuda")
        with torch.inference_mode():
            logits = model(whole).logits[0, -1].float()
        gap = float(logits[their[place]] - logits[our[place]])
        found.append({"prompt_tokens": len(ids), "place": place, "logit_gap": round(gap, 4)})
    return sorted(found, key=lambda one: -one["logit_gap"])


def plain_loop(folder, all_ids) -> dict:
    """Compare greedy answers with those of exllamav2's DynamicGenerator, driven the plain way."""
    generator = load_generator(settings(folder, weights="quantized"))
    ours = complete(generator, all_ids)
    generator.close()
    wanted = settings(folder, weights="quantized")
    model, cache, _ = load_cuda_model(wanted, Path(folder), rows=64, cache_tokens=65536)
    plain = ExLlamaV2DynamicGenerator(
        model=model.exllamav2,
        cache=cache,
        tokenizer=ExLlamaV2Tokenizer(model.config),
        max_batch_size=64,
        max_q_size=1,
    )
    greedy = ExLlamaV2Sampler.Settings.greedy()
    for number, ids in enumerate(all_ids):
        job = ExLlamaV2DynamicJob(
            input_ids=torch.tensor([ids]),
            max_new_tokens=NEW_TOKENS,
            gen_settings=greedy,
            stop_conditions=list(END),
            identifier=number,
        )
        plain.enqueue(job)
    theirs: list[list[int]] = [[] for _ in all_ids]
    while plain.num_remaining_jobs():
        for result in plain.iterate():
            if result["stage"] == "streaming" and "token_ids" in result:
                theirs[result["identifier"]] += result["token_ids"][0].tolist()
    model.close()
    without_end = [[i for i in ids if i not in END] for ids in ours]
    differing = sum(a != b for a, b in zip(without_end, theirs, strict=True))
    return {"rows": len(all_ids), "rows_that_differ": differing}


def batch_invariance(folder, all_ids, weights: str = "auto") -> dict:
    answers = {}
    for batch in (1, 8, 64):
        generator = load_generator(settings(folder, max_batch_size=batch, weights=weights))
        answers[batch] = complete(generator, all_ids)
        generator.close()
    return {
        f"rows_that_differ_{a}_{b}": sum(
            x != y for x, y in zip(answers[a], answers[b], strict=True)
        )
        for a, b in ((1, 8), (1, 64), (8, 64))
    } | {"rows": len(all_ids)}


@torch.inference_mode()
def perplexity(model_folder, cache_type, ids) -> float:
    from exllamav2.attn import ExLlamaV2Attention

    wanted = settings(model_folder, cache_type=cache_type, weights="quantized")
    model, cache, _ = load_cuda_model(wanted, Path(model_folder), rows=64, cache_tokens=4096)
    pages = torch.arange(16, dtype=torch.int32)[None]
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, CHUNK):
        chunk = torch.tensor([ids[start : start + CHUNK]])
        params = ExLlamaV2Attention.PagedParams(
            batch_size=1, block_index=pages.clone(),
            cache_seqlens=torch.tensor([start], dtype=torch.int32),
            max_cache_seqlen=start, page_size=256, q_len=chunk.shape[1],
        )  # fmt: skip
        logits = model.forward_chunk(input_ids=chunk, attn_params=params, cache=cache)["logits"]
        targets = torch.tensor(ids[start + 1 : start + 1 + CHUNK], device=logits.device)
        losses = torch.nn.functional.cross_entropy(
            logits[0, : len(targets)].float(), targets, reduction="sum"
        )
        total, count = total + losses.item(), count + len(targets)
    model.close()
    return round(float(torch.tensor(total / count).exp()), 4)


def perplexities(fp16, exl2, tokenizer) -> dict:
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False)[:2000]
    found = {"tokens": len(ids), "fp16_fp16": perplexity(fp16, "fp16", ids)}
    for cache_type in ("fp16", "q8", "q6", "q4"):
        found[f"exl2_{cache_type}"] = perplexity(exl2, cache_type, ids)
    return found


def mixed_lengths(folder) -> dict:
    """2,000 rows of 1 token to the limit, in a cache that holds a tenth of them at once."""
    rnd = random.Random(2)
    limit, rows = 2048, 2000
    work = []
    for i in range(rows):
        total = rnd.choice([2, 255, 256, 257, 512, 513, limit, limit + 1, rnd.randint(2, limit)])
        new = rnd.randint(1, min(total - 1, 96))
        ids = [rnd.randrange(100, 40000) for _ in range(total - new)]
        params = SamplingParams(
            temperature=float(i % 2), top_p=0.9, max_new_tokens=new, seed=i, stop_token_ids=END
        )
        work.append(Request(i, ids, params))
    tokens = sum(len(r.input_ids) + r.sampling.max_new_tokens for r in work)
    cache = tokens // 10 // 256 * 256
    generator = load_generator(
        settings(folder, cache_tokens=cache, max_seq_len=limit, max_batch_size=256)
    )
    statuses: dict[str, int] = {}
    peaks = []
    started = time.monotonic()
    for number, completion in enumerate(generator.run(iter(work))):
        statuses[completion.status] = statuses.get(completion.status, 0) + 1
        if number % 400 == 399:
            peaks.append(round(torch.cuda.max_memory_allocated() / 2**30, 3))
            torch.cuda.reset_peak_memory_stats()
    seconds = time.monotonic() - started
    stats = generator.stats
    generator.close()
    return {
        "rows": rows, "statuses": statuses, "cache_tokens": cache, "seconds": round(seconds, 1),
        "peak_gib_each_400_rows": peaks, "mean_batch": round(stats.mean_batch_size, 1),
        "completion_tokens": stats.completion_tokens,
    }  # fmt: skip


def main() -> None:
    fp16, exl2 = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(fp16)
    all_ids = prompts(tokenizer)
    results = {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "exllamav2": version("exllamav2"),
            "transformers": transformers.__version__,
        },
        "prompt_tokens": [min(map(len, all_ids)), max(map(len, all_ids))],
    }
    for name, measure in (
        ("mixed_lengths", lambda: mixed_lengths(exl2)),
        ("perplexity", lambda: perplexities(fp16, exl2, tokenizer)),
        ("batch_invariance_fp16", lambda: batch_invariance(fp16, all_ids)),
        ("batch_invariance_exl2", lambda: batch_invariance(exl2, all_ids, "quantized")),
        ("batch_invariance_exl2_float16", lambda: batch_invariance(exl2, all_ids, "float16")),
        ("plain_loop_exl2", lambda: plain_loop(exl2, all_ids)),
        ("plain_loop_fp16", lambda: plain_loop(fp16, all_ids)),
        ("agreement_fp16", lambda: agreement(fp16, all_ids)),
    ):
        if sys.argv[4:] and name not in sys.argv[4:]:
            continue
        started = time.monotonic()
        results[name] = measure()
        print(
            f"{name} ({time.monotonic() - started:.0f} s):", json.dumps(results[name]), flush=True
        )
    Path(sys.argv[3]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
