"""Triton kernels of the dense forward pass: all of it but matrix products and attention.

Every kernel rounds to float16 where transformers' float16 Llama does: products and sums are made
in float32 and cast one by one, so that none of them fuse. None of the launches depends on data,
and each can be captured in a CUDA graph. A slot is a token's place in the cache, counted over all
pages; a negative one belongs to a padding row and is not written.
"""

import torch
import triton
import triton.language as tl

from bulk_pipeline.spec import PAGE_TOKENS

SILU_BLOCK = 1024
TABLE_BLOCK = 64
MAX_HALF = tl.constexpr(65504.0)


@triton.jit
def _half(x):  # type: ignore[no-untyped-def]
    """Round to float16, and go on in float32."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    residual_ptr,  # [rows, SIZE]; with ADD, `x` is added to it in place
    x_ptr,
    weight_ptr,
    out_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    hidden = tl.load(residual_ptr + row + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(x_ptr + row + i, mask=inside, other=0.0).to(tl.float32)
        hidden = _half(hidden + added)
        # as exllamav2 does: infinities would end as NaN; a NaN stays one
        hidden = tl.where(hidden > MAX_HALF, MAX_HALF, hidden)
        hidden = tl.where(hidden < -MAX_HALF, -MAX_HALF, hidden)
        tl.store(residual_ptr + row + i, hidden.to(tl.float16), mask=inside)
    mean = tl.sum(hidden * hidden, 0) / SIZE
    normed = _half(hidden * tl.rsqrt(mean + eps))
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + i, (normed * weight).to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _stage_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    lengths_ptr,
    table_ptr,
    rows,
    ids_out_ptr,
    positions_ptr,
    slots_ptr,
    keys_ptr,
    table_out_ptr,
    WIDTH: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    given = row < rows
    length = tl.load(lengths_ptr + row, mask=given, other=-1)
    token = tl.load(ids_ptr + row, mask=given, other=0)
    live = length >= 0
    position = tl.maximum(length, 0)
    page = tl.load(table_ptr + row * WIDTH + position // PAGE_TOKENS, mask=live, other=0)
    slot = tl.where(live, page * PAGE_TOKENS + position % PAGE_TOKENS, -1)
    tl.store(ids_out_ptr + row, token)
    tl.store(positions_ptr + row, position)
    tl.store(slots_ptr + row, slot)
    tl.store(keys_ptr + row, length + 1)
    for start in range(0, WIDTH, BLOCK):
        i = start + tl.arange(0, BLOCK)
        pages = tl.load(table_ptr + row * WIDTH + i, mask=(i < WIDTH) & live, other=0)
        tl.store(table_out_ptr + row * WIDTH + i, pages, mask=i < WIDTH)


@triton.jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    packed_ptr,  # [tokens, Q_HEADS + 2 * KV_HEADS, D]: queries, keys, values
    cos_ptr,  # [positions, D / 2]
    sin_ptr,
    positions_ptr,
    slots_ptr,
    k_ptr,  # [slots, KV_HEADS, D]
    v_ptr,
    norm_ptr,  # [2, D], weights for queries and keys; with NORM
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # a power of two, at least the queries of a group and their key
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    packed = packed_ptr + token * (Q_HEADS + 2 * KV_HEADS) * D
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    j = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D_PADDED // 2)[None, :]
    is_dim = d < HALF
    is_key = (j == GROUP) & is_dim
    inside = (j <= GROUP) & is_dim
    head = tl.where(j < GROUP, kv_head * GROUP + j, Q_HEADS + kv_head)
    at = packed + head * D + d
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D
        scale = tl.rsqrt(mean + eps)[:, None]
        weight = norm_ptr + tl.where(j == GROUP, D, 0) + d
        low = _half(_half(low * scale) * tl.load(weight, mask=inside, other=0.0).to(tl.float32))
        high = _half(
            _half(high * scale) * tl.load(weight + HALF, mask=inside, other=0.0).to(tl.float32)
        )
    cos = tl.load(cos_ptr + position * HALF + d, mask=is_dim, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + d, mask=is_dim, other=0.0).to(tl.float32)
    turned_low = (_half(low * cos) - _half(high * sin)).to(tl.float16)
    turned_high = (_half(high * cos) + _half(low * sin)).to(tl.float16)
    is_query = (j < GROUP) & is_dim
    tl.store(at, turned_low, mask=is_query)
    tl.store(at + HALF, turned_high, mask=is_query)
    target = (slot * KV_HEADS + kv_head) * D
    written = is_key & (slot >= 0)
    key = k_ptr + target + d + j * 0
    tl.store(key, turned_low, mask=written)
    tl.store(key + HALF, turned_high, mask=written)
    whole = tl.arange(0, D_PADDED)
    value = tl.load(packed + (Q_HEADS + KV_HEADS + kv_head) * D + whole, mask=whole < D, other=0.0)
    tl.store(v_ptr + target + whole, value, mask=(whole < D) & (slot >= 0))


@triton.jit
def _silu_kernel(x_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * 2 * SIZE
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    gate = tl.load(x_ptr + row + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row + SIZE + i, mask=inside, other=0.0).to(tl.float32)
    silu = _half(gate / (1.0 + tl.exp(-gate)))
    tl.store(x_ptr + row + i, (silu * up).to(tl.float16), mask=inside)


def rms_norm(
    residual: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the norm of `residual` [rows, size], after adding `added` to it in place."""
    rows, size = residual.shape
    out = torch.empty_like(residual) if out is None else out
    _norm_kernel[(rows,)](
        residual,
        residual if added is None else added,
        weight,
        out,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ADD=added is not None,
        num_warps=8 if size > 2048 else 4,
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up as a view of `gate_up` [rows, 2 * size], whose first half it is."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    grid = (rows, triton.cdiv(size, SILU_BLOCK))
    _silu_kernel[grid](gate_up, SIZE=size, BLOCK=SILU_BLOCK, num_warps=4)
    return gate_up[:, :size]


def stage_rows(
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    ids_out: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_keys: torch.Tensor,
    table_out: torch.Tensor,
) -> None:
    """Copy the rows of a step into fixed buffers, padded, and find where each new token goes.

    Parameters
    ----------
    lengths
        int32, tokens in the pages before the new one; negative for a padding row.
    ids_out, positions, slots, num_keys, table_out
        The buffers; the first dimension of `ids_out` is the rows to fill.
    """
    _stage_kernel[(ids_out.shape[0],)](
        token_ids,
        lengths,
        block_table,
        token_ids.shape[0],
        ids_out,
        positions,
        slots,
        num_keys,
        table_out,
        WIDTH=table_out.shape[1],
        PAGE_TOKENS=PAGE_TOKENS,
        BLOCK=TABLE_BLOCK,
        num_warps=1,
    )


def rope_and_store(
    packed: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    head_norms: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Turn queries and keys by their positions, and write keys and values into the pages.

    Parameters
    ----------
    packed
        [tokens, query heads + 2 * key heads, head size]; the queries are turned in place.
    rope
        Cosines and sines, [positions, head size / 2].
    keys, values
        One layer's cache, [slots, key heads, head size].
    head_norms
        [2, head size], weights of the RMSNorm of each query head and each key head before.
    """
    tokens, heads, size = packed.shape
    kv_heads = keys.shape[1]
    q_heads = heads - 2 * kv_heads
    _rope_kernel[(tokens, kv_heads)](
        packed,
        *rope,
        positions,
        slots,
        keys,
        values,
        packed if head_norms is None else head_norms,
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEADS=triton.next_power_of_2(q_heads // kv_heads + 1),
        D=size,
        D_PADDED=triton.next_power_of_2(size),
        NORM=head_norms is not None,
        num_warps=1 if size * (q_heads // kv_heads + 1) <= 1024 else 4,
        enable_fp_fusion=False,  # else a product is added without being rounded
    )
