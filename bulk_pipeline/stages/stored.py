"""Stored completions: which of them answer which request, and those of other partitions."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

import numpy as np
import pyarrow as pa

from bulk_pipeline.engine.request import Status, serves
from bulk_pipeline.stages.journal import Journal
from bulk_pipeline.stages.wanted import WantedRequests, answers_hash, key_halves, row_hashes
from bulk_pipeline.storage.manifest import Manifest, Part
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.partition_writer import PartitionWriter
from bulk_pipeline.storage.schemas import COMPLETIONS, COMPLETIONS_SCHEMA
from bulk_pipeline.storage.store import READERS, Store

MAX_ATTEMPTS = 3  # an error is unfinished work until it has failed this often
READ_ROWS = 8192
ALL = "all"
ANSWERS = frozenset({Status.STOP, Status.LOOP, Status.LENGTH})

# What is stored for a request, a bit each.
ANSWERED = 1
FAILED = 2  # an error
TO_REDO = 4  # something that is to be made anew
OTHER_LIMIT = 8  # an answer that does not serve its max_new_tokens
OTHER_BEFORE = 16  # an answer within a conversation whose answers before were others
SAME_LIMIT = 32  # an answer that was made with its max_new_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Redo:
    """Stored completions that count no longer: those of `statuses` ("all": any) in `parts`."""

    statuses: tuple[str, ...]
    parts: frozenset[str]

    def covers(self, part: str, status: str) -> bool:
        """Whether a completion is to be made anew."""
        return part in self.parts and (ALL in self.statuses or status in self.statuses)


def check_redo(asked: Collection[str]) -> None:
    """Raise a one-line error if something asked for is not ``none``, ``all`` or a status."""
    statuses = sorted(str(status) for status in Status)
    if unknown := set(asked) - {"none", ALL, *statuses}:
        raise ValueError(
            f"redo must be none, all or statuses out of {', '.join(statuses)}, "
            f"got {', '.join(sorted(unknown)) or repr('')}"
        )


def begin_redo(
    writer: PartitionWriter, journal: Journal, redo: str | Collection[str]
) -> Redo | None:
    """What is to be made anew; where that begins now, failures and slices count no longer.

    It is written down in the manifest until the partition is complete, so that a redo that was
    interrupted goes on where it was; asking for the same again continues it, and so does asking
    for nothing. Asking for something else replaces it.

    Raises
    ------
    ValueError
        If `redo` is not ``none``, ``all`` or statuses.
    """
    asked = tuple(sorted({redo} if isinstance(redo, str) else set(redo)))
    check_redo(asked)
    pending = pending_redo(writer.manifest)
    if asked in ((), ("none",)) or (pending and pending.statuses == asked):
        return pending
    # Before it is begun: a run that goes on with it would take the slices' answers for new ones.
    drop_slices(writer.partition.store, writer.partition.key)
    journal.forget(list(journal.failures))
    parts = [part.name for part in writer.manifest.stored]
    meta = writer.manifest.meta | {"redo": {"statuses": list(asked), "parts": parts}}
    writer.commit(writer.manifest.parts, complete=False, meta=meta)
    return Redo(asked, frozenset(parts))


def pending_redo(manifest: Manifest) -> Redo | None:
    """The redo that was begun in a partition and is not finished."""
    pending = manifest.meta.get("redo")
    return pending and Redo(tuple(pending["statuses"]), frozenset(pending["parts"]))


class StoredAnswers:
    """What the stored completions are to the requests: for each its place, or none.

    A completion answers a request of equal key if it stopped by itself within the request's
    limit, or was cut off at the same limit; the last one stored counts. An error never stands
    before an answer. The completion of a later turn also has to follow the very answers that count
    for the turns before; in conversations, one made with the same limit counts before others, so
    that rows which ask the same up to the limit do not take each other's answers apart.

    Parameters
    ----------
    known
        What is stored elsewhere, and counts for the turns before where it answers them.

    Attributes
    ----------
    part, offset
        Where the completion of each request is stored: the part's number in its manifest and
        the row in it; -1 where there is none.
    found
        Bits that say what is stored: `ANSWERED`, `FAILED`, `TO_REDO`, `OTHER_LIMIT`,
        `OTHER_BEFORE`, `SAME_LIMIT`.
    attempts
        How often a request that failed was tried.
    """

    def __init__(self, wanted: WantedRequests, known: "StoredAnswers | None" = None):
        self._wanted = wanted
        # of each request that is answered, the hash of its answer and those before; else 0
        self._hashes = np.zeros(len(wanted) if wanted.num_turns > 1 else 0, np.uint64)
        if known is not None:
            self._hashes = known._hashes.copy()
        self._is_known = self._hashes != 0
        self.part = np.full(len(wanted), -1, np.int32)
        self.offset = np.zeros(len(wanted), np.uint32)
        self.found = np.zeros(len(wanted), np.uint8)
        self.attempts = np.zeros(len(wanted), np.uint8)

    def missing(self) -> np.ndarray:
        """Mask of the ready requests that have to run."""
        given_up = self._failed & (self.attempts >= MAX_ATTEMPTS)
        given_up |= self._failed_before(given_up) >= 0
        return self._wanted.ready & ~self.is_answered & ~given_up

    @property
    def is_answered(self) -> np.ndarray:
        """Mask of the requests with an answer."""
        return self.found & ANSWERED != 0

    def settle(self) -> np.ndarray:
        """Mask of the later turns that an earlier one's failure left without an answer.

        Their place becomes that of the completion that failed.
        """
        before = self._failed_before(self._failed)
        is_left = before >= 0
        self.part[is_left] = self.part[before[is_left]]
        self.offset[is_left] = self.offset[before[is_left]]
        return is_left

    def has_all(self) -> bool:
        """Whether each ready request has a place: an answer, an error, or one before it."""
        return bool(np.all(self.part[self._wanted.ready] >= 0))

    @property
    def _failed(self) -> np.ndarray:
        return self.found & (FAILED | ANSWERED) == FAILED

    def _failed_before(self, failed: np.ndarray) -> np.ndarray:
        """Of each request, the last one of the mask before it in its conversation; else -1."""
        if self._wanted.num_turns == 1 or not len(failed):
            return np.full(len(failed), -1)
        numbers = np.arange(len(failed))
        last = np.maximum.accumulate(np.where(failed, numbers, -1))
        before = np.concatenate([[-1], last[:-1]])
        return np.where(before >= numbers - self._wanted.turn, before, -1)

    def look_into(
        self, partition: Partition, parts: Sequence[Part], redo: Redo | None = None
    ) -> None:
        """Look through the parts, once for each turn; holds a batch of their rows at a time."""
        columns = ["request_key", "status", "completion_tokens", "max_new_tokens", "attempts"]
        columns.append("prompt_tokens")
        if self._wanted.num_turns > 1:
            columns += ["completion_ids", "answers_before"]
        for turn in range(self._wanted.num_turns):
            for number, part in enumerate(parts):
                offset = 0
                for batch in partition.read_part(part, columns, READ_ROWS):
                    self._add(batch, number, offset, part.name, redo, turn)
                    offset += batch.num_rows

    def _add(
        self,
        batch: pa.RecordBatch,
        part: int,
        offset: int,
        name: str,
        redo: Redo | None,
        turn: int,
    ) -> None:
        has_run = batch.column("request_key").is_valid()
        offsets = np.flatnonzero(has_run.to_numpy(zero_copy_only=False)) + offset
        run = batch.filter(has_run)
        places, numbers, serving = _pair(run, self._wanted)
        if self._wanted.num_turns > 1:
            here = self._wanted.turn[numbers] == turn
            places, numbers, serving = places[here], numbers[here], serving[here]
        if not len(places):
            return
        statuses = run.column("status").to_pylist()
        is_answer: np.ndarray = np.array([status in ANSWERS for status in statuses], bool)[places]
        to_redo: np.ndarray = np.array(
            [redo is not None and redo.covers(name, status) for status in statuses], bool
        )[places]
        self.found[numbers[to_redo]] |= TO_REDO
        self.found[numbers[is_answer & ~serving & ~to_redo]] |= OTHER_LIMIT
        follows = ~to_redo
        if turn:
            follows &= self._follows(run, places, numbers)
            self.found[numbers[is_answer & ~to_redo & ~follows]] |= OTHER_BEFORE
        answered = follows & serving
        failed = follows & ~is_answer & (self.found[numbers] & ANSWERED == 0)
        self.attempts[numbers[failed]] = self._attempts(run, places, numbers)[failed]
        kinds = [(failed, FAILED), (answered, ANSWERED)]
        if self._wanted.num_turns > 1:
            same_limit = run.column("max_new_tokens").to_numpy()[places]
            same_limit = answered & (same_limit == self._wanted.limits[numbers])
            answered &= ~same_limit & (self.found[numbers] & SAME_LIMIT == 0)
            kinds.append((same_limit, ANSWERED | SAME_LIMIT))
        for is_kind, bits in kinds:
            self.found[numbers[is_kind]] |= bits
            self.part[numbers[is_kind]] = part
            self.offset[numbers[is_kind]] = offsets[places[is_kind]]
            if bits & ANSWERED and self._wanted.num_turns > 1:
                self._note_answers(run, places[is_kind], numbers[is_kind])

    def _attempts(self, run: pa.RecordBatch, places: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """How often each was tried; what is still too long need not be tried again."""
        attempts = np.minimum(run.column("attempts").to_numpy()[places], 255)
        limit = self._wanted.max_seq_len
        if limit is not None:
            length = run.column("prompt_tokens").to_numpy()[places] + self._wanted.limits[numbers]
            statuses = run.column("status").to_pylist()
            was_too_long = np.array([statuses[place] == Status.TOO_LONG for place in places], bool)
            attempts[was_too_long & (length > limit)] = MAX_ATTEMPTS
        return attempts

    def _follows(self, run: pa.RecordBatch, places: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Which of the pairs are of a completion that follows the answers of the turns before."""
        before = run.column("answers_before").fill_null(0).to_numpy()[places]
        return (before == self._hashes[numbers - 1]) & (before != 0)

    def _note_answers(self, run: pa.RecordBatch, places: np.ndarray, numbers: np.ndarray) -> None:
        """Keep the hashes of answers, for the turns after them."""
        before, ids = run.column("answers_before"), run.column("completion_ids")
        for place, number in zip(places.tolist(), numbers.tolist(), strict=True):
            if not self._is_known[number]:
                answer = ids[place].values.to_numpy()
                self._hashes[number] = answers_hash(before[place].as_py(), answer)


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
    the stored answer does not serve), ``turn_before_changed`` (the same turn of a conversation
    after other answers); for a row id and turn that has answers to another request,
    ``model_changed``, ``adapter_changed`` or else ``sampling_changed`` where these differ from the
    last complete state, whether or not the prompt changed with them, or else ``prompt_changed``;
    ``changed`` where there was no complete state; ``new`` for a row id without answers.

    Parameters
    ----------
    has_row
        Says of numbers of requests which of their row ids have answers.
    """
    if not made_with:
        changed = "changed"
    elif made_with.get("model") != now["model"]:
        changed = "model_changed"
    elif made_with.get("adapters") != now.get("adapters"):
        changed = "adapter_changed"
    elif made_with.get("sampling") != now["sampling"]:
        changed = "sampling_changed"
    else:
        changed = "prompt_changed"
    counts: Counter[str] = Counter()
    rest = leaders
    for bit, reason in (
        (TO_REDO, "redo"),
        (OTHER_LIMIT, "limit_changed"),
        (OTHER_BEFORE, "turn_before_changed"),
        (FAILED, "error_retried"),
    ):
        is_so = answers.found[rest] & bit != 0
        counts[reason] = int(is_so.sum())
        rest = rest[~is_so]
    counts[changed] = int(has_row(rest).sum())
    counts["new"] = len(rest) - counts[changed]
    return {reason: count for reason, count in sorted(counts.items()) if count}


def rows_with_answers(
    prompts: Partition,
    partition: Partition,
    parts: Sequence[Part],
    row_indices: np.ndarray,
    turns: np.ndarray,
) -> np.ndarray:
    """Which of the prompts at `row_indices`, which must not fall, have a completion that ran.

    One of the turn that stands for each in `turns`.
    """
    hashes = [np.zeros(0, np.uint64)]
    first = 0
    for batch in prompts.read(["row_id"], READ_ROWS) if len(row_indices) and parts else ():
        low, high = np.searchsorted(row_indices, [first, first + batch.num_rows])
        here = row_hashes(batch.column("row_id"))[row_indices[low:high] - first]
        hashes.append(_with_turns(here, turns[low:high]))
        first += batch.num_rows
    known, places = np.unique(np.concatenate(hashes), return_inverse=True)
    if not len(known):
        return np.zeros(len(row_indices), bool)
    has_answer = np.zeros(len(known), bool)
    for part in parts:
        for batch in partition.read_part(part, ["row_id", "request_key", "turn"], READ_ROWS):
            run = batch.filter(batch.column("request_key").is_valid())
            stored = row_hashes(run.column("row_id"))
            stored = _with_turns(stored, run.column("turn").to_numpy())
            found = np.minimum(np.searchsorted(known, stored), len(known) - 1)
            has_answer[found[known[found] == stored]] = True
    return has_answer[places]


def _with_turns(hashes: np.ndarray, turns: np.ndarray) -> np.ndarray:
    return hashes ^ (turns.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


Source = tuple[Partition, Redo | None]  # whose answers may be taken; those of a redo not


def other_partitions(store: Store, key: str) -> Iterator[Source]:
    """The dataset's partitions but one, also those that the partitioning no longer has."""
    for other in store.partition_keys(COMPLETIONS):
        if other != key:
            yield store.partition(COMPLETIONS, other), None


def slices_of(store: Store, key: str) -> Iterator[Source]:
    """The slices of a partition."""
    for each in store.slices(key):
        yield each, None


def slice_sources(writer: PartitionWriter) -> Iterator[Source]:
    """Where a slice finds answers: the partition itself, its other slices, other partitions."""
    store, key = writer.partition.store, writer.partition.key
    whole = store.partition(COMPLETIONS, key)
    manifest = whole.manifest()
    redo = pending_redo(manifest) if manifest else None
    yield whole, redo
    for each, _ in slices_of(store, key):
        if each.path != writer.partition.path:
            yield each, None
    if redo is None:
        yield from other_partitions(store, key)


def copy_answers(
    sources: Iterable[Source],
    writer: PartitionWriter,
    wanted: WantedRequests,
    known: StoredAnswers,
    with_errors: bool = False,
) -> int:
    """Copy answers to the requests that `known` has none for; their number.

    Holds a batch of rows at a time, and one of keys of each partition that is looked at.

    Parameters
    ----------
    with_errors
        Whether requests that failed are copied too, so that their attempts count.
    """
    num_copied, missing = 0, known.missing()
    for other, redo in _may_answer(sources, writer.partition.store, wanted, missing):
        if not missing.any():
            break
        try:
            manifest = other.manifest()
            for part in manifest.stored if manifest else []:
                answers = StoredAnswers(wanted, known)
                answers.look_into(other, [part], redo)
                found = missing & answers.is_answered
                copied = missing & (answers.part >= 0) if with_errors else found
                if copied.any():
                    known = answers
                    _copy(other, part, writer, np.unique(answers.offset[copied]))
                    missing &= ~found
                    num_copied += int(found.sum())
        except (ValueError, FileNotFoundError) as error:  # it is being written, or is damaged
            log.warning("answers of partition %s are not looked at: %s", other.label, error)
    return num_copied


def _may_answer(
    sources: Iterable[Source], store: Store, wanted: WantedRequests, missing: np.ndarray
) -> Iterator[Source]:
    """The sources, in order; on object storage only those with a key of a missing request.

    There it looks at some at the same time, at the keys alone: most have none, and each request
    takes its time. `missing` may change meanwhile.
    """
    if store.is_local:
        yield from sources
        return

    def has_key(source: Source) -> bool:
        try:
            return _has_missing(source[0], wanted, missing)
        except (ValueError, FileNotFoundError):
            return True  # whoever reads it says what is wrong

    left = iter(sources)
    while missing.any() and (some := list(islice(left, READERS))):
        yield from compress(some, store.read_many(has_key, some))


def _has_missing(other: Partition, wanted: WantedRequests, missing: np.ndarray) -> bool:
    """Whether something is stored under the key of a missing request."""
    manifest = other.manifest()
    for part in manifest.stored if manifest else []:
        for batch in other.read_part(part, ["request_key"], READ_ROWS):
            keys = batch.column("request_key").drop_null().to_pylist()
            if missing[wanted.numbers_of(keys)].any():
                return True
    return False


def drop_slices(store: Store, key: str) -> None:
    """Delete a partition's slices; one that somebody is writing stays."""
    for each in store.slices(key):
        try:
            with each.writer():
                pass
        except RuntimeError as error:
            log.warning("%s", error)
            continue
        each.delete_all()


def _copy(other: Partition, part: Part, writer: PartitionWriter, offsets: np.ndarray) -> None:
    offset = 0
    with writer.new_part(COMPLETIONS_SCHEMA) as copy:
        for batch in other.read_part(part, batch_size=READ_ROWS):
            first, last = np.searchsorted(offsets, [offset, offset + batch.num_rows])
            copy.write(batch.take(pa.array(offsets[first:last].astype(np.int64) - offset)))
            offset += batch.num_rows
    writer.commit([*writer.manifest.parts, copy.part], complete=False)
