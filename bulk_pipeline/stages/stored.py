"""Stored completions: which of them answer which request, and those of other partitions."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from bulk_pipeline.engine.request import Status, serves
from bulk_pipeline.stages.wanted import WantedRequests, key_halves, row_hashes
from bulk_pipeline.store import (
    COMPLETIONS,
    COMPLETIONS_SCHEMA,
    Part,
    Partition,
    PartitionWriter,
    Store,
)

MAX_ATTEMPTS = 3  # an error is unfinished work until it has failed this often
READ_ROWS = 8192
ALL = "all"
ANSWERS = frozenset({Status.STOP, Status.LOOP, Status.LENGTH})

# What is stored for a request, a bit each.
ANSWERED = 1
FAILED = 2  # an error
TO_REDO = 4  # something that is to be made anew
OTHER_LIMIT = 8  # an answer that does not serve its max_new_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Redo:
    """Stored completions that count no longer: those of `statuses` ("all": any) in `parts`."""

    statuses: tuple[str, ...]
    parts: frozenset[str]

    def covers(self, part: str, status: str) -> bool:
        """Whether a completion is to be made anew."""
        return part in self.parts and (ALL in self.statuses or status in self.statuses)


def begin_redo(writer: PartitionWriter, redo: str | Collection[str]) -> tuple[Redo | None, bool]:
    """What is to be made anew, and whether that begins now.

    It is written down in the manifest until the partition is complete, so that a redo that was
    interrupted goes on where it was; asking for the same again continues it, and so does asking
    for nothing. Asking for something else replaces it.

    Raises
    ------
    ValueError
        If `redo` is not ``none``, ``all`` or statuses.
    """
    asked = tuple(sorted({redo} if isinstance(redo, str) else set(redo)))
    statuses = sorted(str(status) for status in Status)
    if unknown := set(asked) - {"none", ALL, *statuses}:
        raise ValueError(
            f"redo must be none, all or statuses out of {', '.join(statuses)}, "
            f"got {', '.join(sorted(unknown))}"
        )
    pending = writer.manifest.meta.get("redo")
    if asked in ((), ("none",)) or (pending and tuple(pending["statuses"]) == asked):
        if pending is None:
            return None, False
        return Redo(tuple(pending["statuses"]), frozenset(pending["parts"])), False
    parts = [part.name for part in writer.manifest.stored]
    meta = writer.manifest.meta | {"redo": {"statuses": list(asked), "parts": parts}}
    writer.commit(writer.manifest.parts, complete=False, meta=meta)
    return Redo(asked, frozenset(parts)), True


class StoredAnswers:
    """What the stored completions are to the requests: for each its place, or none.

    A completion answers a request of equal key if it stopped by itself within the request's
    limit, or was cut off at the same limit; the last one stored counts. An error never stands
    before an answer.

    Attributes
    ----------
    part, offset
        Where the completion of each request is stored: the part's number in its manifest and
        the row in it; -1 where there is none.
    found
        Bits that say what is stored: `ANSWERED`, `FAILED`, `TO_REDO`, `OTHER_LIMIT`.
    attempts
        How often a request that failed was tried.
    """

    def __init__(self, wanted: WantedRequests):
        self._wanted = wanted
        self.part = np.full(len(wanted), -1, np.int32)
        self.offset = np.zeros(len(wanted), np.uint32)
        self.found = np.zeros(len(wanted), np.uint8)
        self.attempts = np.zeros(len(wanted), np.uint8)

    def missing(self) -> np.ndarray:
        """Mask of the ready requests that have to run."""
        given_up = (self.found & FAILED != 0) & (self.attempts >= MAX_ATTEMPTS)
        return self._wanted.ready & (self.found & ANSWERED == 0) & ~given_up

    def has_all(self) -> bool:
        """Whether each ready request has an answer or an error."""
        return bool(np.all(self.found[self._wanted.ready] & (ANSWERED | FAILED)))

    def look_into(
        self, partition: Partition, parts: Sequence[Part], redo: Redo | None = None
    ) -> None:
        """Look through the parts; holds a batch of their rows at a time."""
        columns = ["request_key", "status", "completion_tokens", "max_new_tokens", "attempts"]
        for number, part in enumerate(parts):
            offset = 0
            for batch in partition.read_part(part, columns, READ_ROWS):
                self._add(batch, number, offset, part.name, redo)
                offset += batch.num_rows

    def _add(
        self, batch: pa.RecordBatch, part: int, offset: int, name: str, redo: Redo | None
    ) -> None:
        has_run = batch.column("request_key").is_valid()
        offsets = np.flatnonzero(has_run.to_numpy(zero_copy_only=False)) + offset
        run = batch.filter(has_run)
        places, numbers, serving = _pair(run, self._wanted)
        if not len(places):
            return
        statuses = run.column("status").to_pylist()
        is_answer: np.ndarray = np.array([status in ANSWERS for status in statuses], bool)[places]
        to_redo: np.ndarray = np.array(
            [redo is not None and redo.covers(name, status) for status in statuses], bool
        )[places]
        failed = ~(is_answer | to_redo) & (self.found[numbers] & ANSWERED == 0)
        attempts = np.minimum(run.column("attempts").to_numpy()[places], 255)
        self.found[numbers[to_redo]] |= TO_REDO
        self.found[numbers[is_answer & ~serving & ~to_redo]] |= OTHER_LIMIT
        self.attempts[numbers[failed]] = attempts[failed]
        for is_kind, bit in ((failed, FAILED), (serving & ~to_redo, ANSWERED)):
            self.found[numbers[is_kind]] |= bit
            self.part[numbers[is_kind]] = part
            self.offset[numbers[is_kind]] = offsets[places[is_kind]]


def _pair(run: pa.RecordBatch, wanted: WantedRequests) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pair stored completions with requests: places, numbers, and which of the pairs serve."""
    keys = key_halves(bytes.fromhex("".join(run.column("request_key").to_pylist())))
    places, numbers = wanted.with_keys(keys)
    stored = run.select(["status", "completion_tokens", "max_new_tokens"]).take(places)
    limits = wanted.limits[numbers].tolist()
    answers = zip(*(column.to_pylist() for column in stored.columns), limits, strict=True)
    return places, numbers, np.array([serves(*answer) for answer in answers], bool)


def keep_unwanted(writer: PartitionWriter, wanted: WantedRequests) -> list[Part]:
    """Write the stored answers that serve none of the requests into a part, if there are any."""
    with writer.new_part(COMPLETIONS_SCHEMA) as kept:
        for part in writer.manifest.stored:
            for batch in writer.partition.read_part(part, batch_size=READ_ROWS):
                statuses = batch.column("status").to_pylist()
                answers = batch.filter(pa.array([status in ANSWERS for status in statuses]))
                places, _, serving = _pair(answers, wanted)
                is_wanted = np.zeros(answers.num_rows, bool)
                is_wanted[places[serving]] = True
                kept.write(answers.filter(pa.array(~is_wanted)))
    if kept.part.rows:
        return [kept.part]
    writer.discard([kept.part])
    return []


def reasons(
    leaders: np.ndarray,
    answers: StoredAnswers,
    has_row: Callable[[np.ndarray], np.ndarray],
    made_with: dict[str, Any],
    now: dict[str, Any],
) -> dict[str, int]:
    """Why requests run, as far as it can be known without reading the old prompts.

    ``redo``, ``error_retried``, ``limit_changed`` (the same request with a max_new_tokens that
    the stored answer does not serve); for a row id that has answers to another request,
    ``model_changed`` or else ``sampling_changed`` where these differ from the last complete
    state, whether or not the prompt changed with them, or else ``prompt_changed``; ``changed``
    where there was no complete state; ``new`` for a row id without answers.

    Parameters
    ----------
    has_row
        Says of numbers of requests which of their row ids have answers.
    """
    if not made_with:
        changed = "changed"
    elif made_with.get("model") != now["model"]:
        changed = "model_changed"
    elif made_with.get("sampling") != now["sampling"]:
        changed = "sampling_changed"
    else:
        changed = "prompt_changed"
    counts: Counter[str] = Counter()
    rest = leaders
    for bit, reason in (
        (TO_REDO, "redo"),
        (OTHER_LIMIT, "limit_changed"),
        (FAILED, "error_retried"),
    ):
        is_so = answers.found[rest] & bit != 0
        counts[reason] = int(is_so.sum())
        rest = rest[~is_so]
    counts[changed] = int(has_row(rest).sum())
    counts["new"] = len(rest) - counts[changed]
    return {reason: count for reason, count in sorted(counts.items()) if count}


def rows_with_answers(
    prompts: Partition, partition: Partition, parts: Sequence[Part], row_indices: np.ndarray
) -> np.ndarray:
    """Which of the prompts at `row_indices`, which must not fall, have a completion that ran."""
    hashes = [np.zeros(0, np.uint64)]
    first = 0
    for batch in prompts.read(["row_id"], READ_ROWS) if len(row_indices) and parts else ():
        low, high = np.searchsorted(row_indices, [first, first + batch.num_rows])
        hashes.append(row_hashes(batch.column("row_id"))[row_indices[low:high] - first])
        first += batch.num_rows
    known, places = np.unique(np.concatenate(hashes), return_inverse=True)
    if not len(known):
        return np.zeros(len(row_indices), bool)
    has_answer = np.zeros(len(known), bool)
    for part in parts:
        for batch in partition.read_part(part, ["row_id", "request_key"], READ_ROWS):
            run = batch.filter(batch.column("request_key").is_valid())
            stored = row_hashes(run.column("row_id"))
            found = np.minimum(np.searchsorted(known, stored), len(known) - 1)
            has_answer[found[known[found] == stored]] = True
    return has_answer[places]


def copy_from_others(
    store: Store, writer: PartitionWriter, wanted: WantedRequests, missing: np.ndarray
) -> int:
    """Copy answers to the requests in the mask `missing` out of the dataset's other partitions.

    Also out of those that the partitioning no longer has. Holds a batch of rows at a time.
    """
    own, num_copied, missing = writer.partition.key, 0, missing.copy()
    for key in store.partition_keys(COMPLETIONS):
        if key == own or not missing.any():
            continue
        try:
            other = store.partition(COMPLETIONS, key)
            manifest = other.manifest()
            for part in manifest.stored if manifest else []:
                answers = StoredAnswers(wanted)
                answers.look_into(other, [part])
                found = missing & (answers.found & ANSWERED != 0)
                if found.any():
                    _copy(other, part, writer, np.unique(answers.offset[found]))
                    missing &= ~found
                    num_copied += int(found.sum())
        except (ValueError, FileNotFoundError) as error:  # it is being written, or is damaged
            log.warning("answers of partition %s are not looked at: %s", key, error)
    return num_copied


def _copy(other: Partition, part: Part, writer: PartitionWriter, offsets: np.ndarray) -> None:
    offset = 0
    with writer.new_part(COMPLETIONS_SCHEMA) as copy:
        for batch in other.read_part(part, batch_size=READ_ROWS):
            first, last = np.searchsorted(offsets, [offset, offset + batch.num_rows])
            copy.write(batch.take(pa.array(offsets[first:last].astype(np.int64) - offset)))
            offset += batch.num_rows
    writer.commit([*writer.manifest.parts, copy.part], complete=False)
