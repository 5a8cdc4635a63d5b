"""Sampling on a GPU: what `sampling.sample` draws, a row of logits to a program, in Triton.

Exact, not among the best N: what top_k and top_p keep is found by narrowing a threshold over the
logits' own bits, ordered as integers, so that equal logits stay together whatever the temperature.
What is rounded: probability mass is summed in float32 (relative error about 1e-6), so a token whose
cumulated probability is that close to top_p may fall on its other side. The draw compares scores in
float32 first, and those within `MARGIN` of the best in float64, as `sampling.draw` does; there two
scores may differ from the CPU's in the last digit.

Import this module only where there is a GPU (or under TRITON_INTERPRET=1).
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from bulk_pipeline.engine import sampling, sampling_slots

BLOCK = 2048  # logits that a program reads at once
NUM_WARPS = 8
STAGES = 3  # blocks on their way at once
MARGIN = 1e-3  # well above the error of a score in float32

SEED = tl.constexpr(sampling_slots.SEED)
TOP_K = tl.constexpr(sampling_slots.TOP_K)
TEMPERATURE = tl.constexpr(sampling_slots.TEMPERATURE)
TOP_P = tl.constexpr(sampling_slots.TOP_P)
LOG_MIN_P = tl.constexpr(sampling_slots.LOG_MIN_P)
MAX_ENTRY = tl.constexpr(2 * sampling_slots.MAX_COUNT)
GAMMA = tl.constexpr(sampling.GAMMA)
MIX_1 = tl.constexpr(sampling.MIX_1)
MIX_2 = tl.constexpr(sampling.MIX_2)


def draw_into(
    ids: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    integers: torch.Tensor,
    floats: torch.Tensor,
    counts: torch.Tensor,
    is_copy: bool,
) -> None:
    """Draw a token id for each of some rows, and count it where `counts` has rows.

    Parameters
    ----------
    ids
        int64 [all rows]: what is drawn is written there.
    logits
        float16 or float32 [all rows, vocabulary], or [rows, vocabulary] where `is_copy`.
    rows, slots, positions
        int64: the rows to draw for; of all rows the slots, and how many tokens they generated.
    integers, floats
        The settings of all slots, as in `SettingsTable`.
    counts
        int16 [slots, vocabulary], as in `TokenCounts`; empty: nothing is counted.
    """
    _sample_kernel[(len(rows),)](
        logits,
        logits.stride(0),
        rows,
        slots,
        positions,
        integers,
        floats,
        integers.shape[1],
        counts,
        ids,
        MARGIN,
        logits.shape[1],
        IS_HALF=logits.dtype == torch.float16,
        IS_COPY=is_copy,
        HAS_COUNTS=len(counts) > 0,
        BLOCK=BLOCK,
        STAGES=STAGES,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _sample_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    slots_ptr,
    positions_ptr,
    integers_ptr,
    floats_ptr,
    num_slots,
    counts_ptr,
    ids_ptr,
    margin,
    VOCAB_SIZE: tl.constexpr,
    IS_HALF: tl.constexpr,
    IS_COPY: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Draw one row's token."""
    row = tl.load(rows_ptr + tl.program_id(0))
    slot = tl.load(slots_ptr + row)
    place = tl.program_id(0).to(tl.int64) if IS_COPY else row
    logits_row = logits_ptr + place * logits_stride
    temperature = tl.load(floats_ptr + TEMPERATURE * num_slots + slot)

    best_key, chosen = _argmax(logits_row, VOCAB_SIZE, IS_HALF, BLOCK, STAGES)
    top = _value(best_key, IS_HALF)
    if (temperature > 0) & (tl.abs(top) < float("inf")):
        top_k = tl.load(integers_ptr + TOP_K * num_slots + slot)
        top_p = tl.load(floats_ptr + TOP_P * num_slots + slot)
        log_min_p = tl.load(floats_ptr + LOG_MIN_P * num_slots + slot)
        scale = (1.4426950408889634 / temperature).to(tl.float32)  # exp by way of exp2
        cutoff = _lowest_key(IS_HALF)
        end = best_key.to(tl.int64) + 1
        if top_k < VOCAB_SIZE:
            cutoff = _narrow(
                logits_row, VOCAB_SIZE, cutoff, end, top_k.to(tl.float32), top, scale,
                False, IS_HALF, BLOCK, STAGES,
            )  # fmt: skip
        if top_p < 1:
            floor = cutoff.to(tl.int32)
            total = _mass(logits_row, VOCAB_SIZE, floor, top, scale, IS_HALF, BLOCK, STAGES)
            # all tokens below this one together have less than 1 - top_p of the best's weight
            depth = temperature * (tl.log(VOCAB_SIZE / (1 - top_p)) + 0.01)
            low = _key_below((top - depth).to(tl.float32), IS_HALF)
            cutoff = _narrow(
                logits_row, VOCAB_SIZE, tl.maximum(cutoff, low), end,
                (top_p * total).to(tl.float32), top, scale, True, IS_HALF, BLOCK, STAGES,
            )  # fmt: skip
        if log_min_p > -float("inf"):
            cutoff = tl.maximum(cutoff, _min_p_key(best_key, temperature, log_min_p, IS_HALF))
        seed = tl.load(integers_ptr + SEED * num_slots + slot).to(tl.uint64, bitcast=True)
        position = tl.load(positions_ptr + row).to(tl.uint64)
        state = _mix(_mix(seed) + (position + 1) * GAMMA)
        chosen = _draw(
            logits_row, VOCAB_SIZE, cutoff.to(tl.int32), top, temperature, state, margin,
            IS_HALF, BLOCK, STAGES,
        )  # fmt: skip
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    if HAS_COUNTS:
        count_ptr = counts_ptr + slot * VOCAB_SIZE + chosen
        count = tl.load(count_ptr)
        tl.store(count_ptr, tl.where(count < MAX_ENTRY, count + 2, count).to(tl.int16))


@triton.jit
def _argmax(
    logits_row,
    VOCAB_SIZE: tl.constexpr,
    IS_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the largest logit's key, and the first id that has it."""
    best = tl.full([BLOCK], -(2**31), tl.int32)
    best_ids = tl.full([BLOCK], 0, tl.int32)
    for start in tl.range(0, VOCAB_SIZE, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        keys = _load_keys(logits_row, ids, VOCAB_SIZE, IS_HALF)
        is_better = keys > best
        best = tl.where(is_better, keys, best)
        best_ids = tl.where(is_better, ids, best_ids)
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, best_ids, 2**31 - 1), axis=0)


@triton.jit
def _narrow(
    logits_row,
    VOCAB_SIZE: tl.constexpr,
    low,
    end,
    needed,
    top,
    scale,
    IS_MASS: tl.constexpr,
    IS_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return a key that parts the row's tokens as the largest with enough at or above it does.

    Enough is `needed` tokens, or `needed` weight of tokens. It must be so at `low`, and not at
    `end`; the space between is quartered in every pass over the row, until one key or (with
    float32's many keys) one token is left in it.
    """
    num_low = tl.full([], VOCAB_SIZE, tl.int32)  # tokens at or above `low`, or more
    num_end = tl.full([], 0, tl.int32)
    while (end - low > 1) & (num_low - num_end > 1):
        step = (end - low + 3) // 4
        first = tl.minimum(low + step, end).to(tl.int32)
        second = tl.minimum(low + 2 * step, end).to(tl.int32)
        third = tl.minimum(low + 3 * step, end).to(tl.int32)
        above_first = tl.zeros([BLOCK], tl.float32)
        above_second = tl.zeros([BLOCK], tl.float32)
        above_third = tl.zeros([BLOCK], tl.float32)
        num_first = tl.zeros([BLOCK], tl.int32)
        num_second = tl.zeros([BLOCK], tl.int32)
        num_third = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, VOCAB_SIZE, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            keys = _load_keys(logits_row, ids, VOCAB_SIZE, IS_HALF)
            if IS_MASS:
                amounts = tl.exp2((_value(keys, IS_HALF) - top) * scale)
            else:
                amounts = tl.full([BLOCK], 1.0, tl.float32)
            above_first += tl.where(keys >= first, amounts, 0.0)
            above_second += tl.where(keys >= second, amounts, 0.0)
            above_third += tl.where(keys >= third, amounts, 0.0)
            if not IS_HALF:
                num_first += (keys >= first).to(tl.int32)
                num_second += (keys >= second).to(tl.int32)
                num_third += (keys >= third).to(tl.int32)
        num_enough = (tl.sum(above_first, axis=0) >= needed).to(tl.int64)
        num_enough += (tl.sum(above_second, axis=0) >= needed).to(tl.int64)
        num_enough += (tl.sum(above_third, axis=0) >= needed).to(tl.int64)
        if not IS_HALF:
            at_first = tl.sum(num_first, axis=0)
            at_second = tl.sum(num_second, axis=0)
            at_third = tl.sum(num_third, axis=0)
            new_end = tl.where(num_enough == 2, at_third, num_end)
            new_end = tl.where(num_enough == 1, at_second, new_end)
            num_end = tl.where(num_enough == 0, at_first, new_end)
            new_low = tl.where(num_enough == 1, at_first, num_low)
            new_low = tl.where(num_enough == 2, at_second, new_low)
            num_low = tl.where(num_enough == 3, at_third, new_low)
        low += num_enough * step
        end = tl.minimum(end, low + step)
    return low


@triton.jit
def _mass(
    logits_row,
    VOCAB_SIZE: tl.constexpr,
    floor,
    top,
    scale,
    IS_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the weight of all tokens from the key `floor` on; the best one has 1."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, VOCAB_SIZE, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        keys = _load_keys(logits_row, ids, VOCAB_SIZE, IS_HALF)
        weights = tl.exp2((_value(keys, IS_HALF) - top) * scale)
        total += tl.where((keys >= floor) & (ids < VOCAB_SIZE), weights, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _min_p_key(best_key, temperature, log_min_p, IS_HALF: tl.constexpr):
    """Return the smallest key whose scaled logit is within `log_min_p` of the best."""
    least = _value(best_key, IS_HALF).to(tl.float64) / temperature + log_min_p
    below = _lowest_key(IS_HALF) - 1
    kept = best_key.to(tl.int64)
    while kept - below > 1:
        middle = (kept + below) >> 1
        is_kept = _value(middle.to(tl.int32), IS_HALF).to(tl.float64) / temperature >= least
        kept = tl.where(is_kept, middle, kept)
        below = tl.where(is_kept, below, middle)
    return kept


@triton.jit
def _draw(
    logits_row,
    VOCAB_SIZE: tl.constexpr,
    cutoff,
    top,
    temperature,
    state,
    margin,
    IS_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the kept token with the best score: its scaled logit plus its Gumbel number."""
    inverse = (1 / temperature).to(tl.float32)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    second = tl.full([BLOCK], -float("inf"), tl.float32)  # of the tokens of the same lane
    best_ids = tl.full([BLOCK], 0, tl.int32)
    for start in tl.range(0, VOCAB_SIZE, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        keys = _load_keys(logits_row, ids, VOCAB_SIZE, IS_HALF)
        is_kept = (keys >= cutoff) & (ids < VOCAB_SIZE)
        if tl.max(is_kept.to(tl.int32), axis=0) > 0:
            scores = (_value(keys, IS_HALF) - top) * inverse + _rough_gumbel(state, ids)
            scores = tl.where(is_kept, scores, -float("inf"))
            second = tl.maximum(second, tl.minimum(best, scores))
            is_better = scores > best
            best = tl.where(is_better, scores, best)
            best_ids = tl.where(is_better, ids, best_ids)
    least = tl.max(best, axis=0) - margin
    exact = _exact_scores(logits_row, best_ids, best >= least, temperature, state)
    top_score = tl.max(exact, axis=0)
    chosen = tl.min(tl.where(exact == top_score, best_ids, 2**31 - 1), axis=0)
    if tl.max(second, axis=0) >= least:  # very rare: two candidates in one lane
        for start in tl.range(0, VOCAB_SIZE, BLOCK, num_stages=STAGES):
            ids = start + tl.arange(0, BLOCK)
            keys = _load_keys(logits_row, ids, VOCAB_SIZE, IS_HALF)
            scores = (_value(keys, IS_HALF) - top) * inverse + _rough_gumbel(state, ids)
            is_close = (keys >= cutoff) & (ids < VOCAB_SIZE) & (scores >= least)
            if tl.max(is_close.to(tl.int32), axis=0) > 0:
                exact = _exact_scores(logits_row, ids, is_close, temperature, state)
                block_top = tl.max(exact, axis=0)
                first = tl.min(tl.where(exact == block_top, ids, 2**31 - 1), axis=0)
                is_better = (block_top > top_score) | ((block_top == top_score) & (first < chosen))
                chosen = tl.where(is_better, first, chosen)
                top_score = tl.maximum(block_top, top_score)
    return chosen


@triton.jit
def _exact_scores(logits_row, ids, is_wanted, temperature, state):
    """Return the scores of `sampling.draw` in float64; -inf where not wanted."""
    logits = tl.load(logits_row + ids, mask=is_wanted, other=0.0).to(tl.float64)
    numbers = (_bits(state, ids).to(tl.float64) + 0.5) * 2.220446049250313e-16
    scores = logits / temperature - tl.log(-tl.log(numbers))
    return tl.where(is_wanted, scores, -float("inf"))


@triton.jit
def _rough_gumbel(state, ids):
    """Return -log(-log(number)) in float32, to about 1e-5, whatever the number."""
    bits = _bits(state, ids)
    number = (bits.to(tl.float32) + 0.5) * 2.220446049250313e-16
    rest = ((4503599627370495 - bits).to(tl.float32) + 0.5) * 2.220446049250313e-16
    # near 1 the number itself has lost what counts; its distance from 1 has not
    series = rest * (1 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    return -tl.log(tl.where(rest < 0.015625, series, -tl.log(number)))


@triton.jit
def _bits(state, ids):
    """Return the 52 random bits of each token: `sampling.uniform` before it is a float."""
    return _mix(state + (ids.to(tl.uint64) + 1) * GAMMA) >> 12


@triton.jit
def _mix(bits):
    """splitmix64's finaliser."""
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def _load_keys(logits_row, ids, VOCAB_SIZE: tl.constexpr, IS_HALF: tl.constexpr):
    """Return logits as integers of the same order: -0 equals 0, nan and ids outside are lowest."""
    logits = tl.load(logits_row + ids, mask=ids < VOCAB_SIZE, other=-float("inf"))
    return _key(logits, IS_HALF)


@triton.jit
def _key(logits, IS_HALF: tl.constexpr):
    if IS_HALF:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
        size = bits & 0x7FFF
        infinity = 0x7C00
    else:
        bits = logits.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        infinity = 0x7F800000
    return tl.where(size > infinity, -infinity, tl.where(bits < 0, -size, size))


@triton.jit
def _value(keys, IS_HALF: tl.constexpr):
    """Return the logits of int32 keys, in float32."""
    sizes = tl.abs(keys)
    if IS_HALF:
        values = sizes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = sizes.to(tl.float32, bitcast=True)
    return tl.where(keys < 0, -values, values)


@triton.jit
def _lowest_key(IS_HALF: tl.constexpr):
    """Return the key of -inf."""
    lowest: tl.constexpr = -0x7C00 if IS_HALF else -0x7F800000
    return tl.full([], lowest, tl.int64)


@triton.jit
def _key_below(value, IS_HALF: tl.constexpr):
    """Return a key of at most `value`, and hardly less."""
    key = _key(value.to(tl.float16) if IS_HALF else value, IS_HALF)
    return key.to(tl.int64) - 1
