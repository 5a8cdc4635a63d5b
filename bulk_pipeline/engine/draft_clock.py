"""Whether looking for drafts pays, by the clock: some steps with it, some without, in turn.

A step that checks guesses takes longer, and while rows look for them the host cannot run a step
ahead; how much longer depends on the model, the GPU and the rows. So both are timed. What looking
cost beyond the time in which plain steps would have made the same tokens is its loss, and no more
of the time may be lost than a small share.
"""

import time
from collections import deque
from collections.abc import Callable

import numpy as np

STRETCH = 16  # steps after which it is decided again
KNOWN = 8  # plain steps of about so many rows, before any of these look
MOST_LOST = 0.02  # share of the time, of late
FORGET = 0.99  # weight of what was before, with each stretch
TIME_PLAIN_EVERY = 64  # stretches, one is plain even where looking pays: contexts have grown


class DraftClock:
    """Times steps, and says whether rows may look for drafts in the next ones.

    Numbers of rows are told apart by powers of two: a step of many takes longer.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._then = clock()
        self._plain: dict[int, deque[float]] = {}  # seconds of plain steps
        self._may_look = True
        self._has_looked = False
        self._num_skipped = 1  # steps to come that are not timed
        self._seconds: list[float] = []  # of the stretch's steps that looked
        self._worth = 0.0  # seconds that plain steps would have taken for their tokens
        self._num_steps = self._num_stretches = 0
        self._lost = self._spent = 0.0

    def may_look(self, num_rows: int) -> bool:
        """Whether rows may look for drafts, where so many run."""
        return self._may_look and len(self._plain.get(num_rows.bit_length(), ())) >= KNOWN

    def skip(self) -> None:
        """Leave this step and the next one out: prompts were read in between."""
        self._num_skipped = 2

    def took(self, num_rows: int, num_tokens: int, has_looked: bool) -> None:
        """Take note of a step that has just ended, of so many rows and tokens."""
        now = self._clock()
        seconds, self._then = now - self._then, now
        if has_looked != self._has_looked:  # the step before may be in its time
            self._has_looked, self._num_skipped = has_looked, max(1, self._num_skipped)
        if self._num_skipped:
            self._num_skipped -= 1
            return
        plain = self._plain.setdefault(num_rows.bit_length(), deque(maxlen=2 * KNOWN))
        if has_looked and not plain:
            return  # rows ended meanwhile: plain steps of so few were never timed
        if has_looked:
            self._seconds.append(seconds)
            self._worth += float(np.median(plain)) * num_tokens / num_rows
        else:
            plain.append(seconds)
        self._spent += seconds
        self._num_steps += 1
        if self._num_steps == STRETCH:
            self._decide()

    def _decide(self) -> None:
        if self._seconds:  # the median: a first step of its size takes long, once
            self._lost += len(self._seconds) * float(np.median(self._seconds)) - self._worth
        allowed = MOST_LOST * self._spent
        self._lost = max(self._lost, -allowed)  # what was gained is not lost for long
        self._num_stretches += 1
        is_timed_plain = self._num_stretches % TIME_PLAIN_EVERY == 0
        self._may_look = self._lost <= allowed and not is_timed_plain
        self._lost, self._spent = FORGET * self._lost, FORGET * self._spent
        self._seconds, self._worth, self._num_steps = [], 0.0, 0
