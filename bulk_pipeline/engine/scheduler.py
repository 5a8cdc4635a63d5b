"""The loop that keeps a batch full: prompts in packed passes, then a token a step for all rows.

Each round it decides (`prompts.py` which prompts are read, here which rows get pages), runs the
model (`prefill.py`, `steps.py`), and takes what was sampled (`answers.py`). A row keeps its slot,
a place in the batch's arrays (`slots.py`), until it ends.

On a GPU the host runs a step ahead: it starts step n + 1, whose inputs are on the device already,
before it reads what step n sampled. A row that ended is noticed a step late, and the token made
meanwhile is dropped.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from bulk_pipeline.engine.adapters import LowRank
from bulk_pipeline.engine.answers import Answers
from bulk_pipeline.engine.ngram import Drafts, NgramDrafter, NgramSettings
from bulk_pipeline.engine.paged_model import PagedModel
from bulk_pipeline.engine.pages import PageTable
from bulk_pipeline.engine.prefill import Prefill
from bulk_pipeline.engine.prompts import Prompts
from bulk_pipeline.engine.rows import NO_TOKEN, NOT_NUMBERS, Row, Stats
from bulk_pipeline.engine.slots import Slots
from bulk_pipeline.engine.steps import Steps
from bulk_pipeline.engine.streams import stream_of
from bulk_pipeline.spec import PAGE_TOKENS


class Scheduler:
    """Runs rows through one model, a bounded number at once.

    Parameters
    ----------
    cache_tensors
        All tensors of the cache, [1, tokens, ...] each.
    num_pages
        Pages of the cache, the scratch page included.
    max_chunk_size
        Most prompt tokens in one pass.
    on_finish
        Called with each row that ended; `token_ids` are what it generated.
    steps_ahead
        Steps that are started before their tokens are read; default 1 on a GPU, else 0. None are
        while rows draft: what to look for is not known before.
    drafts
        How to draft by n-grams; None: not at all.

    Attributes
    ----------
    drafter
        What drafts; None where nothing does. May be replaced while no row runs.
    """

    def __init__(
        self,
        model: PagedModel,
        cache_tensors: Sequence[torch.Tensor],
        num_pages: int,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_chunk_size: int,
        stats: Stats,
        on_finish: Callable[[Row], None],
        steps_ahead: int | None = None,
        drafts: NgramSettings | None = None,
    ) -> None:
        self.model = model
        self.pages = PageTable(num_pages)
        self._stats = stats
        self._on_finish = on_finish
        on_gpu = model.device.type == "cuda"
        self._ahead = (1 if on_gpu else 0) if steps_ahead is None else steps_ahead
        self.drafter = NgramDrafter(drafts, max_batch_size) if drafts is not None else None
        self._slots = Slots(max_batch_size)
        # none of these knows the scheduler: with it, the cache's memory is free at once
        self._prompts = Prompts(self.pages, self._slots, max_chunk_size, on_finish)
        self._prefill = Prefill(model, cache_tensors)
        self._answers = Answers(self._slots, model.vocab_size, model.device)
        self._steps = Steps(model, self._slots, self._answers, max_seq_len)

    @property
    def num_rows(self) -> int:
        """Rows that have not ended, waiting ones included."""
        return self._prompts.num_waiting + self._slots.num_taken

    def enqueue(self, rows: Iterable[Row], first: bool = False) -> None:
        """Let rows wait for their turn, those with equal beginnings together, long ones first.

        With `first` they come before all that wait already.
        """
        self._prompts.enqueue(rows, first)

    def step(self) -> None:
        """Read some prompts, generate a token for every running row, and end what has ended."""
        with stream_of(self.model):
            scored = self._read_prompts()
            started = self._start_step()
            self._take_steps(self._ahead if started else 0)
            self._take_scores(self._ahead if scored else 0)

    def forget(self) -> None:
        """Drop all rows and the content of all pages."""
        if self.model.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # of what failed before, told already
                torch.cuda.synchronize(self.model.device)
        self.pages.clear()
        self._prompts.clear()
        self._prefill.clear()
        self._steps.clear()
        self._answers.clear()
        self._slots.clear()

    def use_adapter(self, changes: Mapping[str, LowRank]) -> None:
        """Go on with another adapter, after all rows have ended."""
        assert not self.num_rows, "rows of one adapter must end before the next"
        self.forget()  # what pages hold was computed with the adapter of before
        with stream_of(self.model):
            self.model.use_adapter(changes)

    # -- a round

    def _read_prompts(self) -> bool:
        """Run one pass over prompts, where it is worth it; say whether it scored any."""
        work = self._prompts.next_pass(are_steps_running=bool(self._steps.in_flight))
        if work is None:
            return False
        if self.drafter is not None and self.drafter.clock is not None:
            self.drafter.clock.skip()
        for row in work.entered:
            self._answers.enter(row)
            if self.drafter is not None:
                self.drafter.enter(row.slot, row.request.sampling)
        scored = self._prefill.run(work)
        self._stats.prefill_tokens += work.num_tokens
        self._steps.activate(work.going_on)
        return scored

    def _start_step(self) -> bool:
        """Start a step for all running rows; say whether there were any."""
        self._go_back()
        self._get_pages()
        self._go_back()  # to get pages, tokens may have been read
        drafter = self.drafter
        looks = drafter is not None and bool(self._who_drafts(drafter).any())
        drafts = self._draft(drafter) if drafter is not None and looks else None
        num_rows = num_tokens = len(self._slots.active)
        if not num_rows:
            return False
        if drafter is not None and drafts is not None:
            num_tokens += self._check(drafter, drafts)
        else:
            self._steps.start(self._take_steps)
        self._count_step(num_rows)
        if drafter is not None and drafter.clock is not None:
            drafter.clock.took(num_rows, num_tokens, looks)
        return True

    def _take_steps(self, num_left: int = 0) -> None:
        """Take the tokens of all steps in flight but the last ones."""
        while len(self._steps.in_flight) > num_left:
            self._take_step()

    def _take_step(self) -> None:
        """Take the tokens of the oldest step that was started, and end the rows that ended."""
        self._take_scores()  # of rows that may end now
        step = self._steps.finish()
        alive = self._slots.serials[step.slots] == step.serials
        if step.logprobs is not None:
            self._answers.keep_logprobs(step.logprobs, np.where(alive, step.slots, -1))
        self._take(step.slots[alive], step.ids.numpy()[alive])

    def _take(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Add a token to each of these rows, and end those that ended."""
        is_broken = ids == NO_TOKEN
        if is_broken.any():
            for slot in slots[is_broken]:
                self._slots.row(slot).error = NOT_NUMBERS
            self._end(slots[is_broken])
            slots, ids = slots[~is_broken], ids[~is_broken]
        ended = self._answers.take(slots, ids)
        if len(ended):
            self._end(ended)

    def _take_scores(self, num_left: int = 0) -> None:
        """Take the log-probabilities of prompts, and end the rows that wait for no more."""
        while self._prefill.num_unread > num_left:
            done = self._prefill.read()
            self._end(np.array([row.slot for row in done], np.int64))

    def _count_step(self, num_rows: int) -> None:
        self._stats.steps += 1
        self._stats.rows += num_rows
        self._stats.cache_use = 1 - self.pages.num_free / (self.pages.num_pages - 1)

    # -- drafts

    def _draft(self, drafter: NgramDrafter) -> Drafts | None:
        """Guess what follows the last tokens of running rows; None where nothing is guessed."""
        self._take_steps()  # the last tokens are what to look for
        self._go_back()
        slots, generated = self._slots.active, self._answers.generated
        tokens = list(self._answers.last_ids(slots)[:, None])
        for place in np.nonzero(self._who_drafts(drafter))[0].tolist():
            slot = int(slots[place])
            # no more than the row may have; a page is not taken for what may be wrong
            left = self._answers.limits[slot] - generated[slot]
            room = self._slots.room[slot] - self._slots.lengths[slot]
            guesses = drafter.draft(self._answers.text(slot), int(min(left, room)) - 1)
            tokens[place] = np.concatenate([tokens[place], guesses])
            if not len(guesses):
                drafter.learn(slot, int(generated[slot]), 0)
        counts = np.array([len(ids) for ids in tokens])
        return Drafts(slots, np.concatenate(tokens), counts) if (counts > 1).any() else None

    def _who_drafts(self, drafter: NgramDrafter) -> np.ndarray:
        slots = self._slots.active
        return drafter.drafting(slots, self._answers.generated[slots])

    def _check(self, drafter: NgramDrafter, drafts: Drafts) -> int:
        """Run a step that checks guesses; keep those that are right, and one token more.

        Returns how many were right.
        """
        slots, firsts = drafts.slots, drafts.firsts
        serials, generated = self._slots.serials[slots], self._answers.generated[slots]
        sampled, logprobs = self._steps.check(drafts, self._take_steps)
        self._take_scores()  # of rows that may end now
        if logprobs is not None:  # rows that ask for them have one token
            self._answers.keep_logprobs(logprobs, drafts.owners)
        accepted = drafts.count_accepted(sampled)
        self._steps.advance(slots, accepted + 1, sampled[firsts + accepted])
        self._stats.drafted_tokens += len(drafts.ids) - len(slots)
        self._stats.accepted_tokens += int(accepted.sum())
        for place in drafts.guessed:
            right = int(accepted[place])
            drafter.learn(slots[place], int(generated[place]) + right + 1, right)
        for place in range(int(accepted.max()) + 1):
            going_on = (accepted >= place) & (self._slots.serials[slots] == serials)
            self._take(slots[going_on], sampled[firsts[going_on] + place])
        return int(accepted.sum())

    # -- where rows come and go

    def _end(self, slots: np.ndarray) -> None:
        self._slots.deactivate(slots)
        for slot in slots:
            row = self._slots.row(slot)
            self._leave(row)
            self._on_finish(row)

    def _leave(self, row: Row) -> None:
        """Take a row out of its slot and pages; its tokens so far stay with it."""
        was_read = row.stored == len(row.context) - 1
        row.token_ids = self._answers.leave(row.slot)
        prompt = np.asarray(row.request.input_ids, np.int64)
        row.context = np.concatenate([prompt, row.token_ids])
        if was_read and row.error is None:
            self.pages.describe(row.pages, row.context[:-1], row.described)
        self.pages.release(row.pages)
        self._slots.leave(row)
        row.pages, row.stored, row.described = [], 0, 0

    def _put_back(self, row: Row) -> None:
        """Make a row wait again, first in line, with the tokens it has."""
        self._slots.deactivate(np.array([row.slot]))
        self._leave(row)
        self._prompts.put_back(row)

    def _go_back(self) -> None:
        """Let rows that lost their last tokens go on from those that they have."""
        here: list[Row] = []
        for row in self._answers.take_shortened():
            kept = int(self._answers.generated[row.slot])
            if len(row.request.input_ids) + kept < len(row.context):
                self._put_back(row)  # its pages may be shared up to there
                continue
            here.append(row)
            self._slots.lengths[row.slot] = len(row.request.input_ids) + kept - 1
            self._slots.scheduled[row.slot] = kept
            self._answers.count_tokens(row)
        if here:
            slots = np.array([row.slot for row in here])
            self._steps.write_ends(slots, self._answers.last_ids(slots))
            self._slots.activate(np.setdiff1d(slots, self._slots.active))

    # -- pages of running rows

    def _get_pages(self) -> None:
        """Give a page to each running row whose next token begins one."""
        slots = self._slots.active
        growing = slots[self._slots.lengths[slots] == self._slots.room[slots]]
        if not len(growing):
            return
        grown: list[tuple[int, int, int]] = []
        for slot in growing:
            row = self._slots.rows[slot]
            if row is None or slot not in self._slots.active:
                continue  # it ended, or gave its pages away, a moment ago
            page = self._take_page(row)
            if page is not None:
                grown.append((int(slot), len(row.pages), page))
                row.pages.append(page)
                self._slots.room[slot] += PAGE_TOKENS
        grown = [each for each in grown if self._slots.rows[each[0]] is not None]
        if grown:
            self._steps.write_pages(grown)

    def _take_page(self, row: Row) -> int | None:
        """Take a page, from the rows that came last where none is free; None if `row` is gone."""
        page = self.pages.take_one()
        while page is None:
            self._take_steps()  # rows may have ended, and tokens must not be lost
            self._take_scores()
            page = self.pages.take_one()
            if page is None and self._slots.rows[row.slot] is row:
                self._preempt(int(np.argmax(self._slots.serials)))
            if row.slot < 0:
                if page is not None:
                    self.pages.release([page])
                return None
        return page

    def _preempt(self, slot: int) -> None:
        """Make a row give its pages to others for a while."""
        self._put_back(self._slots.row(slot))
        self._stats.preemptions += 1
