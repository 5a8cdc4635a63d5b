"""prompts → the requests that they ask for: each with its place, its request key and its limit.

A request's number is its place in the finished completions table: row after row, sample after
sample, turn after turn, whether or not the row can run.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from bulk_pipeline.engine.request import (
    READY,
    KeyHasher,
    LoopGuard,
    SamplingParams,
    StructuredOutput,
    ThinkingBudget,
    request_seed,
)
from bulk_pipeline.storage.partition import Partition

BATCH_ROWS = 4096
KEY_BYTES = 16
UNKNOWN_ADAPTER = "unknown"
NO_ADAPTER = "none"
COUNTS = ["num_samples", "num_turns"]
COLUMNS = ["row_id", "row_index", "input_ids", "status", "sampling", *COUNTS, "later_turns"]


@dataclass(frozen=True, slots=True)
class LaterTurn:
    """What a request of a later turn has of its own; `input_ids` follow the answer before it."""

    input_ids: list[int]
    seed: int
    key: str


@dataclass(frozen=True, slots=True)
class WantedRequest:
    """One request as the prompts table asks for it, ready to run.

    `later_turns` are those of its conversation from turn 1 on. `answers_before` is the hash of
    the answers of the turns before; None for turn 0.
    """

    number: int
    row_id: str
    row_index: int
    sample_index: int
    input_ids: list[int]
    sampling: SamplingParams
    key: str
    prompt_logprobs: bool = False
    adapter: str | None = None
    turn: int = 0
    later_turns: tuple[LaterTurn, ...] = ()
    answers_before: int | None = None

    def next_turn(self, answer: Sequence[int], kept: Sequence[int]) -> "WantedRequest":
        """The next turn of the conversation.

        Parameters
        ----------
        answer
            All token ids of this turn's answer.
        kept
            The tokens with which the conversation goes on from it.
        """
        following, sampling = self.later_turns[self.turn], self.sampling
        return replace(
            self,
            number=self.number + 1,
            turn=self.turn + 1,
            input_ids=[*self.input_ids, *kept, *following.input_ids],
            sampling=sampling if sampling.is_greedy else replace(sampling, seed=following.seed),
            key=following.key,
            answers_before=answers_hash(self.answers_before, answer),
        )


def answers_hash(before: int | None, answer: Sequence[int]) -> int:
    """A 64-bit hash of the answers of a conversation; `before` is that of all but the last."""
    digest = hashlib.blake2b((before or 0).to_bytes(8, "little"), digest_size=8)
    digest.update(np.asarray(answer, "<i4").tobytes())
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a row asks for; the seed is the run's."""

    params: SamplingParams
    prompt_logprobs: bool = False
    adapter: str | None = None


class WantedRequests:
    """Every request of a partition, in order, as arrays: about 30 bytes each.

    Attributes
    ----------
    row_index, sample_index, turn, limits
        Of each request; `limits` are its max_new_tokens.
    num_turns
        Turns of the longest conversation.
    max_seq_len
        Most tokens of a prompt and its completion together, where the prompts say.
    ready
        Whether it can run; the others have no key.
    key_high
        The first half of each 128-bit request key.
    adapters
        Names of the adapters that are asked for, None where a request wants none, in the order in
        which they are first wanted.
    adapter_fingerprints
        Of those of them that were given, by name.
    adapter
        Of each request, the place in `adapters`.
    by_key, key_low
        Numbers of all requests, sorted by the second half of their keys, then rising; and these
        halves, in that order.
    """

    def __init__(
        self,
        prompts: Partition,
        model_fingerprint: str,
        adapter_fingerprints: Mapping[str, str] | None = None,
    ):
        num_requests = sum(int(_num_requests(batch).sum()) for batch in prompts.read(COUNTS))
        self.max_seq_len: int | None = prompts.complete_manifest().meta.get("max_seq_len")
        self.row_index = np.empty(num_requests, np.uint32)
        self.sample_index = np.empty(num_requests, np.uint16)
        self.turn = np.empty(num_requests, np.uint16)
        self.limits = np.zeros(num_requests, np.int32)
        self.ready = np.empty(num_requests, bool)
        self.adapters: list[str | None] = []
        self.adapter = np.zeros(num_requests, np.uint16)
        self.key_high = np.empty(num_requests, np.uint64)
        self.key_low = np.empty(num_requests, np.uint64)  # not sorted yet
        for batch in _prompt_batches(prompts, model_fingerprint, adapter_fingerprints):
            self._fill(batch)
        known = adapter_fingerprints or {}
        self.adapter_fingerprints = {name: known[name] for name in known if name in self.adapters}
        self.by_key = np.argsort(self.key_low, kind="stable").astype(np.uint32)
        self.key_low = self.key_low[self.by_key]
        self.num_turns = int(self.turn.max(initial=0)) + 1

    def __len__(self) -> int:
        return len(self.ready)

    def keep_slice(self, number: int, of: int) -> None:
        """Keep one of `of` slices, counted from 1: other requests are ready no more.

        Conversations stay together, and so do requests that begin alike with equal keys.
        """
        opening = self.key_high[np.arange(len(self)) - self.turn]
        self.ready &= opening % np.uint64(of) == number - 1

    def _fill(self, prompts: "_PromptBatch") -> None:
        here = slice(prompts.first, prompts.first + len(prompts.place))
        halves = key_halves(b"".join(prompts.digests()))
        limits = [asked.params.max_new_tokens if asked else 0 for asked in prompts.asked]
        self._fill_adapters(here, prompts)
        self.row_index[here] = prompts.batch.column("row_index").to_numpy()[prompts.place]
        self.sample_index[here] = prompts.sample_index
        self.turn[here] = prompts.turn
        self.limits[here] = np.array(limits, np.int32)[prompts.place]
        self.ready[here] = prompts.ready[prompts.place]
        self.key_high[here], self.key_low[here] = halves[:, 0], halves[:, 1]

    def _fill_adapters(self, here: slice, prompts: "_PromptBatch") -> None:
        names = [asked.adapter if asked else None for asked in prompts.asked]
        self.adapters += [name for name in dict.fromkeys(names) if name not in self.adapters]
        places = {name: place for place, name in enumerate(self.adapters)}
        self.adapter[here] = np.array([places[name] for name in names], np.uint16)[prompts.place]

    def by_adapter(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Cut numbers of requests into those of each adapter, in their order."""
        wanted = self.adapter[numbers]
        groups = (numbers[wanted == place] for place in range(len(self.adapters)))
        return [group for group in groups if len(group)]

    def count_by_adapter(self) -> dict[str, int]:
        """How many requests that can run ask for each adapter; empty where none asks for one."""
        if not any(self.adapters):
            return {}
        counts = np.bincount(self.adapter[self.ready], minlength=len(self.adapters)).tolist()
        return {name or NO_ADAPTER: n for name, n in zip(self.adapters, counts, strict=True) if n}

    def with_keys(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pair keys, [keys, 2], with the ready requests that have them.

        Returns
        -------
        places, numbers
            Of equal length: a place in `keys`, rising, and the number of a request.
        """
        low = keys[:, 1]
        first = np.searchsorted(self.key_low, low, "left")
        last = np.searchsorted(self.key_low, low, "right")
        counts = last - first
        places = np.repeat(np.arange(len(keys)), counts)
        ends = np.cumsum(counts)
        within = np.arange(len(places)) - np.repeat(ends - counts, counts)
        numbers = self.by_key[first[places] + within]
        fits = self.ready[numbers] & (self.key_high[numbers] == keys[places, 0])
        return places[fits], numbers[fits]

    def numbers_of(self, keys: Iterable[str]) -> np.ndarray:
        """Numbers of the ready requests with these keys."""
        return self.with_keys(key_halves(bytes.fromhex("".join(keys))))[1]

    def first_of_each(self, chosen: np.ndarray) -> np.ndarray:
        """Of the requests in the mask `chosen`, the first of each key and limit; rising."""
        places = chosen[self.by_key]
        numbers, low = self.by_key[places], self.key_low[places]
        repeats = np.zeros(len(numbers), bool)
        repeats[1:] = low[1:] == low[:-1]
        is_one_of_many = repeats.copy()
        is_one_of_many[:-1] |= repeats[1:]
        many = numbers[is_one_of_many]
        columns = (self.limits[many], self.key_high[many], low[is_one_of_many])
        order = np.lexsort(columns)  # stable: equal requests stay in their order
        is_first = np.ones(len(many), bool)
        is_first[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], 0)
        return np.sort(np.concatenate([numbers[~is_one_of_many], many[order][is_first]]))


def requests_at(
    prompts: Partition,
    model_fingerprint: str,
    numbers: np.ndarray,
    adapter_fingerprints: Mapping[str, str] | None = None,
) -> Iterator[WantedRequest]:
    """The ready requests of the given numbers, which must rise.

    Of a later turn, its conversation's first: what it is asked depends on answers (`next_turn`).
    """
    for batch in _prompt_batches(prompts, model_fingerprint, adapter_fingerprints):
        first, last = np.searchsorted(numbers, [batch.first, batch.first + len(batch.place)])
        if first < last:
            yield from batch.requests(numbers[first:last])


def _num_requests(prompts: pa.RecordBatch) -> np.ndarray:
    """How many requests each row is; a table of an earlier version knows of no turns."""
    return prompts.column("num_samples").to_numpy() * _num_turns(prompts)


def _num_turns(prompts: pa.RecordBatch) -> np.ndarray:
    return prompts.column("num_turns").fill_null(1).to_numpy()


def key_halves(keys: bytes) -> np.ndarray:
    """Keys of 16 bytes each as unsigned integers, [keys, 2]."""
    return np.frombuffer(keys, ">u8").reshape(-1, 2).astype(np.uint64)


def row_hashes(row_ids: pa.Array) -> np.ndarray:
    """A 64-bit hash of each row id, the same within this process."""
    series = pl.from_arrow(row_ids)
    assert isinstance(series, pl.Series)
    return series.hash().to_numpy()


class _Samplings:
    """Reads the column `sampling`; equal rows share one object, and one hasher of keys."""

    def __init__(self, model_fingerprint: str, adapter_fingerprints: Mapping[str, str]):
        self._model_fingerprint = model_fingerprint
        self._adapter_fingerprints = adapter_fingerprints
        self._asked: dict[str, _Asked] = {}
        self._hashers: dict[_Asked, KeyHasher] = {}

    def asked(self, column: pa.StructArray, ready: np.ndarray) -> list[_Asked | None]:
        """Each row's values; None where it cannot run."""
        if not len(column):
            return []
        is_same = column.equals(column.take(pa.array(np.zeros(len(column), np.int32))))
        if is_same and ready[0]:
            asked = _asked(column[0].as_py())
            return [asked if is_ready else None for is_ready in ready]
        names = [field.name for field in column.type]
        rows = zip(*(values.to_pylist() for values in column.flatten()), strict=True)
        return [self._one(names, row) if ok else None for row, ok in zip(rows, ready, strict=True)]

    def _one(self, names: list[str], row: tuple[Any, ...]) -> _Asked:
        key = repr(row)
        if (asked := self._asked.get(key)) is None:
            if len(self._asked) > BATCH_ROWS:
                self._asked.clear()
            asked = self._asked[key] = _asked(dict(zip(names, row, strict=True)))
        return asked

    def hasher(self, asked: _Asked) -> KeyHasher:
        if asked not in self._hashers:
            if len(self._hashers) > BATCH_ROWS:  # each row has settings of its own
                self._hashers.clear()
            name = asked.adapter
            self._hashers[asked] = KeyHasher(
                asked.params,
                self._model_fingerprint,
                prompt_logprobs=asked.prompt_logprobs,
                # of one that is not on this machine nothing is stored that could match
                adapter_fingerprint=name and self._adapter_fingerprints.get(name, UNKNOWN_ADAPTER),
            )
        return self._hashers[asked]


def _asked(row: dict[str, Any]) -> _Asked:
    # a table of an earlier version lacks settings that came later: they are off
    values = {name: value for name, value in row.items() if value is not None}
    if "logit_bias" in values:
        values["logit_bias"] = [(entry["token_id"], entry["bias"]) for entry in row["logit_bias"]]
    if "structured" in values:
        values["structured"] = StructuredOutput(**values["structured"])
    if "loop_guard" in values:
        values["loop_guard"] = LoopGuard(**values["loop_guard"])
    if "thinking" in values:
        values["thinking"] = ThinkingBudget(**values["thinking"])
    prompt_logprobs = values.pop("prompt_logprobs", False)
    adapter = values.pop("adapter", None)
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return _Asked(SamplingParams(**values | lists), prompt_logprobs, adapter)


class _PromptBatch:
    """A batch of prompts, and which of its rows each of its requests belongs to.

    Attributes
    ----------
    first
        Number of the first request.
    place, sample_index, turn
        Each request's row in the batch, which of the row's samples and which of its turns it is.
    """

    def __init__(self, batch: pa.RecordBatch, first: int, samplings: _Samplings):
        self.batch, self.first, self._samplings = batch, first, samplings
        self.ready = np.array(
            [status == READY for status in batch.column("status").to_pylist()], bool
        )
        self.asked = samplings.asked(batch.column("sampling"), self.ready)
        requests, turns = _num_requests(batch), _num_turns(batch)
        self.place = np.repeat(np.arange(batch.num_rows), requests)
        within = np.arange(len(self.place)) - np.repeat(np.cumsum(requests) - requests, requests)
        self.sample_index, self.turn = np.divmod(within, turns[self.place])
        later = batch.column("later_turns")
        self._later = None if later.null_count == len(later) else later
        ids = batch.column("input_ids")
        self._values = ids.values.to_numpy().astype("<i4", copy=False)
        self._bounds = ids.offsets.to_pylist()
        sampled = any(asked is not None and not asked.params.is_greedy for asked in self.asked)
        self._row_ids: Sequence[str] = batch.column("row_id").to_pylist() if sampled else []

    def digests(self) -> Iterator[bytes]:
        """Each request's key; zeros where it cannot run."""
        if self._later is not None:
            yield from self._digests_of_turns()
            return
        data = memoryview(self._values).cast("B") if len(self._values) else memoryview(b"")
        hashers = [self._samplings.hasher(asked) if asked else None for asked in self.asked]
        bounds = self._bounds
        for row, sample in zip(self.place.tolist(), self.sample_index.tolist(), strict=True):
            hasher = hashers[row]
            if hasher is None:
                yield bytes(KEY_BYTES)
            else:
                ids = data[4 * bounds[row] : 4 * bounds[row + 1]]
                yield hasher.digest(ids, self._seed(row, sample))

    def _digests_of_turns(self) -> Iterator[bytes]:
        places = zip(
            self.place.tolist(), self.sample_index.tolist(), self.turn.tolist(), strict=True
        )
        for row, sample, turn in places:
            if turn == 0:
                digests = [bytes.fromhex(turn.key) for turn in self._turns(row, sample)]
            yield digests[turn] if digests else bytes(KEY_BYTES)

    def _turns(self, row: int, sample: int) -> list[LaterTurn]:
        """All turns of a conversation; none where it cannot run."""
        asked = self.asked[row]
        if asked is None:
            return []
        hasher, turns, before = self._samplings.hasher(asked), [], None
        for turn, ids in enumerate([self._ids(row), *self._later_ids(row)]):
            seed = self._seed(row, sample, turn)
            before = hasher.digest(ids.tobytes(), seed, before)
            turns.append(LaterTurn(ids.tolist(), seed, before.hex()))
        return turns

    def _ids(self, row: int) -> np.ndarray:
        return self._values[self._bounds[row] : self._bounds[row + 1]]

    def _later_ids(self, row: int) -> list[np.ndarray]:
        later = None if self._later is None else self._later[row].as_py()
        return [np.array(turn["input_ids"], "<i4") for turn in later or ()]

    def requests(self, numbers: np.ndarray) -> Iterator[WantedRequest]:
        """The requests of these numbers; of a later turn, its conversation's first."""
        row_ids = self.batch.column("row_id").to_pylist()
        row_indices = self.batch.column("row_index").to_pylist()
        for number in numbers.tolist():
            row = int(self.place[number - self.first])
            sample = int(self.sample_index[number - self.first])
            asked = self.asked[row]
            assert asked is not None, number
            params = asked.params
            first, *later = self._turns(row, sample)
            yield WantedRequest(
                number - int(self.turn[number - self.first]),
                row_ids[row],
                row_indices[row],
                sample,
                first.input_ids,
                params if params.is_greedy else replace(params, seed=first.seed),
                first.key,
                asked.prompt_logprobs,
                adapter=asked.adapter,
                later_turns=tuple(later),
            )

    def _seed(self, row: int, sample: int, turn: int = 0) -> int:
        asked = self.asked[row]
        if asked is None or asked.params.is_greedy:
            return 0
        return request_seed(asked.params.seed, self._row_ids[row], sample, turn)


def _prompt_batches(
    prompts: Partition, model_fingerprint: str, adapter_fingerprints: Mapping[str, str] | None
) -> Iterator[_PromptBatch]:
    samplings, first = _Samplings(model_fingerprint, adapter_fingerprints or {}), 0
    for batch in prompts.read(COLUMNS, BATCH_ROWS):
        prompt_batch = _PromptBatch(batch, first, samplings)
        yield prompt_batch
        first += len(prompt_batch.place)
