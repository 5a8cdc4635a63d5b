"""Log-probabilities of tokens, from the model's own logits: before biases, penalties, grammars,
temperature and filters.

They are worked out on the device for the rows that ask, in float32 at least, and read by the host
together with the tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bulk_pipeline.engine.sampling_slots import download, upload

SLICE_BYTES = 1 << 28  # most memory for copies of logits in float32


@dataclass(slots=True)
class StepLogprobs:
    """The log-probabilities of one step, of the rows that ask for them.

    Attributes
    ----------
    places
        Which rows of the step they are.
    numbers
        How many best tokens each of them wants.
    totals
        [rows], the logarithm of the sum of all weights.
    best, best_ids
        [rows, tokens]: the best tokens, best first; None where no row wants any.
    chosen
        [rows], of the sampled tokens; None before `choose`.
    """

    places: np.ndarray
    places_on_device: torch.Tensor
    numbers: np.ndarray
    totals: torch.Tensor
    best: torch.Tensor | None = None
    best_ids: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    def choose(self, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Take the sampled ids [all rows], and let everything come to the host.

        What masks and bans overwrote in `logits` since is of no matter: the chosen token's
        logit is still there.
        """
        rows = self.places_on_device
        chosen = logits[rows, ids[rows]].to(self.totals.dtype) - self.totals
        self.chosen = download(chosen)
        if self.best is not None and self.best_ids is not None:
            self.best, self.best_ids = download(self.best), download(self.best_ids)

    def read(self) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...]]]:
        """Yield the place, the chosen token's log-probability and the best tokens of each row."""
        assert self.chosen is not None
        best: list[list[float]] = [[]] * len(self.places)
        best_ids: list[list[int]] = [[]] * len(self.places)
        if self.best is not None and self.best_ids is not None:
            best, best_ids = self.best.tolist(), self.best_ids.tolist()
        rows = zip(
            self.places.tolist(),
            self.chosen.tolist(),
            self.numbers.tolist(),
            best_ids,
            best,
            strict=True,
        )
        for place, chosen, number, ids, values in rows:
            yield place, chosen, tuple(zip(ids[:number], values[:number], strict=True))


class LogprobSlots:
    """Which rows in generation want log-probabilities, by slot."""

    def __init__(self, num_slots: int) -> None:
        self._numbers = np.full(num_slots, -1)

    def enter(self, slot: int, number: int | None) -> None:
        """Let a row enter a slot; `number` is its `SamplingParams.logprobs`."""
        self._numbers[slot] = -1 if number is None else number

    def begin(self, logits: torch.Tensor, slots: np.ndarray) -> StepLogprobs | None:
        """Work out what is known before the tokens are sampled; None where no row asks."""
        numbers = self._numbers[slots]
        [places] = np.nonzero(numbers >= 0)
        if not len(places):
            return None
        on_device = upload(places, logits.device)
        numbers = numbers[places]
        most = min(int(numbers.max()), logits.shape[1])
        totals, best, best_ids = [], [], []
        for rows in on_device.split(_slice_rows(logits)):
            some = _wide(logits[rows])
            totals.append(some.logsumexp(dim=-1))
            if most:
                values, ids = some.topk(most, dim=-1)
                best.append(values - totals[-1][:, None])
                best_ids.append(ids)
        step = StepLogprobs(places, on_device, numbers, torch.cat(totals))
        if most:
            step.best, step.best_ids = torch.cat(best), torch.cat(best_ids)
        return step


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of one token a row: logits [rows, vocabulary], ids [rows]."""
    found = []
    size = _slice_rows(logits)
    for rows, some_ids in zip(logits.split(size), ids.split(size), strict=True):
        some = _wide(rows)
        found.append(some.gather(1, some_ids[:, None])[:, 0] - some.logsumexp(dim=-1))
    return torch.cat(found)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _slice_rows(logits: torch.Tensor) -> int:
    """Rows whose copies in float32 fit into `SLICE_BYTES`: values, and their exponentials."""
    return max(1, SLICE_BYTES // (8 * logits.shape[1]))
