"""Batched sampling: logits and settings of a batch in, one token id a row out.

Row i depends on row i alone: its logits, its settings, its seed and its position, never on the
batch around it. The random numbers are the same on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from bulk_pipeline.engine.request import SamplingParams

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
    max_top_k: int = 0

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Gather the settings of the rows of a batch."""

        def floats(values: list[float], off: float) -> torch.Tensor | None:
            if all(value == off for value in values):
                return None
            return torch.tensor(values, dtype=torch.float64, device=device)

        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        seed = integers([_to_int64(p.seed) for p in params])
        greedy = [p.is_greedy for p in params]
        min_new, end_ids = _held_back(params, vocab_size)
        held = any(min_new)
        batch = cls(
            seed=seed,
            min_new_tokens=integers(min_new) if held else None,
            end_ids=torch.tensor(end_ids, device=device) if held else None,
        )
        if all(greedy):
            return batch
        top_k = [0 if p.is_greedy or p.top_k >= vocab_size else p.top_k for p in params]
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        min_p = [0.0 if p.is_greedy else p.min_p for p in params]
        log_min_p = floats(min_p, 0.0)
        return cls(
            seed=seed,
            temperature=torch.tensor(temperatures, dtype=torch.float64, device=device),
            is_greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=integers([k or vocab_size for k in top_k]) if any(top_k) else None,
            top_p=floats([1.0 if p.is_greedy else p.top_p for p in params], 1.0),
            log_min_p=None if log_min_p is None else log_min_p.log(),
            min_new_tokens=batch.min_new_tokens,
            end_ids=batch.end_ids,
            max_top_k=max(top_k),
        )


def sample(logits: torch.Tensor, batch: SamplingBatch, positions: torch.Tensor) -> torch.Tensor:
    """Draw one token id a row.

    The order: end tokens are held back (`min_new_tokens`), temperature, top_k, top_p, min_p, draw.
    Tokens exactly as probable as the last one that top_k or top_p keeps are kept with it.

    Parameters
    ----------
    logits
        [rows, vocabulary], any floating-point type.
    positions
        int64 [rows]: how many tokens the row has generated before this one.

    Returns
    -------
    int64 [rows]
    """
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
    gamma = _to_int64(GAMMA)
    state = _mix(_mix(seed) + (positions + 1) * gamma)
    bits = _mix(state + (ids + 1) * gamma)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser."""
    bits = (bits ^ _shift_right(bits, 30)) * _to_int64(MIX_1)
    bits = (bits ^ _shift_right(bits, 27)) * _to_int64(MIX_2)
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int64 as if it were unsigned."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _to_int64(value: int) -> int:
    """The signed integer with the bits of an unsigned 64-bit one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _held_back(params: Sequence[SamplingParams], vocab_size: int) -> tuple[list[int], list[list]]:
    """Return each row's min_new_tokens and end tokens, these padded to equal length."""
    ends = [[i for i in p.stop_token_ids if 0 <= i < vocab_size] for p in params]
    min_new = [p.min_new_tokens if ids else 0 for p, ids in zip(params, ends, strict=True)]
    width = max(1, *map(len, ends)) if ends else 1
    return min_new, [(ids or [0]) + (ids or [0])[-1:] * (width - len(ids or [0])) for ids in ends]


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
