"""What the sampler holds of each row in generation, by slot: its settings and its token counts.

A slot is the place that a row keeps for its life. Settings are arrays on the host, so that those
of any rows are gathered at once; counts are on the device.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from bulk_pipeline.engine.request import SamplingParams

# columns of SettingsTable: integers, then floats
SEED, TOP_K, MIN_NEW, ENDS, BIASES = range(5)
TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE = range(5, 11)
NUM_COLUMNS = 11
MAX_COUNT = 2**14 - 1  # how often a token of the output is counted


class SettingsTable:
    """Settings of the rows in generation, by slot, on the host.

    Attributes
    ----------
    integers, floats
        [columns, slots], two views of the same memory; a column is one of either kind.
    ends, biases
        What the columns ENDS and BIASES count places in.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.integers = np.zeros((NUM_COLUMNS, num_slots), np.int64)
        self.floats = self.integers.view(np.float64)
        self.ends, self.biases = SharedLists(num_slots), SharedLists(num_slots)
        self.vocab_size = vocab_size

    def set(self, slot: int, params: SamplingParams) -> None:
        """Give a slot the settings of a row."""
        integers, floats, off = self.integers, self.floats, params.is_greedy
        ends = [(i, -math.inf) for i in params.stop_token_ids if 0 <= i < self.vocab_size]
        has_top_k = not off and 0 < params.top_k < self.vocab_size
        integers[SEED, slot] = to_int64(params.seed)
        integers[TOP_K, slot] = params.top_k if has_top_k else self.vocab_size
        integers[MIN_NEW, slot] = params.min_new_tokens if ends else 0
        integers[ENDS, slot] = self.ends.set(slot, tuple(ends) if params.min_new_tokens else ())
        integers[BIASES, slot] = self.biases.set(slot, params.token_biases)
        floats[REPETITION, slot] = params.repetition_penalty
        floats[FREQUENCY, slot] = params.frequency_penalty
        floats[PRESENCE, slot] = params.presence_penalty
        floats[TEMPERATURE, slot] = 0.0 if off else params.temperature
        floats[TOP_P, slot] = 1.0 if off else params.top_p
        floats[LOG_MIN_P, slot] = -math.inf if off or not params.min_p else math.log(params.min_p)

    def is_penalised(self, slots: np.ndarray) -> np.ndarray:
        """Say of each slot whether the tokens so far change its logits."""
        repetition = self.floats[REPETITION, slots]
        return (repetition != 1) | self.floats[FREQUENCY : PRESENCE + 1, slots].any(axis=0)


class SharedLists:
    """Lists of (token id, number), one a slot, of which equal ones are kept once.

    Attributes
    ----------
    ids, numbers
        [places, width]: the lists, one a place, padded with repetitions of their first id, with
        0 as their number; the empty list is id 0 with number 0.
    version
        Rises with every change of the two.
    """

    def __init__(self, num_slots: int) -> None:
        self.ids = np.zeros((1, 1), np.int64)
        self.numbers = np.zeros((1, 1), np.float32)
        self._place_of: dict[tuple[tuple[int, float], ...], int] = {(): 0}
        self._items: list[tuple[tuple[int, float], ...]] = [()]
        self._uses = [num_slots]
        self.version = 0
        self._free: list[int] = []
        self._place_by_slot = [0] * num_slots

    def set(self, slot: int, items: tuple[tuple[int, float], ...]) -> int:
        """Give a slot its list in place of its last one; return the list's place."""
        place = self._place_of.get(items)
        if place is None:
            place = self._place_of[items] = self._new_place(items)
        self._uses[place] += 1
        self._drop(self._place_by_slot[slot])
        self._place_by_slot[slot] = place
        return place

    def _new_place(self, items: tuple[tuple[int, float], ...]) -> int:
        if not self._free:
            self._free.append(len(self._items))
            self._items.append(())
            self._uses.append(0)
        place = self._free.pop()
        self.version += 1
        self._items[place] = items
        rows, width = self.ids.shape
        if place >= rows or len(items) > width:
            more = ((0, rows if place >= rows else 0), (0, max(0, len(items) - width)))
            self.ids, self.numbers = np.pad(self.ids, more, "edge"), np.pad(self.numbers, more)
        self.ids[place] = items[0][0]
        self.numbers[place] = 0
        self.ids[place, : len(items)] = [token for token, _ in items]
        self.numbers[place, : len(items)] = [number for _, number in items]
        return place

    def _drop(self, place: int) -> None:
        self._uses[place] -= 1
        if place and not self._uses[place]:  # the empty list stays
            del self._place_of[self._items[place]]
            self._items[place] = ()
            self._free.append(place)


class TokenCounts:
    """How often each token came so far in the rows with penalties, by slot, on the device.

    Attributes
    ----------
    counts
        int16 [slots, vocabulary]: twice the number of times in the output, up to `MAX_COUNT`,
        and 1 more where the token is in the prompt. Made when the first such row enters.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int16, device=device)
        self._num_slots = num_slots
        self._entered: dict[int, tuple[Sequence[int], Sequence[int]]] = {}

    def enter(self, slot: int, prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> None:
        """Note a row that enters a slot; `flush` counts its tokens."""
        self._entered[slot] = (prompt_ids, generated_ids)

    def flush(self) -> None:
        """Start the counts of the rows that entered."""
        if not self._entered:
            return
        device, vocab_size = self.counts.device, self.counts.shape[1]
        if not len(self.counts):
            self.counts = torch.zeros(
                (self._num_slots, vocab_size), dtype=torch.int16, device=device
            )
        places, values = [], []
        for slot, (prompt_ids, generated_ids) in self._entered.items():
            tokens, counts = _count(prompt_ids, generated_ids)
            places.append(slot * vocab_size + tokens)
            values.append(counts)
        self.counts.index_fill_(0, upload(np.array(list(self._entered)), device), 0)
        self.counts.view(-1).scatter_(
            0, upload(np.concatenate(places), device), upload(np.concatenate(values), device)
        )
        self._entered.clear()

    def add(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """Count one more token in each of these slots."""
        places = slots * self.counts.shape[1] + ids
        before = self.counts.view(-1)[places]
        self.counts.view(-1)[places] = torch.where(before < 2 * MAX_COUNT, before + 2, before)


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to a device without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


def download(values: torch.Tensor) -> torch.Tensor:
    """Copy to the host without waiting: there once an event recorded after this has come."""
    if not values.is_cuda:
        return values
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return on_host.copy_(values, non_blocking=True)


def to_int64(value: int) -> int:
    """The signed integer with the bits of an unsigned 64-bit one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _count(
    prompt_ids: Sequence[int], generated_ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return each token of a row and its entry in `TokenCounts`."""
    output, times = np.unique(np.asarray(generated_ids, np.int64), return_counts=True)
    prompt = np.unique(np.asarray(prompt_ids, np.int64))
    tokens, where = np.unique(np.concatenate([prompt, output]), return_inverse=True)
    counts = np.zeros(len(tokens), np.int16)
    counts[where[: len(prompt)]] = 1
    counts[where[len(prompt) :]] += (2 * times.clip(max=MAX_COUNT)).astype(np.int16)
    return tokens, counts
