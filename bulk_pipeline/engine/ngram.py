"""Drafting by n-grams: what followed a row's last tokens where they stood before.

Answers that repeat parts of their prompt, or of themselves, can be guessed several tokens ahead
from the tokens alone. The guesses go through the model together with the row's last token, a token
is sampled at each place, and guesses count as far as they are what was sampled. What a row draws
at a position depends on nothing but its logits there, its seed and the position, so that a row gets
the tokens that it would have got without.
"""

from dataclasses import dataclass

import numpy as np

from bulk_pipeline.engine.draft_clock import DraftClock
from bulk_pipeline.engine.request import SamplingParams

WINDOW = 32  # steps of a row after which it is seen whether drafting is worth it
MIN_GAIN = 0.4  # accepted tokens a step, below which a row pauses: a checking step takes longer
RUN_WINDOWS = 8  # so many windows of any rows tell whether new rows are likely to gain
LATE_START = 256  # tokens after which rows look for drafts where others gained little
TRIAL_EVERY = 16  # one row in so many starts at once all the same


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """How n-grams are drafted.

    Attributes
    ----------
    num_tokens
        Most tokens drafted for a row in a step.
    longest, shortest
        How many of a row's last tokens are looked for: the longest that is found, at least the
        shortest.
    max_rows
        Draft only while at most so many rows run, and only as far as it pays by the clock; None:
        always.
    """

    num_tokens: int = 4
    longest: int = 4
    shortest: int = 2
    max_rows: int | None = None

    def most_rows(self, batch_size: int) -> int:
        """Rows that may run in a step with drafts."""
        return batch_size if self.max_rows is None else min(self.max_rows, batch_size)

    def step_tokens(self, batch_size: int) -> int:
        """Most tokens in one generating step, of a batch of so many rows."""
        return max(batch_size, self.most_rows(batch_size) * (self.num_tokens + 1))


@dataclass(frozen=True, slots=True)
class Drafts:
    """What one step checks: of each row its last token, and guesses of those that follow it.

    Attributes
    ----------
    slots
        The slots of the rows.
    ids
        Their tokens, one row after the other.
    counts
        Tokens of each row; 1 where there is no guess.
    """

    slots: np.ndarray
    ids: np.ndarray
    counts: np.ndarray

    @property
    def firsts(self) -> np.ndarray:
        """Where in `ids` each row begins."""
        return self.counts.cumsum() - self.counts

    @property
    def owners(self) -> np.ndarray:
        """The slot of each token."""
        return np.repeat(self.slots, self.counts)

    @property
    def offsets(self) -> np.ndarray:
        """The place of each token among those of its row."""
        return np.arange(len(self.ids)) - np.repeat(self.firsts, self.counts)

    @property
    def guessed(self) -> list[int]:
        """Which rows have guesses."""
        return np.nonzero(self.counts > 1)[0].tolist()

    def count_accepted(self, sampled: np.ndarray) -> np.ndarray:
        """Return how many guesses of each row are right, given what was sampled behind `ids`."""
        accepted, firsts = np.zeros(len(self.slots), np.int64), self.firsts
        for place in self.guessed:
            first, count = firsts[place], self.counts[place]
            guesses = self.ids[first + 1 : first + count]
            accepted[place] = count_accepted(guesses, sampled[first:])
        return accepted


def draft_tokens(context: np.ndarray, num_tokens: int, longest: int, shortest: int) -> np.ndarray:
    """Return what followed the last tokens of `context` where they stood before.

    Of several places the one that has most of the last tokens counts, up to `longest` of them, and
    of those the latest. Where less than `num_tokens` follow it, the row repeats itself, and the
    draft goes on in that way. Empty where not even `shortest` of the last tokens stood before.
    """
    last = len(context) - 1
    [found] = np.nonzero(context[:-1] == context[last])
    size = 1
    while size < longest and len(found):
        candidates = found[found >= size]
        longer = candidates[context[candidates - size] == context[last - size]]
        if not len(longer):
            break
        found, size = longer, size + 1
    if not len(found) or size < shortest:
        return context[:0]
    return np.resize(context[found[-1] + 1 :], num_tokens)


def count_accepted(drafts: np.ndarray, sampled: np.ndarray) -> int:
    """Return how many of `drafts` are what was sampled in their place, up to the first other."""
    [differs] = np.nonzero(drafts != sampled[: len(drafts)])
    return int(differs[0]) if len(differs) else len(drafts)


def can_draft(params: SamplingParams) -> bool:
    """Whether a row can check several tokens at once.

    Penalties, structures and bans depend on the tokens before, which are not known yet;
    log-probabilities are kept a token a step.
    """
    if params.has_penalties or params.has_bans:
        return False
    return params.structured is None and params.logprobs is None


class NgramDrafter:
    """Which rows in generation draft, by slot; a row to which it gives little pauses.

    Each pause of a row is twice as long as the one before. Where rows gained little of late, most
    new ones start late.

    Attributes
    ----------
    settings
        As given.
    clock
        What says whether drafting pays; None where that is not asked.
    """

    def __init__(
        self, settings: NgramSettings, num_slots: int, clock: DraftClock | None = None
    ) -> None:
        self.settings = settings
        self.clock = DraftClock() if clock is None and settings.max_rows is not None else clock
        self._max_rows = settings.most_rows(num_slots)
        self._can_draft = np.zeros(num_slots, bool)
        self._steps = np.zeros(num_slots, np.int64)  # of the present window
        self._gains = np.zeros(num_slots, np.int64)  # tokens accepted in it
        self._pauses = np.zeros(num_slots, np.int64)  # tokens that the last pause took
        self._resumes = np.zeros(num_slots, np.int64)  # when: tokens generated by then
        self._entered = 0
        self._run_steps = self._run_gains = 0.0  # of all rows, the last ones above all

    def enter(self, slot: int, params: SamplingParams) -> None:
        """Let a row enter a slot."""
        self._can_draft[slot] = can_draft(params)
        self._steps[slot] = self._gains[slot] = self._resumes[slot] = 0
        self._pauses[slot] = WINDOW
        self._entered += 1
        if self._is_run_poor and self._entered % TRIAL_EVERY:
            self._resumes[slot] = LATE_START

    @property
    def _is_run_poor(self) -> bool:
        is_known = self._run_steps >= RUN_WINDOWS * WINDOW
        return is_known and self._run_gains < MIN_GAIN * self._run_steps

    def drafting(self, slots: np.ndarray, generated: np.ndarray) -> np.ndarray:
        """Say which of the running rows draft now, given how many tokens they have generated."""
        num_rows = len(slots)
        if num_rows > self._max_rows or (self.clock and not self.clock.may_look(num_rows)):
            return np.zeros(num_rows, bool)
        return self._can_draft[slots] & (generated >= self._resumes[slots])

    def draft(self, context: np.ndarray, most: int) -> np.ndarray:
        """Draft the next tokens of a row, at most so many."""
        settings = self.settings
        count = min(settings.num_tokens, most)
        if count < 1:
            return context[:0]
        return draft_tokens(context, count, settings.longest, settings.shortest)

    def learn(self, slot: int, generated: int, num_accepted: int) -> None:
        """Take note of a step in which a row looked for a draft."""
        self._steps[slot] += 1
        self._gains[slot] += num_accepted
        self._run_steps += 1
        self._run_gains += num_accepted
        if self._run_steps > 2 * RUN_WINDOWS * WINDOW:
            self._run_steps, self._run_gains = self._run_steps / 2, self._run_gains / 2
        if self._steps[slot] < WINDOW:
            return
        if self._gains[slot] < MIN_GAIN * WINDOW:
            self._pauses[slot] *= 2
            self._resumes[slot] = generated + self._pauses[slot]
        self._steps[slot] = self._gains[slot] = 0
