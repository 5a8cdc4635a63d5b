"""Passes over prompts: pages are copied, keys and values stored, log-probabilities worked out."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bulk_pipeline.engine.paged_model import PagedModel
from bulk_pipeline.engine.prompts import PromptPart, PromptPass
from bulk_pipeline.engine.rows import NOT_NUMBERS, Row, page_table
from bulk_pipeline.engine.sampling_slots import download
from bulk_pipeline.engine.streams import mark
from bulk_pipeline.spec import PAGE_TOKENS


@dataclass(slots=True)
class _Scores:
    """A pass whose log-probabilities the host has not read, and the rows that end with it."""

    parts: list[PromptPart]
    done: list[Row]
    values: torch.Tensor
    event: torch.cuda.Event | None


class Prefill:
    """Runs passes over prompts through the model.

    Parameters
    ----------
    cache_tensors
        All tensors of the cache, [1, tokens, ...] each.
    """

    def __init__(self, model: PagedModel, cache_tensors: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._cache_tensors = list(cache_tensors)
        self.clear()

    def clear(self) -> None:
        """Forget what was not read."""
        self._unread: deque[_Scores] = deque()

    @property
    def num_unread(self) -> int:
        """Passes whose log-probabilities the host has not read."""
        return len(self._unread)

    def run(self, work: PromptPass) -> bool:
        """Start a pass; say whether there is anything of it to read."""
        self._copy_pages(work.copies)
        # first, because others may share the pages of rows that are scored, which share none
        is_scored = self._score(work.scored, work.done)
        if work.plain:
            self._model.prefill(*_packed(work.plain))
        return is_scored

    def read(self) -> list[Row]:
        """Read the oldest log-probabilities of prompts; return the rows that wait for no more."""
        scores = self._unread.popleft()
        if scores.event is not None:
            scores.event.synchronize()
        values, first = scores.values.double().numpy(), 0
        for row, start, size in scores.parts:
            assert row.prompt_logprobs is not None
            row.prompt_logprobs[start : start + size] = values[first : first + size]
            first += size
            if np.isnan(row.prompt_logprobs[start : start + size]).any():
                row.error = NOT_NUMBERS
        now = time.monotonic()
        for row in scores.done:
            row.first_token = now
        return scores.done

    def _score(self, parts: list[PromptPart], done: list[Row]) -> bool:
        """Run a pass that says how probable the prompts' tokens are; say whether it is needed."""
        if not parts and not done:
            return False
        values = torch.empty(0)
        if parts:
            targets = [row.context[start + 1 : start + size + 1] for row, start, size in parts]
            values = download(self._model.score(*_packed(parts), np.concatenate(targets)))
        self._unread.append(_Scores(parts, done, values, mark(self._model.device)))
        return True

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        index = torch.tensor(copies).T
        on_devices = {t.device: index.to(t.device) for t in self._cache_tensors}
        for tensor in self._cache_tensors:
            pages = tensor.view(-1, PAGE_TOKENS * tensor[0, 0].numel())
            sources, targets = on_devices[tensor.device]
            pages.index_copy_(0, targets, pages.index_select(0, sources))


def _packed(parts: list[PromptPart]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of a pass over parts of prompts."""
    return (
        np.concatenate([row.context[start : start + size] for row, start, size in parts]),
        np.array([start for _, start, _ in parts], np.int32),
        np.array([size for _, _, size in parts], np.int32),
        page_table([row for row, _, _ in parts]),
    )
