"""prompts → completions: one row for every turn of every sample a prompt asks for, run or reused.

The requests wanted (from prompts) are compared by request key with the completions stored for
the partition, finished or not, and for the dataset's other partitions. What is missing runs,
equal requests once; finished completions are committed every few rows or seconds. In the end the
stored completions are dealt out to the requests that want them, sorted, and committed as the
finished table.

A later turn of a conversation is asked as soon as the answer before it is there, ahead of other
rows. Where that answer is stored, or is that of another row which asks the same, the turn is asked
on its own.

Requests that were in generation in failed runs come last and alone, so that the one at fault is
found out and the others are answered.
"""

import json
import logging
import time
from collections import Counter, abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bulk_pipeline.engine.errors import GenerationError
from bulk_pipeline.engine.request import (
    NOT_RUN,
    READY,
    Completion,
    Request,
    SamplingParams,
    Status,
)
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.stages.journal import GIVE_UP_AFTER, ISOLATE_AFTER, Journal, run_alone_note
from bulk_pipeline.stages.progress import MAX_RUNS, Progress, ProgressFile, tell_watchers
from bulk_pipeline.stages.rows import RowStream
from bulk_pipeline.stages.sampling_changes import changes_metadata, stored_changes
from bulk_pipeline.stages.stored import (
    ANSWERS,
    Redo,
    Source,
    StoredAnswers,
    begin_redo,
    copy_answers,
    drop_slices,
    keep_unwanted,
    other_partitions,
    reasons,
    rows_with_answers,
    slice_sources,
    slices_of,
)
from bulk_pipeline.stages.wanted import WantedRequest, WantedRequests, requests_at
from bulk_pipeline.store import (
    COMPLETIONS,
    COMPLETIONS_SCHEMA,
    PROMPTS,
    Manifest,
    Part,
    Partition,
    PartitionWriter,
    StageReport,
    Store,
    sound_manifest,
)

AnswerIds = Callable[[Sequence[int], str, Collection[int]], list[int]]  # of `ChatGenerator`

PROGRESS_SECONDS = 5.0  # between two reports and two writes of the progress file
WATCH_SECONDS = 0.5  # between two looks of those who watch within the process
SORT_ROWS, SORT_BYTES = 16_384, 64 << 20  # sorted in memory at once, whichever comes first
PLACE = ("row_index", "sample_index", "turn")  # of a request; the order of the table
READ_ROWS = 2048  # read at once, so that long completions stay few
CHECK_ID = -1  # of the request that shows whether the engine works; no number of one

log = logging.getLogger(__name__)


class Generator(Protocol):
    """What this stage needs of the engine; `BulkGenerator` is one."""

    provenance: dict[str, Any]

    def run(
        self, requests: Iterable[Request], on_step: Callable[[], None] | None = None
    ) -> Iterator[Completion]:
        """Yield one completion a request, in any order; call `on_step` after each step.

        Raises
        ------
        GenerationError
            If one of the requests that it has may be why it fails; it can be used again. Any other
            exception counts against no request.
        """


class ChatGenerator(Generator, Protocol):
    """What it needs besides where rows have several turns."""

    def run(
        self,
        requests: Iterable[Request],
        on_step: Callable[[], None] | None = None,
        go_on: Callable[[Completion], Iterable[Request]] | None = None,
    ) -> Iterator[Completion]:
        """Also complete the requests that `go_on` gives for a completion, before others."""

    def answer_ids(
        self, token_ids: Sequence[int], text: str, stop_token_ids: Collection[int]
    ) -> list[int]:
        """Return the tokens of an answer as a chat goes on from it."""


def complete_partition(
    spec: BulkInferenceSpec,
    store: Store,
    key: str,
    get_generator: Callable[[], Generator],
    model_fingerprint: str,
    cache_tokens: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: log.info("%s", progress),
    redo: Literal["none", "all"] | Collection[str] = "none",
    adapters: Mapping[str, str] | None = None,
) -> StageReport:
    """Answer every prompt of a partition and commit the completions.

    Parameters
    ----------
    get_generator
        Gives the engine; called only when something has to run.
    model_fingerprint
        What `request_key` hashes for the model.
    cache_tokens
        Size of the KV cache where it is set, to find prompts that cannot fit before loading.
    redo
        Stored completions that are to be made anew: all, or those of these statuses. A redo that
        was interrupted goes on in the next run, whatever that asks for.
    adapters
        What `request_key` hashes for each adapter that prompts may name.

    Raises
    ------
    ValueError
        If the prompts are missing, the cache is too small for the longest of them, or more
        requests than `output.max_error_rate` ended without an answer. What was answered stays.
    GenerationError
        If the model failed. What was answered stays; see `stages.journal` for the others.
    RuntimeError
        If another run is writing the partition.
    """
    prompts = store.partition(PROMPTS, key)
    prompts_manifest = prompts.complete_manifest()
    _check_cache(prompts_manifest.meta, cache_tokens)
    started = time.monotonic()
    partition = store.partition(COMPLETIONS, key)
    with partition.writer() as writer, closing(Journal(partition)) as journal:
        job = _Job(
            spec, store, prompts, prompts_manifest, writer, journal, model_fingerprint, adapters
        )
        _check_error_rate(spec, key, job.num_not_ready, job.num_requests)
        job.begin(redo)
        job.take_from_slices()
        job.plan(other_partitions(store, key) if not job.is_redo else [])
        progress, file = Progress(key, requests=job.num_to_run), ProgressFile(partition)
        runs = _runs_so_far(writer, file)
        if job.num_to_run:
            log.info("%s: %d requests to run: %s", key, job.num_to_run, job.reasons)
            _run(job, _PartSink(spec, writer, progress, file, on_progress), get_generator)
            runs.append(progress.record())
        if not job.is_finished():
            job.finish(runs[-MAX_RUNS:])
        file.delete()
        drop_slices(store, key)
        counts = writer.manifest.meta["status_counts"]
    for problem in writer.lost:
        log.warning("%s; the requests that it answered run again", problem)
    if writer.set_aside:
        log.warning("set aside files that were not as committed: %s", ", ".join(writer.set_aside))
    _check_error_rate(spec, key, sum(counts.get(s, 0) for s in _FAILED), job.num_requests)
    return StageReport(
        partition=key,
        rows=job.num_requests,
        path=partition.path,
        metadata={
            "requests": job.num_requests,
            "requests_run": job.num_to_run - job.num_left,
            **{f"requests_run_{reason}": count for reason, count in job.reasons.items()},
            "requests_reused": (
                job.num_requests - job.num_not_ready - job.num_fan_out - job.num_to_run
            ),
            "requests_copied": job.num_copied,
            **({"requests_from_slices": job.num_sliced} if job.num_sliced else {}),
            **({"requests_run_alone": len(job.alone)} if len(job.alone) else {}),
            "requests_shared": job.num_fan_out,
            "completion_tokens": progress.completion_tokens,
            **(progress.rates() if job.num_to_run else {}),  # nothing would plot as 0
            "seconds": time.monotonic() - started,
            **({"parts_lost": writer.lost} if writer.lost else {}),
            **({"files_set_aside": writer.set_aside} if writer.set_aside else {}),
            **changes_metadata(spec.sampling, job.changed_sampling),
            **adapters_metadata(job.wanted),
            **{f"status_{status}": counts.get(status, 0) for status in sorted(Status)},
        },
    )


def complete_slice(
    spec: BulkInferenceSpec,
    store: Store,
    key: str,
    number: int,
    of: int,
    get_generator: Callable[[], Generator],
    model_fingerprint: str,
    cache_tokens: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: log.info("%s", progress),
    adapters: Mapping[str, str] | None = None,
) -> StageReport:
    """Answer one of `of` slices of a partition's requests, beside the completions.

    Slices may be answered at the same time, by any processes. `complete_partition` takes over what
    they answered, answers what is left, and commits the table.

    Parameters
    ----------
    number
        Of the slice, counted from 1.
    """
    prompts = store.partition(PROMPTS, key)
    prompts_manifest = prompts.complete_manifest()
    _check_cache(prompts_manifest.meta, cache_tokens)
    started = time.monotonic()
    partition = store.slice(key, number, of)
    with partition.writer() as writer, closing(Journal(partition)) as journal:
        job = _Job(
            spec, store, prompts, prompts_manifest, writer, journal, model_fingerprint, adapters
        )
        job.wanted.keep_slice(number, of)
        job.plan(slice_sources(writer))
        label = f"{key}, slice {number} of {of}"
        progress, file = Progress(label, requests=job.num_to_run), ProgressFile(partition)
        runs = _runs_so_far(writer, file)
        if job.num_to_run:
            log.info("%s: %d requests to run: %s", label, job.num_to_run, job.reasons)
            _run(job, _PartSink(spec, writer, progress, file, on_progress), get_generator)
            runs.append(progress.record())
        writer.commit(
            writer.manifest.parts, True, inputs=job.inputs, meta={"runs": runs[-MAX_RUNS:]}
        )
    return StageReport(
        partition=key,
        rows=writer.manifest.num_rows,
        path=partition.path,
        metadata={
            "requests": int(job.wanted.ready.sum()),
            "requests_run": job.num_to_run - job.num_left,
            "requests_copied": job.num_copied,
            "completion_tokens": progress.completion_tokens,
            **(progress.rates() if job.num_to_run else {}),
            "seconds": time.monotonic() - started,
        },
    )


def begin_slices(store: Store, key: str, redo: Literal["none", "all"] | Collection[str]) -> None:
    """Begin a redo of a partition before its slices are answered, which then know of it."""
    if set(redo if not isinstance(redo, str) else [redo]) <= {"none"}:
        return
    with store.partition(COMPLETIONS, key).writer() as writer:
        if begin_redo(writer, redo)[1]:
            drop_slices(store, key)
            with closing(Journal(writer.partition)) as journal:
                journal.forget(list(journal.failures))


def _runs_so_far(writer: PartitionWriter, file: ProgressFile) -> list[dict[str, Any]]:
    """The records of earlier runs, and of those of the slices."""
    runs = list(writer.manifest.meta.get("runs", []))
    runs += file.take_over(runs)
    if not writer.partition.slice_name:
        for each in writer.partition.store.slices(writer.partition.key):
            manifest = sound_manifest(each)
            runs += manifest.meta.get("runs", []) if manifest else []
            runs += ProgressFile(each).take_over(runs)
    return list({run["began"]: run for run in runs}.values())


_FAILED = (*sorted(NOT_RUN), Status.ERROR)


def _check_cache(meta: dict[str, Any], cache_tokens: int | None) -> None:
    longest = meta.get("max_request_tokens", 0)
    if cache_tokens is not None and longest > cache_tokens:
        raise ValueError(
            f"generator.cache_tokens must hold the longest request, prompt and completion "
            f"together ({longest} tokens), got {cache_tokens}; raise it, or lower "
            f"sampling.max_new_tokens or generator.max_seq_len"
        )


def adapters_metadata(wanted: WantedRequests) -> dict[str, Any]:
    """How many requests each adapter has; nothing where none is asked for."""
    counts = wanted.count_by_adapter()
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return {"requests_by_adapter": listed} if counts else {}


def _check_error_rate(spec: BulkInferenceSpec, key: str, failed: int, total: int) -> None:
    allowed = spec.output.max_error_rate
    if total and failed / total > allowed:
        raise ValueError(
            f"partition {key}: {failed} of {total} requests have no answer "
            f"({failed / total:.1%}), output.max_error_rate allows {allowed:.1%}; see the "
            f"status and error columns, repair the rows or raise it"
        )


class _Job:
    """One partition's work: what is wanted, what is stored, and what of it has to run.

    Attributes
    ----------
    leaders
        Numbers of the requests to run, rising: of those with no stored answer, the first of each
        key and limit.
    is_left
        Mask of those of them that did not run yet.
    alone
        Those of them that run last, one at a time, since runs failed with them in flight.
    given_up
        Those that do not run any more, for the same reason.
    attempts
        How often each request was tried that failed.
    """

    def __init__(
        self,
        spec: BulkInferenceSpec,
        store: Store,
        prompts: Partition,
        prompts_manifest: Manifest,
        writer: PartitionWriter,
        journal: Journal,
        model_fingerprint: str,
        adapters: Mapping[str, str] | None = None,
    ):
        self.spec, self.store, self.prompts = spec, store, prompts
        self.writer, self.journal = writer, journal
        self.model_fingerprint, self.adapters = model_fingerprint, adapters or {}
        self.changed_sampling = stored_changes(prompts_manifest)
        self.inputs: dict[str, Any] = {
            "prompts": [part.name for part in prompts_manifest.parts],
            "model_fingerprint": model_fingerprint,
        }
        self.made_with: dict[str, Any] = {
            "model": model_fingerprint,
            "sampling": prompts_manifest.inputs.get("sampling"),
        }
        self.wanted = WantedRequests(prompts, model_fingerprint, self.adapters)
        self._check_adapters()
        if used := self.wanted.adapter_fingerprints:
            self.inputs["adapters"] = self.made_with["adapters"] = used
        self.num_requests = len(self.wanted)
        self.num_not_ready = self.num_requests - int(self.wanted.ready.sum())
        self.leaders = np.zeros(0, np.uint32)
        self.alone = self.given_up = self.leaders
        self.is_left = np.zeros(self.num_requests, bool)
        self.num_fan_out = self.num_copied = self.num_sliced = 0
        self.attempts = np.zeros(0, np.uint8)
        self.reasons: dict[str, int] = {}
        self._redo: Redo | None = None
        # of conversations: what is stored, in which parts
        self._answers_now: StoredAnswers | None = None
        self._parts: list[Part] = []

    def _check_adapters(self) -> None:
        gone = {name for name in self.wanted.adapters if name and name not in self.adapters}
        if gone:
            raise ValueError(
                f"{self.prompts.label}: rows ask for the adapter {min(gone)!r}, which is none of "
                "generator.adapters any more; add it there, or make the prompts anew"
            )

    @property
    def num_to_run(self) -> int:
        """Requests that get a completion now, if each turn of their conversations has an answer."""
        return len(self.leaders)

    @property
    def is_redo(self) -> bool:
        """Whether stored answers are being made anew."""
        return self._redo is not None

    @property
    def num_left(self) -> int:
        """Those of them that did not run."""
        return int(self.is_left.sum())

    def begin(self, redo: Literal["none", "all"] | Collection[str]) -> None:
        """Begin a redo, or go on with one."""
        self._redo, begins = begin_redo(self.writer, redo)
        if begins:
            self.journal.forget(list(self.journal.failures))
            drop_slices(self.store, self.writer.partition.key)

    def take_from_slices(self) -> None:
        """Take over what the slices of the partition answered, and what failed in them."""
        slices = list(slices_of(self.store, self.writer.partition.key))
        if slices:
            self.num_sliced = copy_answers(
                slices, self.writer, self.wanted, self._answers(), with_errors=True
            )

    def plan(self, sources: Iterable[Source]) -> None:
        """Find out what has to run, and why; answers of `sources` are copied."""
        parts_before = self.writer.manifest.stored
        answers = self._answers()
        missing = answers.missing()
        if missing.any():
            self.num_copied = copy_answers(sources, self.writer, self.wanted, answers)
            if self.num_copied:
                answers = self._answers()
                missing = answers.missing()
        self.leaders = self.wanted.first_of_each(missing)
        self.is_left[self.leaders] = True
        self.num_fan_out = int(missing.sum()) - len(self.leaders)
        self.attempts = answers.attempts
        self.alone = self._with_failures(ISOLATE_AFTER, GIVE_UP_AFTER)
        self.given_up = self._with_failures(GIVE_UP_AFTER)
        made_with = self.writer.manifest.meta.get("made_with", {})

        def has_row(numbers: np.ndarray) -> np.ndarray:
            rows, turns = self.wanted.row_index[numbers], self.wanted.turn[numbers]
            partition = self.writer.partition
            return rows_with_answers(self.prompts, partition, parts_before, rows, turns)

        self.reasons = reasons(self.leaders, answers, has_row, made_with, self.made_with)

    def openers(self) -> np.ndarray:
        """Numbers of those left that can run now, rising: the turn before them is answered."""
        wanted = self.wanted
        if wanted.num_turns == 1 or not self.is_left.any():
            return np.flatnonzero(self.is_left)
        self._answers_now, self._parts = self._answers(), self.writer.manifest.stored
        # an answer of before counts for a turn that is still to be made anew, until it is
        is_settled = self._answers_now.is_answered & ~self.is_left
        follows = np.concatenate([[False], is_settled[:-1]])
        return np.flatnonzero(self.is_left & (follows | (wanted.turn == 0)))

    def requests(
        self,
        numbers: np.ndarray,
        answer_ids: AnswerIds,
    ) -> Iterator[WantedRequest]:
        """The openers of the given numbers, which must rise, with the answers stored before them.

        They come adapter by adapter, since the use of another one empties the batch.
        `answer_ids` is the generator's.
        """
        for group in self.wanted.by_adapter(numbers):
            yield from self._requests(group, answer_ids)

    def _requests(self, numbers: np.ndarray, answer_ids: AnswerIds) -> Iterator[WantedRequest]:
        requests = requests_at(self.prompts, self.model_fingerprint, numbers, self.adapters)
        turns = self.wanted.turn[numbers].astype(np.int64)
        if not turns.any():
            yield from requests
            return
        with closing(self._stored_at(_all_before(numbers, turns))) as answers:
            for number, request in zip(numbers.tolist(), requests, strict=True):
                while request.number < number:
                    ids, text = next(answers)
                    kept = answer_ids(ids, text, request.sampling.stop_token_ids)
                    request = request.next_turn(ids, kept)
                yield request

    def _stored_at(self, numbers: np.ndarray) -> abc.Generator[tuple[list[int], str], None, None]:
        """The stored answers of requests, in the order of their numbers."""
        partition, answers = self.writer.partition, self._answers_now
        assert answers is not None
        tables = _deal(partition, self._parts, self.wanted, answers, numbers)
        pieces = list(_write_pieces(self.writer, tables))
        try:
            for table in partition.read_sorted(pieces, max(64, SORT_ROWS // max(len(pieces), 1))):
                for row in table.select(["completion_ids", "completion"]).to_pylist():
                    yield row["completion_ids"], row["completion"]
        finally:
            self.writer.discard(pieces)

    def is_finished(self) -> bool:
        """Whether the table stands as it is."""
        manifest = self.writer.manifest
        return (
            manifest.complete
            and manifest.inputs == self.inputs
            and self._redo is None
            and not self.num_to_run
            and not self.num_copied
            and not self.num_sliced
        )

    def finish(self, runs: list[dict[str, Any]]) -> None:
        """Deal the stored completions out to the requests, sort, count, and commit the table.

        `runs` are the records of those that made them.
        """
        parts, partition = self.writer.manifest.stored, self.writer.partition
        answers = self._answers()
        is_left_out = answers.settle()
        assert answers.has_all(), "a request has neither an answer nor an error"
        ready = np.flatnonzero(self.wanted.ready).astype(np.uint32)
        tables = _deal(partition, parts, self.wanted, answers, ready, is_left_out)
        if self.num_not_ready:
            tables = chain(tables, _not_run(self.prompts))
        pieces = list(_write_pieces(self.writer, tables))
        del answers, tables
        counts: Counter[str] = Counter()
        rows = RowStream(self.prompts.read(["row_id", "row_index"]))
        offset = 0
        with self.writer.new_part(COMPLETIONS_SCHEMA) as part:
            for table in partition.read_sorted(pieces, max(64, SORT_ROWS // max(len(pieces), 1))):
                _check_conserved(table, self.wanted, offset)
                offset += table.num_rows
                row_ids = rows.take(table["row_index"])["row_id"]
                part.write(table.set_column(0, COMPLETIONS_SCHEMA.field("row_id"), row_ids))
                for count in pc.value_counts(table["status"]).to_pylist():
                    counts[count["values"]] += count["counts"]
        assert offset == self.num_requests, f"{offset} completions for {self.num_requests} requests"
        failed = sum(counts.get(status, 0) for status in _FAILED)
        allowed = self.spec.output.max_error_rate
        self.writer.commit(
            [part.part],
            complete=not offset or failed / offset <= allowed,
            inputs=self.inputs,
            meta={"status_counts": dict(counts), "made_with": self.made_with, "runs": runs},
            # Once the sampling is reset, the answers of before are wanted again.
            kept=keep_unwanted(self.writer, self.wanted) if self.changed_sampling else [],
        )
        self.writer.discard(pieces)
        self.journal.forget(list(self.journal.failures))

    def goes_on(self, number: int) -> bool:
        """Whether the next turn of a request's conversation is to run right after it."""
        following = number + 1
        return (
            following < self.num_requests
            and self.wanted.turn[following] > 0
            and bool(self.is_left[following])
            and following not in self._apart
        )

    def keys_noted_with(self, request: WantedRequest) -> list[str]:
        """Keys to note with a request that starts, beside its own: those of the turns after it.

        Only where a note takes long, so that the model need not wait for one at every turn.
        """
        keys: list[str] = []
        while self.journal.ahead > 1 and self.goes_on(request.number + len(keys)):
            keys.append(request.later_turns[request.turn + len(keys)].key)
        return keys

    @cached_property
    def _apart(self) -> frozenset[int]:
        return frozenset([*self.alone.tolist(), *self.given_up.tolist()])

    def _answers(self) -> StoredAnswers:
        answers = StoredAnswers(self.wanted)
        answers.look_into(self.writer.partition, self.writer.manifest.stored, self._redo)
        return answers

    def _with_failures(self, least: int, below: int = 1 << 30) -> np.ndarray:
        """Those of the leaders with which so many runs failed; rising."""
        keys = [key for key, count in self.journal.failures.items() if least <= count < below]
        return np.intersect1d(self.leaders, self.wanted.numbers_of(keys))


def _run(job: _Job, sink: "_PartSink", get_generator: Callable[[], Generator]) -> None:
    """Put the leaders through the engine; what finished is stored even if the rest fails."""
    sink.report()
    if len(job.alone):
        log.warning("%s: %s", sink.progress.partition, run_alone_note(len(job.alone)))
    generator: Generator | None = None
    try:
        while len(openers := job.openers()):
            given_up = np.intersect1d(openers, job.given_up)
            for wanted in job.requests(given_up, _no_ids):
                sink.add(wanted, _given_up(wanted), None, job.journal.failures[wanted.key])
            job.is_left[given_up] = False
            openers = np.setdiff1d(openers, given_up)
            if len(openers) and generator is None:
                generator = get_generator()
                sink.progress.start(generator.provenance, getattr(generator, "stats", None))
                if used := job.wanted.adapter_fingerprints:
                    sink.progress.settings["adapters"] = ", ".join(used)
            if generator is not None:
                _run_openers(job, sink, generator, openers)
            if job.num_left:  # turns that wait for an answer which another row asked for
                sink.flush()
        sink.progress.requests -= job.num_left  # turns after one without an answer
    finally:
        sink.close()
    done = sink.progress.done + job.num_left
    assert done == job.num_to_run, (sink.progress.done, job.num_left, job.num_to_run)


def _run_openers(job: _Job, sink: "_PartSink", generator: Generator, openers: np.ndarray) -> None:
    """Run requests, and the turns after them; those that run alone come last."""
    answer_ids: AnswerIds = getattr(generator, "answer_ids", _no_ids)
    together = job.requests(np.setdiff1d(openers, job.alone), answer_ids)
    _generate(job, sink, generator, together, job.journal.ahead)
    # Few enough to hold: what was in flight when runs failed.
    engine_works = False
    for wanted in list(job.requests(np.intersect1d(openers, job.alone), answer_ids)):
        if not engine_works:
            _check_engine(generator, wanted.adapter)
        engine_works = _generate(job, sink, generator, iter([wanted]), 1, is_alone=True)


def _check_engine(generator: Generator, adapter: str | None) -> None:
    """Answer a request of one token, which raises where a failure is no request's own."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    for _ in generator.run([Request(CHECK_ID, (0,), params, adapter=adapter)]):
        pass


def _generate(
    job: _Job,
    sink: "_PartSink",
    generator: Generator,
    wanted: Iterator[WantedRequest],
    ahead: int,
    is_alone: bool = False,
) -> bool:
    """Run requests together; the journal knows of each before the engine does.

    Where the model fails, that counts against what was in flight; a request that was so alone ends
    as an error. Returns whether the model did not fail.
    """
    in_flight: dict[int, WantedRequest] = {}
    noted: set[str] = set()  # keys of turns that are to come

    def started(some: list[WantedRequest]) -> Iterator[Request]:
        if new := [request for request in some if request.key not in noted]:
            later = [key for request in new for key in job.keys_noted_with(request)]
            job.journal.start([*(request.key for request in new), *later])
            noted.update(later)
        for request in some:
            noted.discard(request.key)
            in_flight[request.number] = request
            yield Request(
                request.number,
                request.input_ids,
                request.sampling,
                request.prompt_logprobs,
                request.adapter,
            )

    def requests() -> Iterator[Request]:
        while some := list(islice(wanted, ahead)):
            yield from started(some)

    def go_on(completion: Completion) -> Iterator[Request]:
        request = in_flight[cast(int, completion.request_id)]
        if completion.status in ANSWERS and job.goes_on(request.number):
            ids, text = completion.token_ids, completion.text
            kept = chats.answer_ids(ids, text, request.sampling.stop_token_ids)
            yield from started([request.next_turn(ids, kept)])

    produced_by = {
        name: json.dumps(provenance_of(generator.provenance, name), sort_keys=True)
        for name in job.wanted.adapters
    }
    chats = cast(ChatGenerator, generator)
    completions = (
        generator.run(requests(), on_step=sink.tick)
        if job.wanted.num_turns == 1
        else chats.run(requests(), on_step=sink.tick, go_on=go_on)
    )

    def finish(completion: Completion) -> None:
        request = in_flight.pop(cast(int, completion.request_id))
        job.is_left[request.number] = False
        job.journal.finish(request.key)
        if completion.status not in ANSWERS:
            for key in job.keys_noted_with(request):
                noted.discard(key)
                job.journal.finish(key)
        attempts = int(job.attempts[request.number]) + job.journal.failures[request.key] + 1
        if completion.status in ANSWERS:
            job.journal.forget([request.key])  # even if the answer gets lost: it can be answered
        sink.add(request, completion, produced_by[request.adapter], attempts)

    try:
        for completion in completions:
            finish(completion)
    except GenerationError as error:
        if not is_alone or len(in_flight) != 1:
            job.journal.blame(request.key for request in in_flight.values())
            raise
        [request] = in_flight.values()
        log.warning("row %d failed alone: %s", request.row_index, error, exc_info=error)
        finish(_failed_alone(request, error))
        return False
    return True


def provenance_of(provenance: dict[str, Any], adapter: str | None) -> dict[str, Any]:
    """What is recorded with a completion: of all adapters the one that it used."""
    adapters = provenance.get("adapters", {})
    rest = {name: value for name, value in provenance.items() if name != "adapters"}
    if adapter is None:
        return rest
    return rest | {"adapter": {"name": adapter, "fingerprint": adapters.get(adapter)}}


def _no_ids(token_ids: Sequence[int], text: str, stop_token_ids: Collection[int]) -> list[int]:
    """Where nothing goes on from an answer."""
    return []


def _given_up(wanted: WantedRequest) -> Completion:
    error = (
        f"{GIVE_UP_AFTER} runs failed with this request in generation, the last ones with no "
        f"other, when their process died; look for the reason in the system's log (memory?), then "
        f"redo it"
    )
    return Completion(wanted.number, Status.ERROR, prompt_tokens=len(wanted.input_ids), error=error)


def _failed_alone(wanted: WantedRequest, error: GenerationError) -> Completion:
    reason = f"{error}; no other request was in it: redo this one once the reason is gone"
    return Completion(
        wanted.number, Status.ERROR, prompt_tokens=len(wanted.input_ids), error=reason
    )


def _completion_row(
    wanted: WantedRequest, completion: Completion, produced_by: str | None, attempts: int
) -> tuple[Any, ...]:
    """A row of `COMPLETIONS_SCHEMA`."""
    sampling = wanted.sampling
    return (
        wanted.row_id,
        wanted.row_index,
        wanted.sample_index,
        wanted.turn,
        str(completion.status),
        completion.text,
        completion.token_ids,
        completion.prompt_tokens,
        len(completion.token_ids),
        completion.stop_reason,
        completion.incomplete_character,
        None if sampling.is_greedy else sampling.seed,
        sampling.max_new_tokens,
        wanted.key,
        completion.error,
        produced_by,
        attempts,
        completion.cached_tokens,
        completion.queue_seconds,
        completion.prefill_seconds,
        completion.generate_seconds,
        completion.logprobs,
        completion.cumulative_logprob,
        completion.top_logprobs,
        completion.prompt_logprobs,
        wanted.answers_before,
    )


class _PartSink:
    """Commits finished completions every few rows or seconds, and reports progress."""

    def __init__(
        self,
        spec: BulkInferenceSpec,
        writer: PartitionWriter,
        progress: Progress,
        file: ProgressFile,
        on_progress: Callable[[Progress], None],
    ):
        self._output, self._writer = spec.output, writer
        self.progress, self._file, self._on_progress = progress, file, on_progress
        self._rows: list[tuple[Any, ...]] = []
        self._part: Part | None = None  # with them, not known to be committed
        self._flushed = self._reported = self._shown = time.monotonic()

    def add(
        self,
        request: WantedRequest,
        completion: Completion,
        produced_by: str | None,
        attempts: int,
    ) -> None:
        """Take a finished completion."""
        if not self._rows:
            self._flushed = time.monotonic()  # an idle sink owes nothing
        self._rows.append(_completion_row(request, completion, produced_by, attempts))
        self.progress.add(completion)
        self.progress.adapter = request.adapter
        if len(self._rows) >= self._output.flush_rows:
            self.flush()

    def tick(self) -> None:
        """Look at the clock; called after each step of the generator."""
        now = time.monotonic()
        if self._rows and now - self._flushed >= self._output.flush_seconds:
            self.flush()
        if now - self._shown >= WATCH_SECONDS:
            tell_watchers(self.progress)
            self._shown = now
        if now - self._reported >= PROGRESS_SECONDS:
            self.report()
            self._on_progress(self.progress)
            self._reported = now

    def report(self) -> None:
        """Tell other processes how far the run is."""
        self.progress.mark()
        self._file.write(self.progress)
        tell_watchers(self.progress)

    def close(self) -> None:
        """Generation is over, well or not: keep what is finished."""
        self.progress.stop()
        try:
            self.flush()
        finally:
            self._file.write(self.progress, is_last=True)
            tell_watchers(self.progress)

    def flush(self) -> None:
        """Make what was taken durable; once, also where an interrupt comes before its end."""
        if not self._rows:
            return
        if self._part is None:
            columns = [
                pa.array(values, column.type)
                for values, column in zip(
                    zip(*self._rows, strict=True), COMPLETIONS_SCHEMA, strict=True
                )
            ]
            with self._writer.new_part(COMPLETIONS_SCHEMA) as part:
                part.write(pa.Table.from_arrays(columns, schema=COMPLETIONS_SCHEMA))
            self._part = part.part
        parts = [part for part in self._writer.manifest.parts if part != self._part]
        self._writer.commit([*parts, self._part], complete=False)
        self._rows.clear()
        self._part = None
        self._flushed = time.monotonic()


def _all_before(numbers: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """The numbers of all turns before requests of the given turns, in order."""
    within = np.arange(turns.sum()) - np.repeat(np.cumsum(turns) - turns, turns)
    return np.repeat(numbers - turns, turns) + within


def _deal(
    partition: Partition,
    parts: list[Part],
    wanted: WantedRequests,
    answers: StoredAnswers,
    numbers: np.ndarray,
    is_left_out: np.ndarray | None = None,
) -> Iterator[pa.Table]:
    """Each stored completion under those of the requests `numbers` that it answers.

    Also under those in the mask `is_left_out`, which were not asked because it failed.
    """
    numbers = numbers[np.lexsort((answers.offset[numbers], answers.part[numbers]))]
    starts = np.searchsorted(answers.part[numbers], np.arange(len(parts) + 1))
    for number, part in enumerate(parts):
        here = numbers[starts[number] : starts[number + 1]]
        offsets, offset = answers.offset[here].astype(np.int64), 0
        for batch in partition.read_part(part, batch_size=READ_ROWS) if len(here) else ():
            first, last = np.searchsorted(offsets, [offset, offset + batch.num_rows]).tolist()
            for start in range(first, last, READ_ROWS):
                some = slice(start, min(start + READ_ROWS, last))
                table = pa.Table.from_batches([batch]).take(pa.array(offsets[some] - offset))
                if is_left_out is not None and is_left_out[here[some]].any():
                    table = _not_asked(table, is_left_out[here[some]])
                for name in PLACE:
                    column = COMPLETIONS_SCHEMA.field(name)
                    values = pa.array(getattr(wanted, name)[here[some]], column.type)
                    table = table.set_column(table.schema.get_field_index(name), column, values)
                yield table
            offset += batch.num_rows


def _not_asked(completions: pa.Table, is_left_out: np.ndarray) -> pa.Table:
    """The completions, with the later turns of one that failed in place of those in the mask."""
    rows = [
        {
            "row_id": row["row_id"],
            "status": row["status"],
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "incomplete_character": False,
            "error": f"turn {row['turn']} ended as {row['status']}, so that this one was not asked",
            "attempts": 0,
        }
        if is_so
        else row
        for row, is_so in zip(completions.to_pylist(), is_left_out.tolist(), strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=COMPLETIONS_SCHEMA)


def _not_run(prompts: Partition) -> Iterator[pa.Table]:
    """The rows that cannot run: their status and reason, no answer."""
    columns = ["row_id", "row_index", "prompt_tokens", "status", "error"]
    for batch in prompts.read([*columns, "num_samples", "num_turns"], READ_ROWS):
        rows = [
            {
                "row_id": row["row_id"],
                "row_index": row["row_index"],
                "sample_index": sample_index,
                "turn": turn,
                "status": row["status"],
                "prompt_tokens": row["prompt_tokens"] or 0,
                "completion_tokens": 0,
                "incomplete_character": False,
                "error": row["error"],
                "attempts": 0,
            }
            for row in batch.filter(pc.not_equal(batch.column("status"), READY)).to_pylist()
            for sample_index in range(row["num_samples"])
            for turn in range(row["num_turns"] or 1)
        ]
        if rows:
            yield pa.Table.from_pylist(rows, schema=COMPLETIONS_SCHEMA)


def _write_pieces(writer: PartitionWriter, tables: Iterable[pa.Table]) -> Iterator[Part]:
    """Write rows as temporary parts, each sorted, as large as may be sorted in memory."""
    pending: list[pa.Table] = []
    for table in tables:
        pending.append(table)
        is_full = sum(t.num_rows for t in pending) >= SORT_ROWS
        if is_full or sum(t.nbytes for t in pending) >= SORT_BYTES:
            yield _write_piece(writer, pending)
            pending = []
    if pending:
        yield _write_piece(writer, pending)


def _write_piece(writer: PartitionWriter, tables: list[pa.Table]) -> Part:
    rows = pa.concat_tables(tables)
    order = [(name, "ascending") for name in PLACE]
    with writer.new_part(COMPLETIONS_SCHEMA, temporary=True) as part:
        part.write(rows.take(pc.sort_indices(rows, sort_keys=order)))
    return part.part


def _check_conserved(table: pa.Table, wanted: WantedRequests, offset: int) -> None:
    """The contract: each request once, none else, in order."""
    for name in PLACE:
        expected = getattr(wanted, name)[offset : offset + table.num_rows]
        assert np.array_equal(table[name].to_numpy(), expected), f"{name} near row {offset}"
