"""Batched sampling: logits and settings of a batch in, one token id a row out.

Row i depends on row i alone: its logits, its settings, its seed and its position, never on the
batch around it. The random numbers are the same on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from bulk_pipeline.engine.request import MAX_LOGPROBS, SamplingParams
from bulk_pipeline.engine.sampling_slots import (
    BIASES,
    ENDS,
    FREQUENCY,
    LOG_MIN_P,
    MIN_NEW,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SettingsTable,
    to_int64,
    upload,
)

GAMMA = 0x9E3779B97F4A7C15  # splitmix64's constants
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
TOP_P_PREFIX = 1024  # most rows reach top_p within so many tokens; more need a full sort


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """A batch's settings, one row each; None where no row uses the setting.

    Attributes
    ----------
    temperature
        float64 [rows]; 1 in greedy rows. None: every row is greedy.
    is_greedy
        bool [rows], where greedy and sampled rows are mixed.
    seed
        int64 [rows], the bits of the unsigned 64-bit seed.
    top_k
        int64 [rows]; the size of the vocabulary where a row has it off.
    top_p
        float64 [rows]; 1 where a row has it off.
    log_min_p
        float64 [rows], the logarithm of min_p; -inf where a row has it off.
    min_new_tokens
        int64 [rows]; 0 where a row has it off.
    end_ids
        int64 [rows, ids], the tokens that `min_new_tokens` holds back, padded by repetition.
    bias_ids, biases
        [rows, ids]: tokens and what is added to their logits; repetitions have 0.
    repetition, frequency, presence
        float64 [rows], the penalties; all three or none.
    max_top_k
        The largest top_k in use.
    """

    seed: torch.Tensor
    temperature: torch.Tensor | None = None
    is_greedy: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    log_min_p: torch.Tensor | None = None
    min_new_tokens: torch.Tensor | None = None
    end_ids: torch.Tensor | None = None
    bias_ids: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    max_top_k: int = 0

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Gather the settings of the rows of a batch."""
        table = SettingsTable(len(params), vocab_size)
        for slot, row_params in enumerate(params):
            table.set(slot, row_params)
        return cls.from_table(table, np.arange(len(params)), torch.device(device))

    @classmethod
    def from_table(cls, table: SettingsTable, slots: np.ndarray, device: torch.device) -> Self:
        """Gather the settings of these slots, in this order, on `device`."""
        integers, floats = table.integers[:, slots], table.floats[:, slots]

        def column(values: np.ndarray, is_used: bool | np.bool_ = True) -> torch.Tensor | None:
            return upload(values, device) if is_used else None

        is_greedy = floats[TEMPERATURE] == 0
        top_k, top_p, log_min_p = integers[TOP_K], floats[TOP_P], floats[LOG_MIN_P]
        has_top_k = top_k < table.vocab_size
        ends, biases = integers[ENDS], integers[BIASES]
        is_held, is_biased = integers[MIN_NEW].any(), biases.any()
        is_penalised = table.is_penalised(slots).any()
        is_sampled = not is_greedy.all()
        return cls(
            seed=upload(integers[SEED], device),
            temperature=column(np.where(is_greedy, 1.0, floats[TEMPERATURE]), is_sampled),
            is_greedy=column(is_greedy, is_sampled and is_greedy.any()),
            top_k=column(top_k, has_top_k.any()),
            top_p=column(top_p, (top_p < 1).any()),
            log_min_p=column(log_min_p, np.isfinite(log_min_p).any()),
            min_new_tokens=column(integers[MIN_NEW], is_held),
            end_ids=column(table.ends.ids[ends], is_held),
            bias_ids=column(table.biases.ids[biases], is_biased),
            biases=column(table.biases.numbers[biases], is_biased),
            repetition=column(floats[REPETITION], is_penalised),
            frequency=column(floats[FREQUENCY], is_penalised),
            presence=column(floats[PRESENCE], is_penalised),
            max_top_k=int(top_k[has_top_k].max(initial=0)),
        )


def problem_with(params: SamplingParams, vocab_size: int) -> str | None:
    """Say in one line why a model with this vocabulary cannot sample so; None if it can."""
    biased = [token for token, _ in params.logit_bias]
    for name, ids in (("logit_bias", biased), ("banned_token_ids", params.banned_token_ids)):
        unknown = next((token for token in ids if not 0 <= token < vocab_size), None)
        if unknown is not None:
            return (
                f"sampling.{name}: token ids must be below {vocab_size}, got {unknown}; remove it"
            )
    if not params.repetition_penalty > 0:
        return f"sampling.repetition_penalty must be above 0, got {params.repetition_penalty}"
    if len(set(params.banned_token_ids)) == vocab_size:
        return f"sampling.banned_token_ids: all {vocab_size} tokens are banned; remove some"
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        return f"sampling.logprobs must be 0 to {MAX_LOGPROBS}, got {params.logprobs}"
    guard = params.loop_guard
    if guard is not None and not (guard.ngram >= 1 and guard.repeats >= 2):
        return (
            "sampling.loop_guard: ngram must be at least 1 and repeats at least 2, got "
            f"{guard.ngram} and {guard.repeats}"
        )
    return None


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    positions: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token id a row.

    The order: biases, penalties, end tokens are held back (`min_new_tokens`), temperature, top_k,
    top_p, min_p, draw. Tokens exactly as probable as the last one that top_k or top_p keeps are
    kept with it.

    Parameters
    ----------
    logits
        [rows, vocabulary], any floating-point type.
    positions
        int64 [rows]: how many tokens the row has generated before this one.
    counts
        int16 [rows, vocabulary], as in `TokenCounts`; needed where a row has penalties.

    Returns
    -------
    int64 [rows]
    """
    logits = _edit(logits, batch, counts)
    logits = _hold_back_end_tokens(logits, batch, positions)
    if batch.temperature is None:
        return logits.argmax(dim=-1)
    scaled = logits.double() / batch.temperature[:, None]
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()
    kept = scaled >= _cutoff(scaled, weights, batch)[:, None]
    ids = draw(scaled, kept, batch.seed, positions)
    if batch.is_greedy is None:
        return ids
    return torch.where(batch.is_greedy, logits.argmax(dim=-1), ids)


def draw(
    scaled: torch.Tensor, kept: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw from softmax(`scaled`) over the `kept` tokens: [rows, vocabulary] both; ids [rows].

    By the Gumbel-max trick, with one random number a token. Against drawing from the cumulative
    distribution with one number a row it costs more hashing, and is far less sensitive: rounding
    of the logits changes the token about as rarely as it changes their order, where cumulative
    sums add up the rounding of all tokens before.
    """
    rows, ids = kept.nonzero(as_tuple=True)
    numbers = uniform(seed[rows], positions[rows], ids)
    scores = torch.full_like(scaled, float("-inf"))
    scores[rows, ids] = scaled[rows, ids] - (-numbers.log()).log()
    return scores.argmax(dim=-1)


def uniform(seed: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers in (0, 1), decided by seed, token position and token id alone.

    The state at position i is the i-th output of a splitmix64 generator that starts from the
    mixed seed, and a token's number the output of that state for its id: integer arithmetic that
    wraps around, so it is the same everywhere.
    """
    gamma = to_int64(GAMMA)
    state = _mix(_mix(seed) + (positions + 1) * gamma)
    bits = _mix(state + (ids + 1) * gamma)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser."""
    bits = (bits ^ _shift_right(bits, 30)) * to_int64(MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * to_int64(MIX_2)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int64 as if it were unsigned."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _edit(logits: torch.Tensor, batch: SamplingBatch, counts: torch.Tensor | None) -> torch.Tensor:
    """Add the biases and take off the penalties; leave the logits of other rows as they are."""
    if batch.bias_ids is None and batch.repetition is None:
        return logits
    edited = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if batch.bias_ids is not None and batch.biases is not None:
        edited = edited.scatter_add(1, batch.bias_ids, batch.biases.to(edited.dtype))
    if batch.repetition is None or batch.frequency is None or batch.presence is None:
        return edited
    assert counts is not None
    repetition, frequency, presence = (
        penalty.to(edited.dtype)[:, None]
        for penalty in (batch.repetition, batch.frequency, batch.presence)
    )
    repeated = torch.where(edited > 0, edited / repetition, edited * repetition)
    edited = torch.where(counts != 0, repeated, edited)
    num_output = counts >> 1
    return edited - num_output * frequency - (num_output > 0) * presence


def _hold_back_end_tokens(
    logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor
) -> torch.Tensor:
    if batch.min_new_tokens is None or batch.end_ids is None:
        return logits
    held = (positions < batch.min_new_tokens)[:, None]
    values = logits.gather(1, batch.end_ids).masked_fill(held, float("-inf"))
    return logits.scatter(1, batch.end_ids, values)


def _cutoff(scaled: torch.Tensor, weights: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return the smallest scaled logit that each row keeps, [rows]."""
    cutoff = scaled.new_full((scaled.shape[0],), float("-inf"))
    if batch.top_k is not None:
        ordered = scaled.topk(batch.max_top_k, dim=-1).values
        last = (batch.top_k - 1).clamp(max=batch.max_top_k - 1)
        kth = ordered.gather(1, last[:, None])[:, 0]
        cutoff = torch.where(batch.top_k < scaled.shape[-1], kth, cutoff)
    if batch.top_p is not None:
        nucleus = _nucleus_cutoff(scaled, weights, batch.top_p, cutoff)
        cutoff = torch.where(batch.top_p < 1, torch.maximum(cutoff, nucleus), cutoff)
    if batch.log_min_p is not None:
        cutoff = torch.maximum(cutoff, scaled.amax(dim=-1) + batch.log_min_p)
    return cutoff


def _nucleus_cutoff(
    scaled: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor, cutoff: torch.Tensor
) -> torch.Tensor:
    """Return the scaled logit of the token with which the kept probability reaches top_p."""
    kept = weights.masked_fill(scaled < cutoff[:, None], 0.0)
    mass = top_p * kept.cumsum(dim=-1)[:, -1]
    for size in (TOP_P_PREFIX, scaled.shape[-1]):
        ordered = scaled.topk(min(size, scaled.shape[-1]), dim=-1).values
        probable = (ordered - ordered[:, :1]).exp()
        reached = probable.masked_fill(ordered < cutoff[:, None], 0.0).cumsum(dim=-1)
        if bool((reached[:, -1] >= mass)[top_p < 1].all()):
            break
    before = (reached < mass[:, None]).sum(dim=-1)  # tokens after which top_p is not reached yet
    return ordered.gather(1, before.clamp(max=ordered.shape[-1] - 1)[:, None])[:, 0]
