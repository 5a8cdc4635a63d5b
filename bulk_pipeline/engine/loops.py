"""Answers that repeat themselves."""

from collections.abc import Sequence

import numpy as np

from bulk_pipeline.engine.request import LoopGuard


class LoopSlots:
    """Finds rows in generation that repeat their last tokens, by slot.

    A row repeats itself when enough tokens in a row equal the one `ngram` places before; how many
    did so far is all there is to keep.
    """

    def __init__(self, num_slots: int) -> None:
        self._ngrams = np.zeros(num_slots, np.int64)  # 0: not looked at
        self._limits = np.zeros(num_slots, np.int64)
        self._runs = np.zeros(num_slots, np.int64)

    def enter(self, slot: int, guard: LoopGuard | None, token_ids: Sequence[int]) -> None:
        """Let a row enter a slot; `token_ids` are what it generated before it left one."""
        self._ngrams[slot] = self._runs[slot] = 0
        if guard is not None:
            self._ngrams[slot] = guard.ngram
            self._limits[slot] = guard.ngram * (guard.repeats - 1)
            ids = np.asarray(token_ids, np.int64)
            different = np.nonzero(ids[guard.ngram :] != ids[: -guard.ngram])[0]
            last = int(different[-1]) + 1 if len(different) else 0
            self._runs[slot] = max(len(ids) - guard.ngram, 0) - last

    def loops(self, slots: np.ndarray, tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Take a token of each of `slots`; say which rows repeat themselves now.

        Parameters
        ----------
        tokens
            [all slots, tokens]: what they generated.
        places
            Where in `tokens` the new tokens stand.
        """
        found = np.zeros(len(slots), bool)
        [looked] = np.nonzero(self._ngrams[slots])
        if len(looked):
            slots, places = slots[looked], places[looked]
            before = places - self._ngrams[slots]
            is_equal = (before >= 0) & (tokens[slots, before] == tokens[slots, places])
            self._runs[slots] = np.where(is_equal, self._runs[slots] + 1, 0)
            found[looked] = self._runs[slots] >= self._limits[slots]
        return found
