"""What changes logits before a token is drawn on a GPU, in Triton: biases, penalties, masks.

Import this module only where there is a GPU (or under TRITON_INTERPRET=1).
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl

from bulk_pipeline.engine import sampling_slots

EDIT_BLOCK = 2048  # logits that a program changes
LIST_BLOCK = 256  # tokens of a list that are read at once

MIN_NEW = tl.constexpr(sampling_slots.MIN_NEW)
ENDS = tl.constexpr(sampling_slots.ENDS)
BIASES = tl.constexpr(sampling_slots.BIASES)
REPETITION = tl.constexpr(sampling_slots.REPETITION)
FREQUENCY = tl.constexpr(sampling_slots.FREQUENCY)
PRESENCE = tl.constexpr(sampling_slots.PRESENCE)


def edited_copy(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    integers: torch.Tensor,
    floats: torch.Tensor,
    counts: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return float32 logits of some rows with their biases and penalties.

    Parameters
    ----------
    logits
        [all rows, vocabulary].
    rows, slots
        int64: the rows to copy, and the slot of each of all rows.
    integers, floats
        The settings of all slots, as in `SettingsTable`.
    counts
        int16 [slots, vocabulary], as in `TokenCounts`; empty where no row has penalties.
    biases
        Token ids and what is added, as in `SharedLists`; None where no row has any.

    Returns
    -------
    float32 [rows, vocabulary]
    """
    vocab_size = logits.shape[1]
    copy = torch.empty((len(rows), vocab_size), device=logits.device)
    settings = (integers, floats, integers.shape[1])
    common = (logits, logits.stride(0), rows, slots, copy, *settings, counts, vocab_size)
    # not fused: multiplied and rounded, then subtracted and rounded, as on the CPU
    _edit_kernel[(len(rows), triton.cdiv(vocab_size, EDIT_BLOCK))](
        *common, HAS_COUNTS=len(counts) > 0, BLOCK=EDIT_BLOCK, enable_fp_fusion=False
    )
    if biases is not None:
        _bias_kernel[(len(rows),)](
            *common,
            *biases,
            biases[0].shape[1],
            HAS_COUNTS=len(counts) > 0,
            BLOCK=LIST_BLOCK,
            enable_fp_fusion=False,
        )
    return copy


def hold_back(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    integers: torch.Tensor,
    end_ids: torch.Tensor,
) -> None:
    """Overwrite the logits of end tokens with -inf in rows below their min_new_tokens.

    Parameters
    ----------
    logits
        [rows, vocabulary].
    slots, positions
        int64 [rows]: the slot of each row, and how many tokens it has generated.
    integers
        The settings of all slots, as in `SettingsTable`.
    end_ids
        As in `SharedLists`.
    """
    _hold_back_kernel[(len(slots),)](
        logits,
        logits.stride(0),
        slots,
        positions,
        integers,
        integers.shape[1],
        end_ids,
        end_ids.shape[1],
        BLOCK=LIST_BLOCK,
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
