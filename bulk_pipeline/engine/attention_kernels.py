"""Triton kernels of attention over pages: of prompts, and of one new token a row.

Scores and sums are float32, what they weigh is rounded to float16. None of the launches depends on
data, and each can be captured in a CUDA graph. A slot is a token's place in the cache, counted
over all pages.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bulk_pipeline.spec import PAGE_TOKENS

MIN_DOT = 16  # the smallest side of a tensor-core product
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """How the decoding kernel reads the cache.

    Attributes
    ----------
    block
        Keys read at once; divides a page.
    warps, stages
        As Triton's num_warps and num_stages. Finding a key's page takes stages of its own: 5 keep
        two blocks on their way, 3 only one.
    """

    block: int = 64
    warps: int = 4
    stages: int = 5


TUNING = AttentionTuning()


@dataclass(frozen=True, slots=True)
class PromptTuning:
    """How the kernel for prompts divides the work.

    Attributes
    ----------
    queries
        Of one program.
    block
        Keys read at once; divides a page.
    warps, stages
        As Triton's num_warps and num_stages.
    """

    queries: int = 64
    block: int = 32
    warps: int = 4
    stages: int = 3


PROMPT_TUNING = PromptTuning()


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of new tokens packed one after the other, and where their keys are.

    Attributes
    ----------
    block_rows, block_firsts
        int32 [blocks of queries]: the row of each, and its first query among all tokens.
    ends, shifts
        int32 [rows]: where a row's queries end among all tokens, and what is to be added to a
        token's place there for its position in the row.
    block_table
        int32 [rows, pages].
    """

    block_rows: torch.Tensor
    block_firsts: torch.Tensor
    ends: torch.Tensor
    shifts: torch.Tensor
    block_table: torch.Tensor


def paged_attention(
    packed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    num_keys: torch.Tensor,
    scale: float,
    splits: int = 1,
    min_split_tokens: int = 2 * TUNING.block,
    tuning: AttentionTuning = TUNING,
) -> torch.Tensor:
    """Attend with one query a row over the row's pages; returns [rows, query heads, head size].

    Parameters
    ----------
    packed
        [rows, query heads + 2 * key heads, head size], of which the queries are read.
    num_keys
        int32 [rows]; a row with 0 gives zeros.
    splits
        A power of two: programs among which a row's keys are divided, each of which takes at
        least `min_split_tokens`.
    """
    rows, heads, size = packed.shape
    kv_heads = keys.shape[1]
    q_heads = heads - 2 * kv_heads
    out = torch.empty((rows, q_heads, size), dtype=packed.dtype, device=packed.device)
    target = sums = out
    if splits > 1:
        shape = (rows, q_heads, splits)
        target = torch.empty((*shape, size), dtype=torch.float32, device=packed.device)
        sums = torch.empty(shape, dtype=torch.float32, device=packed.device)
    padded = triton.next_power_of_2(size)
    _attention_kernel[(kv_heads, rows, splits)](
        packed,
        keys,
        values,
        target,
        sums,
        block_table,
        num_keys,
        scale * LOG2_E,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        M=max(MIN_DOT, triton.next_power_of_2(q_heads // kv_heads)),
        D=size,
        D_PADDED=padded,
        WIDTH=block_table.shape[1],
        PAGE_TOKENS=PAGE_TOKENS,
        BLOCK=tuning.block,
        SPLITS=splits,
        MIN_TOKENS=min_split_tokens,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    if splits > 1:
        _merge_kernel[(rows * q_heads,)](
            target, sums, out, D=size, D_PADDED=padded, SPLITS=splits, num_warps=4
        )
    return out


def prompt_attention(
    packed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: PackedRows,
    scale: float,
    tuning: PromptTuning = PROMPT_TUNING,
) -> torch.Tensor:
    """Attend causally from many new tokens of each row over the row's pages.

    Parameters
    ----------
    packed
        [tokens, query heads + 2 * key heads, head size], of which the queries are read; the keys
        and values of the new tokens stand in the pages already.
    rows
        Divided into blocks of `tuning.queries`.

    Returns
    -------
    torch.Tensor
        [tokens, query heads, head size].
    """
    tokens, heads, size = packed.shape
    kv_heads = keys.shape[1]
    q_heads = heads - 2 * kv_heads
    out = torch.empty((tokens, q_heads, size), dtype=packed.dtype, device=packed.device)
    _prompt_attention_kernel[(q_heads, len(rows.block_rows))](
        packed,
        keys,
        values,
        out,
        rows.block_table,
        rows.block_table.shape[1],
        rows.block_rows,
        rows.block_firsts,
        rows.ends,
        rows.shifts,
        scale * LOG2_E,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        D=size,
        D_PADDED=triton.next_power_of_2(size),
        PAGE_TOKENS=PAGE_TOKENS,
        QUERIES=tuning.queries,
        BLOCK=tuning.block,
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    return out


@triton.jit
def _attention_kernel(  # type: ignore[no-untyped-def]
    packed_ptr,  # [rows, Q_HEADS + 2 * KV_HEADS, D]: queries, turned, and what is not read here
    k_ptr,  # [slots, KV_HEADS, D]
    v_ptr,
    out_ptr,  # SPLITS = 1: [rows, Q_HEADS, D]; else float32 [rows, Q_HEADS, SPLITS, D]
    sums_ptr,  # float32 [rows, Q_HEADS, SPLITS], log2 of the sum of exponentials; SPLITS > 1
    table_ptr,  # int32 [rows, WIDTH]
    keys_ptr,  # int32 [rows], keys of each row; 0 for padding
    scale,  # of the scores, times log2(e)
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,  # a split takes at least so many keys
):
    kv_head = tl.program_id(0)  # heads of a row lie side by side: read them at about one time
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    num_keys = tl.load(keys_ptr + row)
    m = tl.arange(0, M)
    d = tl.arange(0, D_PADDED)
    t = tl.arange(0, BLOCK)
    head = kv_head * GROUP + m
    is_query = (m < GROUP)[:, None] & (d < D)[None, :]
    q_at = row * (Q_HEADS + 2 * KV_HEADS) * D + head[:, None] * D + d[None, :]
    q = tl.load(packed_ptr + q_at, mask=is_query, other=0.0)
    best = tl.full((M,), -1.0e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D_PADDED), tl.float32)
    start = 0
    end = num_keys
    if SPLITS > 1:
        share = (num_keys + SPLITS - 1) // SPLITS
        share = tl.maximum((share + BLOCK - 1) // BLOCK * BLOCK, MIN_TOKENS)
        start = split * share
        end = tl.minimum(start + share, num_keys)
    for s in range(start, end, BLOCK):
        page = tl.load(table_ptr + row * WIDTH + s // PAGE_TOKENS).to(tl.int64)
        first = (page * PAGE_TOKENS + s % PAGE_TOKENS) * (KV_HEADS * D) + kv_head * D
        offsets = first + t[:, None] * (KV_HEADS * D) + d[None, :]
        is_token = (s + t) < end
        mask = is_token[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(is_token[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    safe = tl.where(total > 0, total, 1.0)
    out = acc / safe[:, None]
    if SPLITS == 1:
        out_at = row * Q_HEADS * D + head[:, None] * D + d[None, :]
        tl.store(out_ptr + out_at, out.to(tl.float16), mask=is_query)
    else:
        piece = (row * Q_HEADS + head) * SPLITS + split
        tl.store(out_ptr + piece[:, None] * D + d[None, :], out, mask=is_query & (start < end))
        sums = tl.where(total > 0, best + tl.log2(safe), -float("inf"))
        tl.store(sums_ptr + piece, sums, mask=m < GROUP)


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # float32 [rows, heads, SPLITS, D]
    sums_ptr,  # float32 [rows, heads, SPLITS]
    out_ptr,  # [rows, heads, D]
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)  # of all rows
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D_PADDED)
    sums = tl.load(sums_ptr + head * SPLITS + s)
    best = tl.maximum(tl.max(sums, 0), -1.0e30)
    weights = tl.exp2(sums - best)
    is_part = (sums > -1.0e30)[:, None] & (d < D)[None, :]  # the others were never written
    at = (head * SPLITS + s)[:, None] * D + d[None, :]
    parts = tl.load(parts_ptr + at, mask=is_part, other=0.0)
    total = tl.sum(weights, 0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + head * D + d, out.to(tl.float16), mask=d < D)


@triton.jit
def _attend_to(  # type: ignore[no-untyped-def]
    q,  # [BM, D_PADDED]
    positions,  # [BM]
    best,
    total,
    acc,
    k_ptr,
    v_ptr,
    table,  # of the row
    kv_head,
    start,
    end,
    scale,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Go on with the softmax of queries over the keys from `start` to `end`."""
    d = tl.arange(0, D_PADDED)
    t = tl.arange(0, BLOCK)
    for s in range(start, end, BLOCK):
        page = tl.load(table + s // PAGE_TOKENS).to(tl.int64)
        first = (page * PAGE_TOKENS + s % PAGE_TOKENS) * (KV_HEADS * D) + kv_head * D
        offsets = first + t[:, None] * (KV_HEADS * D) + d[None, :]
        mask = (d < D)[None, :]
        if MASKED:
            mask = mask & (s + t < end)[:, None]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        if MASKED:
            scores = tl.where((s + t)[None, :] <= positions[:, None], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    return best, total, acc


@triton.jit
def _prompt_attention_kernel(  # type: ignore[no-untyped-def]
    packed_ptr,  # [tokens, Q_HEADS + 2 * KV_HEADS, D]: queries, turned, and what is not read here
    k_ptr,  # [slots, KV_HEADS, D]
    v_ptr,
    out_ptr,  # [tokens, Q_HEADS, D]
    table_ptr,  # int32 [rows, width]
    width,
    block_rows_ptr,  # int32 [blocks of queries], the row of each
    block_firsts_ptr,  # int32 [blocks], its first query among all tokens
    ends_ptr,  # int32 [rows], where its queries end
    shifts_ptr,  # int32 [rows], from a query's place among all tokens to its position in the row
    scale,  # of the scores, times log2(e)
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.load(block_rows_ptr + tl.program_id(1))
    first = tl.load(block_firsts_ptr + tl.program_id(1))
    row_end = tl.load(ends_ptr + row)
    shift = tl.load(shifts_ptr + row)
    kv_head = head // (Q_HEADS // KV_HEADS)
    table = table_ptr + row.to(tl.int64) * width
    i = first + tl.arange(0, QUERIES)
    positions = i + shift
    d = tl.arange(0, D_PADDED)
    is_query = (i < row_end)[:, None] & (d < D)[None, :]
    token = i.to(tl.int64)[:, None]
    q_at = packed_ptr + token * ((Q_HEADS + 2 * KV_HEADS) * D) + head * D + d[None, :]
    q = tl.load(q_at, mask=is_query, other=0.0)
    best = tl.full((QUERIES,), -1.0e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, D_PADDED), tl.float32)
    seen_by_all = (first + shift + 1) // BLOCK * BLOCK
    end = tl.minimum(first + QUERIES, row_end) + shift
    best, total, acc = _attend_to(
        q, positions, best, total, acc, k_ptr, v_ptr, table, kv_head, 0, seen_by_all, scale,
        KV_HEADS, D, D_PADDED, PAGE_TOKENS, BLOCK, False,
    )  # fmt: skip
    best, total, acc = _attend_to(
        q, positions, best, total, acc, k_ptr, v_ptr, table, kv_head, seen_by_all, end, scale,
        KV_HEADS, D, D_PADDED, PAGE_TOKENS, BLOCK, True,
    )  # fmt: skip
    out = (acc / total[:, None]).to(tl.float16)
    tl.store(out_ptr + token * (Q_HEADS * D) + head * D + d[None, :], out, mask=is_query)
