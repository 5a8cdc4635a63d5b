"""Generating steps: the next token of all running rows, or several that are checked at once.

What a step needs stands in arrays on the model's device, by slot, and is brought forward there, so
that a step can be started before the host has read the tokens of the one before.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bulk_pipeline.engine.answers import Answers
from bulk_pipeline.engine.logprobs import StepLogprobs
from bulk_pipeline.engine.ngram import Drafts
from bulk_pipeline.engine.paged_model import PagedModel
from bulk_pipeline.engine.rows import Row, page_table
from bulk_pipeline.engine.sampling_slots import upload
from bulk_pipeline.engine.slots import Slots
from bulk_pipeline.engine.streams import mark, stream_of
from bulk_pipeline.spec import PAGE_TOKENS


@dataclass(slots=True)
class Step:
    """A step that was started.

    Attributes
    ----------
    slots, serials
        Of its rows when it was started.
    ids
        Their tokens, on the host once `event` has come; NO_TOKEN where logits are not numbers.
    """

    slots: np.ndarray
    serials: np.ndarray
    ids: torch.Tensor
    logprobs: StepLogprobs | None
    event: torch.cuda.Event | None


class Steps:
    """Runs steps of the rows in `slots` through the model.

    Attributes
    ----------
    in_flight
        Steps that were started and whose tokens the host has not read, oldest first.
    """

    def __init__(self, model: PagedModel, slots: Slots, answers: Answers, max_seq_len: int) -> None:
        self._model, self._slots, self._answers = model, slots, answers
        self._table_width = -(-max_seq_len // PAGE_TOKENS)
        with stream_of(model):
            self._ids = self._zeros(torch.int64)
            self._lengths = self._zeros(torch.int32)
            self._positions = self._zeros(torch.int64)
            self._table = self._zeros(torch.int32, self._table_width)
        self.clear()

    def clear(self) -> None:
        """Forget the steps in flight."""
        self.in_flight: deque[Step] = deque()
        self._active: np.ndarray | None = None  # what `_index` is on the device
        self._index = torch.empty(0)

    def activate(self, rows: Sequence[Row]) -> None:
        """Let rows whose prompts stand in the cache generate from the next step on."""
        if not rows:
            return
        slots = np.array([row.slot for row in rows])
        index = upload(slots, self._model.device)
        self._table[index] = upload(page_table(rows, self._table_width), self._model.device)
        self.write_ends(slots, np.array([row.context[-1] for row in rows]))
        self._slots.activate(slots)

    def write_ends(self, slots: np.ndarray, last_ids: np.ndarray) -> None:
        """Write to the device where rows go on: after which token, and how many."""
        places = [slots, last_ids, self._slots.lengths[slots], self._slots.scheduled[slots]]
        index, ids, lengths, positions = upload(np.stack(places), self._model.device)
        self._ids[index] = ids
        self._lengths[index] = lengths.int()
        self._positions[index] = positions

    def write_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Write pages to the device: of which slot, in which place, which page."""
        on_device = upload(np.array(pages).T.copy(), self._model.device)
        self._table[on_device[0], on_device[1]] = on_device[2].int()

    def start(self, take_earlier: Callable[[], None]) -> None:
        """Start a step of all rows that generate; those that need no other one are active no more.

        `take_earlier` takes the tokens of all steps in flight, where this one depends on them.
        """
        slots = self._slots.active
        serials = self._slots.serials[slots]
        if self._active is not slots:
            self._active, self._index = slots, upload(slots, self._model.device)
        index = self._index
        lengths, positions = self._lengths[index], self._positions[index]
        logits = self._model.decode(
            self._ids[index],
            lengths,
            self._table[index],
            int(self._slots.lengths[slots].max()) + 1,
        )
        places = self._slots.scheduled[slots]
        ids, found, logprobs = self._answers.sample(
            logits, slots, index, places, positions, take_earlier
        )
        self._ids[index] = ids
        self._lengths[index] = lengths + 1
        self._positions[index] = positions + 1
        self.in_flight.append(Step(slots, serials, found, logprobs, mark(self._model.device)))
        self._slots.lengths[slots] += 1
        self._slots.scheduled[slots] += 1
        at_limit = slots[self._slots.scheduled[slots] >= self._answers.limits[slots]]
        if len(at_limit):
            self._slots.deactivate(at_limit)

    def finish(self) -> Step:
        """Wait for the oldest step in flight, which is so no more, and return it."""
        step = self.in_flight.popleft()
        if step.event is not None:
            step.event.synchronize()
        return step

    def check(
        self, drafts: Drafts, take_earlier: Callable[[], None]
    ) -> tuple[np.ndarray, StepLogprobs | None]:
        """Sample behind each of these tokens, and wait for what was sampled.

        Keys and values of tokens that were wrong stay in the row's own pages until others are
        written over them; no row reads past its length.
        """
        owners, offsets = drafts.owners, drafts.offsets
        lengths = self._slots.lengths[owners] + offsets
        positions = self._answers.generated[owners] + offsets
        places = np.stack([owners, drafts.ids, lengths, positions])
        index, ids, lengths_there, positions_there = upload(places, self._model.device)
        logits = self._model.verify(
            ids,
            lengths_there.int(),
            self._table[index],
            int(lengths.max()) + 1,
            drafts.counts,
        )
        _, found, logprobs = self._answers.sample(
            logits, owners, index, positions, positions_there, take_earlier
        )
        event = mark(self._model.device)
        if event is not None:
            event.synchronize()
        return found.numpy(), logprobs

    def advance(self, slots: np.ndarray, counts: np.ndarray, last_ids: np.ndarray) -> None:
        """Let rows go on after so many more tokens, of which these are the last."""
        self._slots.lengths[slots] += counts
        self._slots.scheduled[slots] += counts
        self.write_ends(slots, last_ids)

    def _zeros(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros((self._slots.size, *shape), dtype=dtype, device=self._model.device)
