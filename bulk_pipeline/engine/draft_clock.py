"""Whether looking for drafts pays, by the clock: some stretches of steps with it, some without.

A step that checks guesses takes longer, and while rows look for them the host cannot run a step
ahead; how much longer depends on the model, the GPU and the rows. So both are timed, all steps of a
stretch together: where rows look now and then only, what is lost lies between their steps. What
looking cost beyond the time in which plain steps would have made the same tokens is its loss, and
no more of the time may be lost than a small share.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

STRETCH = 16  # steps after which it is decided again
KNOWN = 8  # plain steps of about so many rows, before any of these look
MOST_LOST = 0.02  # share of the time, of late
FORGET = 0.98  # weight of what was before, with each stretch
TIME_PLAIN_EVERY = 64  # stretches, one is plain even where looking pays: contexts have grown
SETTLED = 2  # steps, the host a step ahead: the times of these are those of steps before
SLOW = 8  # times the median: a first step of its size, which takes long once, counts as so long


class DraftClock:
    """Times steps, and says whether rows may look for drafts in the next ones.

    Numbers of rows are told apart by powers of two: a step of many takes longer.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._then = clock()
        self._plain: dict[int, deque[float]] = {}  # seconds of plain steps
        self._may_look = True
        self._is_trial = False  # whether rows might look in the last step
        self._num_plain = 0  # steps since one that looked
        self._num_skipped = 1  # steps to come that are not timed
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # by whether rows might look
        self._made: dict[int, float] = {}  # tokens a row, where rows might look
        self._num_trials = 0  # steps in which they might, those not timed included
        self._num_stretches = 0
        self._lost = self._spent = 0.0

    def may_look(self, num_rows: int) -> bool:
        """Whether rows may look for drafts, where so many run."""
        return self._may_look and len(self._plain.get(num_rows.bit_length(), ())) >= KNOWN

    def skip(self) -> None:
        """Leave this step and the next one out: prompts were read in between."""
        self._num_skipped = SETTLED

    def took(self, num_rows: int, num_tokens: int, has_looked: bool) -> None:
        """Take note of a step that has just ended, of so many rows and tokens."""
        now = self._clock()
        seconds, self._then = now - self._then, now
        is_trial = has_looked or self.may_look(num_rows)
        if is_trial != self._is_trial:
            self._is_trial, self._num_skipped = is_trial, SETTLED
        self._num_plain = 0 if has_looked else self._num_plain + 1
        self._num_trials += is_trial
        if self._num_skipped:
            self._num_skipped -= 1
            return
        about = num_rows.bit_length()
        plain = self._plain.setdefault(about, deque(maxlen=4 * KNOWN))
        if self._num_plain > SETTLED:
            plain.append(seconds)
        if not plain:
            return  # rows ended meanwhile: plain steps of so few were never timed
        self._seconds[is_trial].append(seconds)
        if is_trial:
            self._made[about] = self._made.get(about, 0.0) + num_tokens / num_rows
        if sum(map(len, self._seconds.values())) == STRETCH:
            self._decide()

    def _decide(self) -> None:
        trials = _without_slow(self._seconds[True])
        looking = sum(trials)
        worth = sum(
            made * float(np.mean(_without_slow(self._plain[about])))
            for about, made in self._made.items()
        )
        lost = (looking - worth) * self._num_trials / max(1, len(trials))
        self._lost = max(0.0, FORGET * self._lost + lost)  # what was gained is not lost later
        self._spent = FORGET * self._spent + looking + sum(_without_slow(self._seconds[False]))
        self._num_stretches += 1
        is_timed_plain = self._num_stretches % TIME_PLAIN_EVERY == 0
        self._may_look = self._lost <= MOST_LOST * self._spent and not is_timed_plain
        self._seconds, self._made, self._num_trials = {True: [], False: []}, {}, 0


def _without_slow(seconds: Iterable[float]) -> list[float]:
    times = list(seconds)
    return np.minimum(times, SLOW * np.median(times)).tolist() if times else []
