"""Paged attention for GPUs without flash-attn: the two functions of it that exllamav2 calls.

Decoding, and blocks of a few new tokens, run in a Triton kernel that reads the pages where they
are; longer blocks (prompts) are gathered and given to PyTorch's own Flash Attention. Each row
attends over its own pages only. Keys, values and queries are float16.
"""

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

MAX_KERNEL_ROWS = 64  # queries (new tokens x heads of a group) that one program holds
BLOCK_TOKENS = 64  # keys read at once
PROGRAMS_WANTED = 264  # two a multiprocessor of the largest GPUs, before a row is split
MIN_SPLIT_TOKENS = 512  # a shorter piece of a row is not worth a program of its own
MIN_DOT = 16  # the smallest side of a tensor-core product


@triton.jit
def _paged_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [rows, new, heads, D]
    k_ptr,  # [pages, PAGE, kv_heads, D]
    v_ptr,
    out_ptr,  # splits = 1: [rows, new, heads, D]; else float32 [rows, kv_heads, splits, M, D]
    lse_ptr,  # float32 [rows, kv_heads, splits, M], log of the sum of exponentials; splits > 1
    pages_ptr,  # int32 [rows, pages of a row]
    lengths_ptr,  # int32 [rows], keys of each row, the new ones included
    scale,
    num_new,
    window,  # keys that a query sees before its own; negative: all
    split_tokens,
    pages_stride,
    page_stride,
    token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    m = tl.arange(0, M)
    d = tl.arange(0, D_PADDED)
    t = tl.arange(0, BLOCK)
    query = m // GROUP  # which of the new tokens
    head = kv_head * GROUP + m % GROUP
    is_query = query < num_new
    is_dim = d < D
    q_offsets = ((row * num_new + query) * HEADS + head) * D
    q = tl.load(
        q_ptr + q_offsets[:, None] + d[None, :],
        mask=is_query[:, None] & is_dim[None, :],
        other=0.0,
    )
    position = length - num_new + query  # of each query in its row
    best = tl.full((M,), -1.0e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D_PADDED), tl.float32)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, length)
    if window >= 0:
        first_seen = tl.maximum(length - num_new - window, 0)
        start = tl.maximum(start, first_seen // BLOCK * BLOCK)
    for s in range(start, end, BLOCK):
        page = tl.load(pages_ptr + row * pages_stride + s // PAGE).to(tl.int64)
        tokens = (s % PAGE) + t
        offsets = page * page_stride + tokens[:, None] * token_stride + kv_head * D + d[None, :]
        is_key = (s + t) < end
        mask = is_key[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = is_key[None, :] & ((s + t)[None, :] <= position[:, None])
        if window >= 0:
            seen = seen & ((s + t)[None, :] >= position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    if SPLITS == 1:
        out = acc / total[:, None]
        tl.store(
            out_ptr + q_offsets[:, None] + d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=is_query[:, None] & is_dim[None, :],
        )
    else:
        piece = (row * KV_HEADS + kv_head) * SPLITS + split
        safe = tl.where(total > 0, total, 1.0)
        tl.store(
            out_ptr + (piece * M + m[:, None]) * D + d[None, :],
            acc / safe[:, None],
            mask=is_dim[None, :],
        )
        lse = tl.where(total > 0, best + tl.log(safe), -float("inf"))
        tl.store(lse_ptr + piece * M + m, lse)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one step needs in every layer: worked out in the first, kept for the others.

    The tensors it was made from are kept to recognise the step.
    """

    lengths_before: torch.Tensor
    block_table: torch.Tensor
    num_new: int
    has_new: bool
    slots: torch.Tensor | None  # [rows * new], where new keys go; None where they are there
    lengths: torch.Tensor  # int32 [rows], the new keys included
    max_length: int  # an upper bound of `lengths`
    read: torch.Tensor | None  # slots of all keys of all rows, for longer blocks
    ends: torch.Tensor | None  # int32 [rows + 1], where each row's keys end in `read`

    def is_of(self, lengths: torch.Tensor, pages: torch.Tensor, num_new: int, new: bool) -> bool:
        return (
            self.lengths_before is lengths
            and self.block_table is pages
            and self.num_new == num_new
            and self.has_new == new
        )


_plans: dict[torch.device, _Plan] = {}


def _plan(
    lengths: torch.Tensor, pages: torch.Tensor, num_new: int, new: bool, page: int, gather: bool
) -> _Plan:
    plan = _plans.get(lengths.device)
    if plan is not None and plan.is_of(lengths, pages, num_new, new):
        return plan
    slots = None
    if new:
        position = lengths[:, None].long() + torch.arange(num_new, device=lengths.device)
        slots = _slots(pages, position, page).flatten()
    after = (lengths + num_new if new else lengths).int()
    read = ends = None
    max_length = pages.shape[1] * page
    if gather:
        max_length = int(after.max())
        places = torch.arange(max_length, device=lengths.device).expand(len(lengths), -1)
        inside = places < after[:, None]
        read = _slots(pages, torch.where(inside, places, 0), page)[inside]
        ends = torch.nn.functional.pad(after.cumsum(0), (1, 0)).int()
    plan = _Plan(lengths, pages, num_new, new, slots, after, max_length, read, ends)
    _plans[lengths.device] = plan
    return plan


def _slots(pages: torch.Tensor, position: torch.Tensor, page: int) -> torch.Tensor:
    return pages.long().gather(1, position // page) * page + position % page


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attend over pages, as the function of the same name in flash-attn does.

    Parameters
    ----------
    q
        [rows, new tokens, heads, head size].
    k_cache, v_cache
        [pages, page size, key heads, head size]; new keys and values are written into them.
    k, v
        [rows, new tokens, key heads, head size], or None where they stand in the pages already.
    cache_seqlens
        int32 [rows], keys in the pages; with `k`, before the new ones.
    block_table
        int32 [rows, pages of a row].
    window_size
        Keys before (and behind) its own that a query sees; -1 for all.

    Returns
    -------
    The shape of `q`.
    """
    assert causal, "only causal attention is implemented"
    assert not softcap, "soft-capped attention is not implemented"
    num_new, heads, size = q.shape[1:]
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    gather = num_new * group > MAX_KERNEL_ROWS
    plan = _plan(cache_seqlens, block_table, num_new, k is not None, page, gather)
    if k is not None and v is not None:
        assert plan.slots is not None
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache.view(-1, kv_heads, size).index_copy_(
                0, plan.slots, new.reshape(-1, kv_heads, size)
            )
    if gather:
        return _attend_gathered(q, k_cache, v_cache, plan, softmax_scale, window_size[0])
    return _attend_in_place(q.contiguous(), k_cache, v_cache, plan, softmax_scale, window_size[0])


def _attend_in_place(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: _Plan,
    scale: float,
    window: int,
) -> torch.Tensor:
    rows, num_new, heads, size = q.shape
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    queries = max(MIN_DOT, triton.next_power_of_2(num_new * group))
    splits = 1
    if rows * kv_heads < PROGRAMS_WANTED and plan.max_length > MIN_SPLIT_TOKENS:
        wanted = PROGRAMS_WANTED // (rows * kv_heads)
        splits = triton.next_power_of_2(min(wanted, plan.max_length // MIN_SPLIT_TOKENS))
    split_tokens = triton.cdiv(triton.cdiv(plan.max_length, splits), BLOCK_TOKENS) * BLOCK_TOKENS
    out = torch.empty_like(q)
    target, lse = out, out
    if splits > 1:
        shape = (rows, kv_heads, splits, queries)
        target = torch.empty((*shape, size), device=q.device, dtype=torch.float32)
        lse = torch.empty(shape, device=q.device, dtype=torch.float32)
    with torch.cuda.device(q.device):
        _paged_kernel[(rows, kv_heads, splits)](
            q,
            k_cache,
            v_cache,
            target,
            lse,
            plan.block_table,
            plan.lengths,
            scale,
            num_new,
            window,
            split_tokens,
            plan.block_table.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            HEADS=heads,
            KV_HEADS=kv_heads,
            GROUP=group,
            M=queries,
            D=size,
            D_PADDED=triton.next_power_of_2(size),
            PAGE=page,
            BLOCK=BLOCK_TOKENS,
            SPLITS=splits,
            num_warps=4,
            num_stages=3,
        )
    if splits > 1:
        merged = (target * lse.softmax(dim=2)[..., None]).sum(dim=2)[:, :, : num_new * group]
        merged = merged.view(rows, kv_heads, num_new, group, size).transpose(1, 2)
        out.copy_(merged.reshape(rows, num_new, heads, size))
    return out


def _attend_gathered(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: _Plan,
    scale: float,
    window: int,
) -> torch.Tensor:
    rows, num_new, heads, size = q.shape
    kv_heads = k_cache.shape[2]
    assert plan.read is not None
    keys, values = (c.view(-1, kv_heads, size)[plan.read] for c in (k_cache, v_cache))
    starts = torch.arange(rows + 1, device=q.device, dtype=torch.int32) * num_new
    out = torch.ops.aten._flash_attention_forward(
        q.reshape(-1, heads, size),
        keys,
        values,
        starts,
        plan.ends,
        num_new,
        plan.max_length,
        0.0,
        True,
        False,
        scale=scale,
        **_window(window),
    )[0]
    return out.view(rows, num_new, heads, size)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attend without pages, [rows, tokens, heads, head size], as flash-attn's function does."""
    assert not softcap, "soft-capped attention is not implemented"
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False,
        scale=softmax_scale, **_window(window_size[0]),
    )[0]  # fmt: skip


def _window(window: int) -> dict[str, Any]:
    return {"window_size_left": window, "window_size_right": 0} if window >= 0 else {}


def _fwd_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    rotary_cos: None,
    rotary_sin: None,
    cache_batch_idx: None,
    cache_leftpad: None,
    block_table: torch.Tensor,
    alibi_slopes: None,
    out: torch.Tensor,
    softmax_scale: float,
    *rest: Any,  # causal, window on both sides, softcap, interleaved rotary, splits: as by default
) -> None:
    """What exllamav2's compiled tensor-parallel attention calls, with its positional arguments."""
    found = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v,
        cache_seqlens=cache_seqlens, block_table=block_table, softmax_scale=softmax_scale,
    )  # fmt: skip
    out.copy_(found)


def install() -> None:
    """Give exllamav2 this attention in place of flash-attn's."""
    from exllamav2 import attn

    compiled = ModuleType("flash_attn_2_cuda", "Stand-in for flash-attn's compiled module.")
    compiled.fwd_kvcache = _fwd_kvcache  # type: ignore[attr-defined]
    sys.modules[compiled.__name__] = compiled
    attn.flash_attn_with_kvcache = flash_attn_with_kvcache
    attn.flash_attn_func = flash_attn_func
    attn.has_flash_attn = attn.has_flash_attn_with_paged = True
    attn.has_flash_attn_with_window = True
