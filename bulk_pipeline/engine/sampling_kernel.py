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
import numpy as np
import torch
import triton
import triton.language as tl

from bulk_pipeline.engine import sampling, sampling_slots
from bulk_pipeline.engine.sampling_slots import SettingsTable, SharedLists, upload

BLOCK = 2048  # logits that a program reads at once
NUM_WARPS = 8
STAGES = 3  # blocks on their way at once
EDIT_BLOCK = 2048
LIST_BLOCK = 256
COPY_BYTES = 1 << 27  # most memory for float32 copies of logits with biases and penalties
MARGIN = 1e-3  # well above the error of a score in float32

SEED = tl.constexpr(sampling_slots.SEED)
TOP_K = tl.constexpr(sampling_slots.TOP_K)
MIN_NEW = tl.constexpr(sampling_slots.MIN_NEW)
ENDS = tl.constexpr(sampling_slots.ENDS)
BIASES = tl.constexpr(sampling_slots.BIASES)
TEMPERATURE = tl.constexpr(sampling_slots.TEMPERATURE)
TOP_P = tl.constexpr(sampling_slots.TOP_P)
LOG_MIN_P = tl.constexpr(sampling_slots.LOG_MIN_P)
REPETITION = tl.constexpr(sampling_slots.REPETITION)
FREQUENCY = tl.constexpr(sampling_slots.FREQUENCY)
PRESENCE = tl.constexpr(sampling_slots.PRESENCE)
MAX_ENTRY = tl.constexpr(2 * sampling_slots.MAX_COUNT)
GAMMA = tl.constexpr(sampling.GAMMA)
MIX_1 = tl.constexpr(sampling.MIX_1)
MIX_2 = tl.constexpr(sampling.MIX_2)


class KernelSampler:
    """The device's part of `Sampler`.

    Parameters
    ----------
    table
        The settings by slot; `settings_changed` says that it was written to.
    """

    def __init__(self, table: SettingsTable, vocab_size: int, device: torch.device) -> None:
        self._table, self._vocab_size, self._device = table, vocab_size, device
        self._ends = _DeviceLists(table.ends, device)
        self._biases = _DeviceLists(table.biases, device)
        self._all_rows = torch.arange(table.integers.shape[1], dtype=torch.int64, device=device)
        self._copy_rows = max(1, COPY_BYTES // (4 * vocab_size))
        self._plain = self._edited = self._all_rows[:0]
        self._is_held = self._is_biased = False
        self._integers = torch.zeros(0, dtype=torch.int64, device=device)
        self._floats = torch.zeros(0, dtype=torch.float64, device=device)

    def settings_changed(self) -> None:
        """Copy the settings to the device."""
        self._integers = upload(self._table.integers, self._device)
        self._floats = self._integers.view(torch.float64)

    def rows_changed(self, slots: np.ndarray) -> None:
        """Take note of the slots of the rows that are sampled from now on."""
        table, num_rows = self._table, len(slots)
        if num_rows > len(self._all_rows):  # several tokens of each slot
            self._all_rows = torch.arange(num_rows, dtype=torch.int64, device=self._device)
        is_biased = table.integers[sampling_slots.BIASES, slots] != 0
        is_edited = is_biased | table.is_penalised(slots)
        self._is_held = bool(table.integers[sampling_slots.MIN_NEW, slots].any())
        self._is_biased = bool(is_biased.any())
        self._plain, self._edited = self._all_rows[:num_rows], self._all_rows[:0]
        if is_edited.all():
            self._plain, self._edited = self._edited, self._plain
        elif is_edited.any():
            order = upload(np.argsort(is_edited, kind="stable"), self._device)
            num_plain = num_rows - int(is_edited.sum())
            self._plain, self._edited = order[:num_plain], order[num_plain:]

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Draw a token id a row, and count it where `counts` (of `TokenCounts`) has rows.

        Logits of end tokens that are held back are overwritten with -inf.
        """
        if logits.dtype not in (torch.float16, torch.float32) or logits.stride(1) != 1:
            logits = logits.float().contiguous()
        ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        if self._is_held:
            self._hold_back(logits, slots, positions)
        if len(self._plain):
            self._draw(logits, self._plain, slots, positions, counts[:0], ids, is_copy=False)
        for first in range(0, len(self._edited), self._copy_rows):
            rows = self._edited[first : first + self._copy_rows]
            copy = self._edit(logits, rows, slots, counts)
            self._draw(copy, rows, slots, positions, counts, ids, is_copy=True)
        return ids

    def _hold_back(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        ids, _ = self._ends.tensors()
        _hold_back_kernel[(len(slots),)](
            logits,
            logits.stride(0),
            slots,
            positions,
            self._integers,
            self._integers.shape[1],
            ids,
            ids.shape[1],
            BLOCK=LIST_BLOCK,
        )

    def _edit(
        self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        copy = torch.empty((len(rows), self._vocab_size), device=logits.device)
        settings = (self._integers, self._floats, self._integers.shape[1])
        common = (logits, logits.stride(0), rows, slots, copy, *settings, counts)
        # not fused: multiplied and rounded, then subtracted and rounded, as on the CPU
        _edit_kernel[(len(rows), triton.cdiv(self._vocab_size, EDIT_BLOCK))](
            *common,
            self._vocab_size,
            HAS_COUNTS=len(counts) > 0,
            BLOCK=EDIT_BLOCK,
            enable_fp_fusion=False,
        )
        if self._is_biased:
            ids, numbers = self._biases.tensors()
            _bias_kernel[(len(rows),)](
                *common,
                self._vocab_size,
                ids,
                numbers,
                ids.shape[1],
                HAS_COUNTS=len(counts) > 0,
                BLOCK=LIST_BLOCK,
                enable_fp_fusion=False,
            )
        return copy

    def _draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        counts: torch.Tensor,
        ids: torch.Tensor,
        is_copy: bool,
    ) -> None:
        _sample_kernel[(len(rows),)](
            logits,
            logits.stride(0),
            rows,
            slots,
            positions,
            self._integers,
            self._floats,
            self._integers.shape[1],
            counts,
            ids,
            MARGIN,
            self._vocab_size,
            IS_HALF=logits.dtype == torch.float16,
            IS_COPY=is_copy,
            HAS_COUNTS=len(counts) > 0,
            BLOCK=BLOCK,
            STAGES=STAGES,
            num_warps=NUM_WARPS,
        )


def mask_in_place(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Overwrite the logits of tokens that must not come with -inf.

    Parameters
    ----------
    logits
        [all rows, vocabulary].
    rows
        int64 [rows]: those that have a mask.
    masks
        int32 [rows, words]: a set bit lets the token come.
    """
    vocab_size = logits.shape[1]
    _mask_kernel[(len(rows), triton.cdiv(vocab_size, EDIT_BLOCK))](
        logits,
        *logits.stride(),
        rows,
        masks,
        masks.stride(0),
        vocab_size,
        BLOCK=EDIT_BLOCK,
    )


class _DeviceLists:
    """The device's copy of `SharedLists`."""

    def __init__(self, lists: SharedLists, device: torch.device) -> None:
        self._lists, self._device, self._version = lists, device, -1

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and numbers, as they are on the host now."""
        if self._version != self._lists.version:
            self._version = self._lists.version
            self._tensors = (
                upload(self._lists.ids, self._device),
                upload(self._lists.numbers, self._device),
            )
        return self._tensors


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


@triton.jit
def _penalise(logits, entries, floats_ptr, num_slots, slot):
    repetition = tl.load(floats_ptr + REPETITION * num_slots + slot).to(tl.float32)
    frequency = tl.load(floats_ptr + FREQUENCY * num_slots + slot).to(tl.float32)
    presence = tl.load(floats_ptr + PRESENCE * num_slots + slot).to(tl.float32)
    divided = tl.div_rn(logits, tl.zeros_like(logits) + repetition)
    repeated = tl.where(logits > 0, divided, logits * repetition)
    num_output = entries >> 1
    logits = tl.where(entries != 0, repeated, logits)
    logits = logits - num_output.to(tl.float32) * frequency
    return logits - tl.where(num_output > 0, 1.0, 0.0) * presence


@triton.jit
def _edit_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    slots_ptr,
    copy_ptr,
    integers_ptr,
    floats_ptr,
    num_slots,
    counts_ptr,
    VOCAB_SIZE: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a block of a row's logits to float32, with the row's penalties."""
    row = tl.load(rows_ptr + tl.program_id(0))
    slot = tl.load(slots_ptr + row)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * logits_stride + ids, mask=ids < VOCAB_SIZE, other=0.0)
    logits = logits.to(tl.float32)
    if HAS_COUNTS:
        entries = tl.load(counts_ptr + slot * VOCAB_SIZE + ids, mask=ids < VOCAB_SIZE, other=0)
        logits = _penalise(logits, entries, floats_ptr, num_slots, slot)
    copy_row = copy_ptr + tl.program_id(0).to(tl.int64) * VOCAB_SIZE
    tl.store(copy_row + ids, logits, mask=ids < VOCAB_SIZE)


@triton.jit
def _bias_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    slots_ptr,
    copy_ptr,
    integers_ptr,
    floats_ptr,
    num_slots,
    counts_ptr,
    VOCAB_SIZE: tl.constexpr,
    list_ids_ptr,
    list_numbers_ptr,
    width,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the logits of a row's biased tokens again: first the bias, then the penalties."""
    row = tl.load(rows_ptr + tl.program_id(0))
    slot = tl.load(slots_ptr + row)
    list_start = tl.load(integers_ptr + BIASES * num_slots + slot) * width
    copy_row = copy_ptr + tl.program_id(0).to(tl.int64) * VOCAB_SIZE
    start = 0
    while start < width:
        places = start + tl.arange(0, BLOCK)
        is_inside = places < width
        ids = tl.load(list_ids_ptr + list_start + places, mask=is_inside, other=0)
        biases = tl.load(list_numbers_ptr + list_start + places, mask=is_inside, other=0.0)
        is_biased = biases != 0
        logits = tl.load(logits_ptr + row * logits_stride + ids, mask=is_biased, other=0.0)
        logits = logits.to(tl.float32) + biases
        if HAS_COUNTS:
            entries = tl.load(counts_ptr + slot * VOCAB_SIZE + ids, mask=is_biased, other=0)
            logits = _penalise(logits, entries, floats_ptr, num_slots, slot)
        tl.store(copy_row + ids, logits, mask=is_biased)
        start += BLOCK


@triton.jit
def _hold_back_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    positions_ptr,
    integers_ptr,
    num_slots,
    list_ids_ptr,
    width,
    BLOCK: tl.constexpr,
):
    """Overwrite the logits of a row's end tokens with -inf until min_new_tokens are there."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    is_held = tl.load(positions_ptr + row) < tl.load(integers_ptr + MIN_NEW * num_slots + slot)
    list_start = tl.load(integers_ptr + ENDS * num_slots + slot) * width
    start = 0
    while start < width:
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(list_ids_ptr + list_start + places, mask=places < width, other=0)
        is_written = (places < width) & is_held
        tl.store(logits_ptr + row * logits_stride + ids, -float("inf"), mask=is_written)
        start += BLOCK


@triton.jit
def _mask_kernel(
    logits_ptr,
    row_stride,
    stride,
    rows_ptr,
    masks_ptr,
    masks_stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Overwrite a block of a row's logits with -inf where the token's bit is not set."""
    row = tl.load(rows_ptr + tl.program_id(0))
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = ids < VOCAB_SIZE
    masks_row = masks_ptr + tl.program_id(0) * masks_stride
    words = tl.load(masks_row + ids // 32, mask=is_inside, other=-1)
    is_masked = ((words >> (ids % 32)) & 1) == 0
    place = logits_ptr + row * row_stride + ids * stride
    tl.store(place, -float("inf"), mask=is_inside & is_masked)
