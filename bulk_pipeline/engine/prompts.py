"""Prompts in line: which enters next, in which pages, and what of which goes into the next pass.

A prompt of more tokens than a pass takes is read in several. It shares the pages that hold its
beginning already, copies one that holds part of it, and waits for a pass that computes much of it
for another row.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from bulk_pipeline.engine.pages import PageTable, Prefix
from bulk_pipeline.engine.rows import Row
from bulk_pipeline.engine.slots import Slots
from bulk_pipeline.spec import PAGE_TOKENS

DEFER_TOKENS = 64  # of a prompt, worth waiting for the pass that computes them for another row
REFILL_SHARE = 1 / 16  # of the batch, empty before prompts are read again
FREE_SHARE = 0.1  # pages kept free for each running row, before another one starts


class PromptPart(NamedTuple):
    """Tokens of a row's prompt that one pass reads."""

    row: Row
    start: int
    size: int


@dataclass(slots=True)
class PromptPass:
    """One pass over prompts.

    Attributes
    ----------
    entered
        Rows that got pages and a slot for it.
    copies
        Pages to be copied before it: from which one, to which one.
    scored
        Parts of rows whose prompts' log-probabilities are wanted.
    plain
        All other parts. They may share pages of rows that are scored, which share none.
    done
        Rows that end with this pass: nothing is to be generated.
    going_on
        Rows that generate after it.
    """

    entered: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    scored: list[PromptPart] = field(default_factory=list)
    plain: list[PromptPart] = field(default_factory=list)
    done: list[Row] = field(default_factory=list)
    going_on: list[Row] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(part.size for parts in (self.scored, self.plain) for part in parts)


class Prompts:
    """The rows that wait for their turn, and those whose prompts are being read.

    Parameters
    ----------
    max_tokens
        Most tokens of a pass.
    on_finish
        Called with each row that cannot begin.
    """

    def __init__(
        self,
        pages: PageTable,
        slots: Slots,
        max_tokens: int,
        on_finish: Callable[[Row], None],
    ) -> None:
        self._pages, self._slots = pages, slots
        self._max_tokens, self._on_finish = max_tokens, on_finish
        self._waiting: deque[Row] = deque()
        self.clear()

    def clear(self) -> None:
        """Drop all rows."""
        self._waiting.clear()
        self._reading: list[Row] = []
        self._pages_wanted = 0  # by the next row, that were not free

    @property
    def num_waiting(self) -> int:
        """Rows that have no slot."""
        return len(self._waiting)

    def enqueue(self, rows: Iterable[Row], first: bool = False) -> None:
        """Let rows wait for their turn, those with equal beginnings together, long ones first.

        With `first` they come before all that wait already.
        """
        groups: dict[bytes, list[Row]] = {}
        for row in rows:
            row.context = np.asarray(row.request.input_ids, np.int64)
            if row.request.prompt_logprobs:
                row.prompt_logprobs = np.zeros(len(row.context) - 1)
                row.to_score = True
            groups.setdefault(row.context[:PAGE_TOKENS].tobytes(), []).append(row)
        for group in groups.values():
            group.sort(key=lambda row: -len(row.context))
        ordered = sorted(groups.values(), key=lambda group: -len(group[0].context))
        ready = [row for group in ordered for row in group]
        for row in ready:
            if row.grammar is not None:
                row.grammar.prepare()
        if first:
            self._waiting.extendleft(reversed(ready))
        else:
            self._waiting.extend(ready)

    def put_back(self, row: Row) -> None:
        """Let a row that left its slot wait again, first in line."""
        self._reading = [other for other in self._reading if other is not row]
        self._waiting.appendleft(row)

    def next_pass(self, are_steps_running: bool) -> PromptPass | None:
        """Put the next pass together, and let rows enter for it; None where it is not worth it.

        `are_steps_running`: whether rows may end soon, and give pages back.
        """
        if not self._reading and not self._should_admit(are_steps_running):
            return None
        self._pages.round += 1
        work, budget = PromptPass(), self._max_tokens
        for row in self._reading:
            budget -= self._schedule(row, budget, work)
        while budget > 0 and self._waiting and self._slots.num_free:
            row = self._waiting[0]
            if row.grammar is not None and (problem := row.grammar.begin()):
                row.error = problem
                self._on_finish(self._waiting.popleft())
                continue
            if not self._admit(row, work):
                break
            self._waiting.popleft()
            self._reading.append(row)
            budget -= self._schedule(row, budget, work)
        self._hand_over_ready(work)
        return work

    def _hand_over_ready(self, work: PromptPass) -> None:
        """Part with the rows whose prompts stand in the cache after this pass."""
        for row in self._reading:
            if row.stored == len(row.context) - 1:
                row.to_score = False
                ends = not row.request.sampling.max_new_tokens
                (work.done if ends else work.going_on).append(row)
        self._reading = [row for row in self._reading if row.stored < len(row.context) - 1]

    def _should_admit(self, are_steps_running: bool) -> bool:
        if not self._waiting or not self._slots.num_free:
            return False
        if not len(self._slots.active):
            return not are_steps_running or self._pages.num_free >= self._pages_wanted
        wanted = max(1, int(self._slots.size * REFILL_SHARE))
        enough = self._slots.num_free >= min(wanted, len(self._waiting))
        return enough and self._pages.num_free >= self._pages_wanted

    def _admit(self, row: Row, work: PromptPass) -> bool:
        """Give a row a slot and pages; say whether there was room, and it need not wait."""
        ids = row.context[:-1]
        # what is scored must go through the model
        prefix = Prefix() if row.to_score else self._pages.match(ids)
        has_parts = bool(work.scored or work.plain)
        if has_parts and not row.to_score and self._is_worth_waiting(ids, prefix):
            return False
        pages = self._take_pages(prefix, len(ids) // PAGE_TOKENS + 1 - len(prefix.pages))
        if pages is None:
            return False
        self._pages_wanted = 0
        if prefix.source is not None:
            work.copies.append((prefix.source, pages[len(prefix.pages)]))
        row.pages, row.stored = pages, prefix.num_tokens
        row.described = len(prefix.pages) * PAGE_TOKENS
        if row.started is None:
            row.started = time.monotonic()
            row.cached_tokens = prefix.num_tokens
        self._slots.enter(row)
        work.entered.append(row)
        return True

    def _take_pages(self, prefix: Prefix, num_new: int) -> list[int] | None:
        """Take a row's pages; None where too few are free, beside what running rows will need."""
        running = self._slots.num_taken
        reserve = int(np.ceil(running * FREE_SHARE))
        if running and self._pages.num_free < num_new + reserve:
            # several rows' worth, so that prompts are not read one by one
            several = min(num_new * (running // 16), self._pages.num_pages // 16)
            self._pages_wanted = max(num_new, several) + reserve
            return None
        pages = self._pages.take(prefix, num_new)
        if pages is None:
            self._pages_wanted = self._pages.num_free + num_new
        return pages

    def _is_worth_waiting(self, ids: np.ndarray, prefix: Prefix) -> bool:
        """Whether the pass being put together computes much that the row could copy afterwards."""
        later = self._pages.match(ids, pending=True)
        return later.num_tokens >= prefix.num_tokens + DEFER_TOKENS

    def _schedule(self, row: Row, budget: int, work: PromptPass) -> int:
        """Add the next tokens of a row's prompt to the pass; return how many."""
        count = min(len(row.context) - 1 - row.stored, max(budget, 0))
        if count:
            parts = work.scored if row.to_score else work.plain
            parts.append(PromptPart(row, row.stored, count))
            row.stored += count
        if row.stored > row.described:
            self._pages.describe(row.pages, row.context[: row.stored], row.described)
            row.described = row.stored // PAGE_TOKENS * PAGE_TOKENS
        return count
