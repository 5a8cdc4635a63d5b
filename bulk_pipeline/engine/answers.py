"""The answers of the rows in generation, by slot: how their next tokens are drawn, what ends them.

The tokens of all rows stand in one array, so that a step's are added at once. What few rows ask
for is looked at for those rows alone.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from bulk_pipeline.engine.bans import BanSlots, RowBans
from bulk_pipeline.engine.logprobs import LogprobSlots, StepLogprobs
from bulk_pipeline.engine.loops import LoopSlots
from bulk_pipeline.engine.rows import NO_TOKEN, Row
from bulk_pipeline.engine.sampler import Sampler
from bulk_pipeline.engine.sampling_slots import download
from bulk_pipeline.engine.slots import Slots
from bulk_pipeline.engine.structured import GrammarSlots


class Answers:
    """Draws the tokens of the rows in `slots`, and takes them.

    Attributes
    ----------
    generated
        By slot: tokens that were drawn and taken.
    limits
        By slot: the most of them.
    """

    def __init__(self, slots: Slots, vocab_size: int, device: torch.device) -> None:
        self._slots = slots
        self._sampler = Sampler(slots.size, vocab_size, device)
        self._logprobs = LogprobSlots(slots.size)
        self._grammars = GrammarSlots(slots.size, device)
        self._loops = LoopSlots(slots.size)
        self._bans = BanSlots(slots.size, vocab_size, device)
        self.generated = np.zeros(slots.size, np.int64)
        self.limits = np.zeros(slots.size, np.int64)
        self._tokens = np.zeros((slots.size, 256), np.int64)
        self._ends = np.full((slots.size, 1), -1, np.int64)
        self._looks_for_text = np.zeros(slots.size, bool)
        self.clear()

    def clear(self) -> None:
        """Forget which rows lost tokens; slots are written when rows enter them."""
        self._shortened: set[int] = set()

    def enter(self, row: Row) -> None:
        """Let a row enter its slot, with the tokens that it has."""
        slot, params, done = row.slot, row.request.sampling, len(row.token_ids)
        self.generated[slot] = done
        self.limits[slot] = params.max_new_tokens
        self._widen(params.max_new_tokens, len(params.stop_token_ids))
        self._tokens[slot, :done] = row.token_ids
        self._ends[slot] = -1
        self._ends[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self._looks_for_text[slot] = row.stop_finder is not None
        self._logprobs.enter(slot, params.logprobs)
        self._grammars.enter(slot, row.grammar)
        self._bans.enter(slot, row.bans)
        self.count_tokens(row)

    def take_shortened(self) -> list[Row]:
        """Return the rows that lost their last tokens since this was asked last, by slot."""
        rows = [self._slots.row(slot) for slot in sorted(self._shortened)]
        self._shortened.clear()
        return rows

    def leave(self, slot: int) -> np.ndarray:
        """Let a row leave its slot; return its tokens."""
        self._shortened.discard(slot)
        return self._tokens[slot, : self.generated[slot]].copy()

    def text(self, slot: int) -> np.ndarray:
        """Return a row's prompt and all tokens that it has."""
        row = self._slots.row(slot)
        prompt = row.context[: len(row.request.input_ids)]
        return np.concatenate([prompt, self._tokens[slot, : self.generated[slot]]])

    def last_ids(self, slots: np.ndarray) -> np.ndarray:
        """Return the last token that each row has so far, of its answer or its prompt."""
        generated = self.generated[slots]
        last = self._tokens[slots, generated - 1]
        for place in np.nonzero(generated == 0)[0]:
            last[place] = self._slots.row(slots[place]).request.input_ids[-1]
        return last

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        index: torch.Tensor,
        places: np.ndarray,
        positions: torch.Tensor,
        take_earlier: Callable[[], None],
    ) -> tuple[torch.Tensor, torch.Tensor, StepLogprobs | None]:
        """Draw a token for each line of logits, which belong to these slots.

        Parameters
        ----------
        index, positions
            `slots` and `places`, the tokens' places in the answers, on the device.
        take_earlier
            Called where the tokens of all earlier steps must have been taken first.

        Returns
        -------
        The tokens, the same on their way to the host with NO_TOKEN where logits are not numbers,
        and what log-probabilities are asked for.
        """
        # one column is enough: what is not a number spreads to all logits of a row
        is_broken = logits[:, 0].isnan()
        logprobs = self._logprobs.begin(logits, slots)
        if self._grammars.is_any(slots) or self._bans.needs_tokens(slots, places):
            # a mask needs the tokens before it; the device is busy with the pass meanwhile
            take_earlier()
        if self._grammars.is_any(slots):
            logits = self._grammars.mask(logits, slots)
        logits = self._bans.edit(logits, slots, places)
        ids = self._sampler.sample(logits, slots, index, positions)
        if logprobs is not None:
            logprobs.choose(logits, ids)
        return ids, download(ids.masked_fill(is_broken, NO_TOKEN)), logprobs

    def take(self, slots: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Add a token to each of these rows; return the slots of those that end."""
        places = self.generated[slots]
        self._tokens[slots, places] = ids
        self.generated[slots] = places + 1
        if not places.all():
            now = time.monotonic()
            for slot in slots[places == 0]:
                self._slots.row(slot).first_token = now
        ended = (self._ends[slots] == ids[:, None]).any(axis=1)
        stays, gave_up = self._heed_bans(slots, ids, ended)
        slots, ids, places, ended = slots[stays], ids[stays], places[stays], ended[stays]
        self._find_text(slots, ids, ended)
        for place in np.nonzero(self._grammars.advance(slots, ids, ended))[0]:
            row = self._slots.row(slots[place])
            assert row.grammar is not None
            row.error = row.error or row.grammar.error
            row.completed_grammar = ended[place] = True
        looping = self._loops.loops(slots, self._tokens, places) & ~ended
        for slot in slots[looping]:
            self._slots.row(slot).found_loop = True
        ended |= looping
        ended |= self.generated[slots] >= self.limits[slots]
        return np.concatenate([gave_up, slots[ended]]) if gave_up else slots[ended]

    def keep_logprobs(self, logprobs: StepLogprobs, slots: np.ndarray) -> None:
        """Give the log-probabilities of a step to its rows; a slot of -1 has none."""
        for place, chosen, best in logprobs.read():
            if slots[place] >= 0:
                row = self._slots.row(slots[place])
                row.logprobs.append(chosen)
                row.top_logprobs.append(best)

    def _find_text(self, slots: np.ndarray, ids: np.ndarray, ended: np.ndarray) -> None:
        """Look for stop strings, and set `ended` where one stands now."""
        looking = self._looks_for_text[slots] & ~ended
        for place in np.nonzero(looking)[0]:
            row = self._slots.row(slots[place])
            assert row.stop_finder is not None
            if row.stop_finder.ends_with_stop(int(ids[place])):
                row.found_stop_string = ended[place] = True

    def _heed_bans(
        self, slots: np.ndarray, ids: np.ndarray, ended: np.ndarray
    ) -> tuple[np.ndarray, list[int]]:
        """Let rows with bans take their tokens, and set `ended`.

        Returns
        -------
        Which rows keep their tokens, and the slots of those others that give up.
        """
        stays, gave_up = np.ones(len(slots), bool), []
        for place in self._bans.advance(slots, ids, ended):
            slot = int(slots[place])
            row = self._slots.row(slot)
            assert row.bans is not None
            row.error = row.error or row.bans.error
            if row.bans.goes_back_to is None:
                ended[place] = True
                continue
            stays[place] = False
            self._drop_tokens(row, row.bans)
            if row.bans.gave_up:
                gave_up.append(slot)
            else:
                self._shortened.add(slot)
        return stays, gave_up

    def _drop_tokens(self, row: Row, bans: RowBans) -> None:
        """Take a row's last tokens away, and those on their way."""
        bans.go_back()
        kept = len(bans.ids)
        self.generated[row.slot] = kept
        del row.logprobs[kept:], row.top_logprobs[kept:]
        self._slots.renew(row.slot)

    def count_tokens(self, row: Row) -> None:
        """Let the sampler and the search for loops know the tokens that a row has now."""
        slot, params = row.slot, row.request.sampling
        generated = self._tokens[slot, : self.generated[slot]].tolist()
        self._sampler.add(slot, params, row.request.input_ids, generated)
        self._loops.enter(slot, params.loop_guard, generated)

    def _widen(self, max_new_tokens: int, num_ends: int) -> None:
        """Make the arrays of tokens and end tokens hold that many."""
        if max_new_tokens > self._tokens.shape[1]:
            width = max(max_new_tokens, 2 * self._tokens.shape[1]) - self._tokens.shape[1]
            self._tokens = np.pad(self._tokens, ((0, 0), (0, width)))
        if num_ends > self._ends.shape[1]:
            width = num_ends - self._ends.shape[1]
            self._ends = np.pad(self._ends, ((0, 0), (0, width)), constant_values=-1)
