"""Which parts of the float16 forward pass keep greedy answers from being transformers'.

    python benchmarks/agreement_parts.py FP16_FOLDER [--results OUT.json]

The same 200 prompts as gpu_correctness.py, one at a time, up to 33 greedy tokens, by a plain loop
over the product's own forward pass: as it is, with all its parts that compute in another order than
transformers (float16, sdpa) replaced by transformers' own, and with all but one of them replaced.
Prints for each in how many rows the first 32 tokens agree, and how far apart the logits behind the
prompts are.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_correctness import AGREED_TOKENS, END, agreeing, prompts, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from bulk_pipeline.engine import attention_kernels, dense, kernels
from bulk_pipeline.engine.dense import DenseModel
from bulk_pipeline.engine.loading import load_generator

PARTS = {
    "prompt_attention": "attention over prompts: sdpa",
    "paged_attention": "attention of a generated token: sdpa",
    "last_token": "the prompt's last token read with the others, not generated from",
    "norm": "RMS norms in PyTorch's operations",
    "activation": "SiLU and product in PyTorch's operations",
    "products": "queries, keys and values, gate and up: a product each",
}
SHARES = 6  # processes of the reference: launching kernels is what takes long
PAGES = 8  # of the one row that runs


def main() -> int:
    """Compare, and print or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder
    all_ids = prompts(AutoTokenizer.from_pretrained(folder))
    ways: dict[str, tuple[str, ...]] = {"as it is": (), "all replaced": tuple(PARTS)}
    for part in PARTS:
        ways[f"all but {part}"] = tuple(other for other in PARTS if other != part)
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(SHARES + len(ways)) as pool:
        shares = [pool.apply_async(reference, (folder, all_ids[i::SHARES])) for i in range(SHARES)]
        pending = {way: pool.apply_async(ours, (folder, all_ids, ways[way])) for way in ways}
        answers: list[Any] = [None] * len(all_ids)
        logits: list[Any] = [None] * len(all_ids)
        for i, share in enumerate(shares):
            answers[i::SHARES], logits[i::SHARES] = share.get()
        found = {}
        for way, result in pending.items():
            own_answers, own_logits = result.get()
            apart = np.stack(own_logits) - np.stack(logits)
            found[way] = {
                "rows_that_agree": agreeing(own_answers, answers),
                "rows_with_equal_logits": int((apart == 0).all(1).sum()),
                "root_mean_square_difference": round(float(np.sqrt((apart**2).mean())), 5),
            }
            print(way, json.dumps(found[way]), flush=True)
    if arguments.results:
        arguments.results.write_text(json.dumps(found, indent=1) + "\n")
    return 0


@torch.inference_mode()
def reference(folder: str, all_ids: list[list[int]]) -> tuple[list[list[int]], list[np.ndarray]]:
    """Return transformers' answers, and its logits behind each prompt."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float16, attn_implementation="sdpa"
    )
    model = model.cuda().eval()
    answers, first_logits = [], []
    for ids in all_ids:
        past, given, answer = None, ids, []
        while not is_done(answer):
            out = model(
                torch.tensor([given], device="cuda"),
                past_key_values=past, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            past, logits = out.past_key_values, out.logits[0, -1]
            if not answer:
                first_logits.append(logits.float().cpu().numpy())
            answer.append(best(logits))
            given = answer[-1:]
        answers.append(answer)
    return answers, first_logits


def best(logits: torch.Tensor) -> int:
    """Return the likeliest token, the first of equal ones."""
    return int(logits.float().argmax())


def is_done(answer: list[int]) -> bool:
    return len(answer) > AGREED_TOKENS or (bool(answer) and answer[-1] in END)


@torch.inference_mode()
def ours(
    folder: str, all_ids: list[list[int]], replaced: tuple[str, ...]
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Return the same of the product's forward pass, with these parts replaced."""
    generator = load_generator(settings(folder, max_batch_size=1, cache_tokens=PAGES * 256))
    model: DenseModel = generator._loop.model  # type: ignore[union-attr]
    replace(model, replaced)
    pages = np.arange(PAGES, dtype=np.int32)[None]
    table = torch.from_numpy(pages).cuda()

    def follow(token: int, length: int) -> torch.Tensor:
        """Logits behind a token that stands after so many others."""
        lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
        return model.decode(torch.tensor([token], device="cuda"), lengths, table, length + 1)[0]

    answers, first_logits = [], []
    for ids in all_ids:
        length = len(ids) if "last_token" in replaced else len(ids) - 1
        hidden = model._prefill(
            np.array(ids[:length]), np.zeros(1, np.int32), np.array([length], np.int32), pages,
            wants_hidden=True,
        )  # fmt: skip
        if length == len(ids):
            assert hidden is not None
            logits = F.linear(hidden[-1:], model._weights.head)[0, : model.vocab_size]
        else:
            logits = follow(ids[-1], length)
        first_logits.append(logits.float().cpu().numpy())
        answer = [best(logits)]
        while not is_done(answer):
            answer.append(best(follow(answer[-1], len(ids) + len(answer) - 1)))
        answers.append(answer)
    return answers, first_logits


def replace(model: DenseModel, parts: tuple[str, ...]) -> None:
    """Let the forward pass of this process compute these parts as transformers does."""
    num_heads = model._weights.num_heads
    if "prompt_attention" in parts:
        attention_kernels.prompt_attention = lambda packed, keys, values, rows, scale: attend(
            packed[:, :num_heads], keys[: len(packed)], values[: len(packed)], scale
        )
    if "paged_attention" in parts:
        model._is_captured = False  # the number of keys is read on the host

        def paged_attention(packed, keys, values, table, num_keys, scale, *tuning):  # type: ignore[no-untyped-def]
            here = int(num_keys[0])
            return attend(packed[:, :num_heads], keys[:here], values[:here], scale)

        attention_kernels.paged_attention = paged_attention
    if "norm" in parts:
        kernels.rms_norm = rms_norm
    if "activation" in parts:
        kernels.silu_mul = silu_mul
    if "products" in parts:
        dense.F = _Functional(model)  # type: ignore[assignment]


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """PyTorch's attention of [tokens, heads, size] to keys and values of the one row there is."""
    q, k, v = (each.transpose(0, 1)[None].contiguous() for each in (queries, keys, values))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=len(queries) > 1, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).contiguous()


def rms_norm(
    residual: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if added is not None:
        residual.add_(added)
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = weight * wide.half()
    if out is None:
        return normed
    out[: len(normed)].copy_(normed)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate.contiguous()) * up


class _Functional:
    """torch.nn.functional as `dense` uses it, products of joined weights made one by one."""

    embedding = staticmethod(F.embedding)

    def __init__(self, model: DenseModel) -> None:
        weights = model._weights
        q_size = weights.num_heads * weights.head_size
        kv_size = weights.num_kv_heads * weights.head_size
        self._sizes: dict[int, list[int]] = {}
        for layer in weights.layers:
            half = layer.gate_up.shape[0] // 2
            self._sizes[layer.qkv.data_ptr()] = [q_size, kv_size, kv_size]
            self._sizes[layer.qkv[q_size:].data_ptr()] = [kv_size, kv_size]
            self._sizes[layer.gate_up.data_ptr()] = [half, half]

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = self._sizes.get(weight.data_ptr(), [len(weight)])
        if bias is not None or sum(rows) != len(weight):
            return F.linear(x, weight, bias)
        ends = itertools.accumulate(rows)
        parts = [weight[end - count : end] for end, count in zip(ends, rows, strict=True)]
        return torch.cat([F.linear(x, part) for part in parts], dim=-1)


if __name__ == "__main__":
    sys.exit(main())
