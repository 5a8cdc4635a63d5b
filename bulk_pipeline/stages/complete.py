"""prompts → completions: one row for every sample a prompt asks for, run or reused.

The requests wanted (from prompts) are compared by request key with the completions stored for
the partition, finished or not. What is missing runs, equal requests once; finished completions
are committed every few rows or seconds. In the end the stored completions are dealt out to the
requests that want them, sorted, and committed as the finished table.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
import polars as pl
import pyarrow as pa

from bulk_pipeline.engine.request import (
    NOT_RUN,
    READY,
    Completion,
    Request,
    SamplingParams,
    Status,
    request_key,
    request_seed,
)
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.stages.rows import RowStream
from bulk_pipeline.store import (
    COMPLETIONS,
    COMPLETIONS_SCHEMA,
    PROMPTS,
    Part,
    Partition,
    PartitionWriter,
    StageReport,
    Store,
)

MAX_ATTEMPTS = 3  # an error is unfinished work until it has failed this often
PROGRESS_SECONDS = 5.0
SORT_ROWS = 32_768  # rows sorted in memory at once
KEY = ["key_high", "key_low"]  # the 128-bit request key as two integers

log = logging.getLogger(__name__)


class Generator(Protocol):
    """What this stage needs of the engine; `BulkGenerator` is one."""

    provenance: dict[str, Any]

    def run(
        self, requests: Iterable[Request], on_step: Callable[[], None] | None = None
    ) -> Iterator[Completion]:
        """Yield one completion a request, in any order; call `on_step` after each step."""


@dataclass(slots=True)
class Progress:
    """How far a partition is: requests, tokens, and the seconds since generation began."""

    partition: str
    requests: int
    done: int = 0
    completion_tokens: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens a second so far."""
        return self.completion_tokens / max(time.monotonic() - self.started, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Seconds to go at the rate of requests so far; infinite before the first."""
        seconds = time.monotonic() - self.started
        return seconds / self.done * (self.requests - self.done) if self.done else float("inf")

    def __str__(self) -> str:
        left = f"{self.seconds_left:.0f} s left" if self.done else "no estimate yet"
        return (
            f"{self.partition}: {self.done} of {self.requests} requests, "
            f"{self.tokens_per_second:.1f} tokens/s, {left}"
        )


def complete_partition(
    spec: BulkInferenceSpec,
    store: Store,
    key: str,
    get_generator: Callable[[], Generator],
    model_fingerprint: str,
    cache_tokens: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: log.info("%s", progress),
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

    Raises
    ------
    ValueError
        If the prompts are missing, the cache is too small for the longest of them, or more
        requests than `output.max_error_rate` ended without an answer. What was answered stays.
    RuntimeError
        If another run is writing the partition.
    """
    prompts = store.partition(PROMPTS, key)
    prompts_manifest = prompts.complete_manifest()
    _check_cache(prompts_manifest.meta, cache_tokens)
    inputs = {
        "prompts": [part.name for part in prompts_manifest.parts],
        "model_fingerprint": model_fingerprint,
    }
    started = time.monotonic()
    partition = store.partition(COMPLETIONS, key)
    with partition.writer() as writer:
        wanted = _wanted_requests(prompts, model_fingerprint)
        _check_error_rate(spec, key, wanted.filter(~pl.col("ready")).height, wanted.height)
        served = _served(wanted, _stored(partition, writer.manifest.parts))
        run = _RunState(wanted, served, _stored(partition, writer.manifest.parts))
        is_finished = (
            writer.manifest.complete and writer.manifest.inputs == inputs and not len(run.leaders)
        )
        progress = Progress(key, requests=len(run.leaders))
        if len(run.leaders):
            generator = get_generator()
            progress.started = time.monotonic()
            sink = _PartSink(spec, writer, progress, on_progress)
            _run_requests(run, prompts, generator, model_fingerprint, sink)
        if not is_finished:
            _finish(prompts, partition, writer, wanted, inputs, spec)
        counts = writer.manifest.meta["status_counts"]
    if writer.set_aside:
        log.warning("set aside files that were not as committed: %s", ", ".join(writer.set_aside))
    _check_error_rate(spec, key, sum(counts.get(s, 0) for s in _FAILED), wanted.height)
    num_reused = wanted.filter("ready").height - run.num_fan_out - len(run.leaders)
    return StageReport(
        partition=key,
        rows=wanted.height,
        path=partition.path,
        metadata={
            "requests": wanted.height,
            "requests_run": len(run.leaders),
            "requests_reused": num_reused,
            "requests_shared": run.num_fan_out,
            "completion_tokens": progress.completion_tokens,
            "tokens_per_second": progress.tokens_per_second if len(run.leaders) else 0.0,
            "seconds": time.monotonic() - started,
            **{f"status_{status}": count for status, count in sorted(counts.items())},
        },
    )


_FAILED = (*sorted(NOT_RUN), Status.ERROR)


def _check_cache(meta: dict[str, Any], cache_tokens: int | None) -> None:
    longest = meta.get("max_request_tokens", 0)
    if cache_tokens is not None and longest > cache_tokens:
        raise ValueError(
            f"generator.cache_tokens must hold the longest request, prompt and completion "
            f"together ({longest} tokens), got {cache_tokens}; raise it, or lower "
            f"sampling.max_new_tokens or generator.max_seq_len"
        )


def _check_error_rate(spec: BulkInferenceSpec, key: str, failed: int, total: int) -> None:
    allowed = spec.output.max_error_rate
    if total and failed / total > allowed:
        raise ValueError(
            f"partition {key}: {failed} of {total} requests have no answer "
            f"({failed / total:.1%}), output.max_error_rate allows {allowed:.1%}; see the "
            f"status and error columns, repair the rows or raise it"
        )


def _sampling_params(row: dict[str, Any], row_id: str, sample_index: int) -> SamplingParams:
    """The effective sampling of one sample: the row's values, with a seed of its own."""
    seed = request_seed(row["seed"], row_id, sample_index)
    return SamplingParams(
        **{**row, "stop": tuple(row["stop"]), "stop_token_ids": tuple(row["stop_token_ids"])}
        | {"seed": seed}
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One request as the prompts table asks for it."""

    row_id: str
    row_index: int
    sample_index: int
    input_ids: list[int]
    sampling: SamplingParams | None  # None where the row cannot run
    status: str
    error: str | None


def _each_wanted(prompts: Partition) -> Iterator[_Wanted]:
    """Every request of the partition, in the order of the finished table."""
    columns = ["row_id", "row_index", "input_ids", "status", "error", "sampling", "num_samples"]
    for batch in prompts.read(columns):
        for row in batch.to_pylist():
            for sample_index in range(row["num_samples"]):
                ready = row["status"] == READY
                yield _Wanted(
                    row["row_id"],
                    row["row_index"],
                    sample_index,
                    row["input_ids"] or [],
                    _sampling_params(row["sampling"], row["row_id"], sample_index)
                    if ready
                    else None,
                    row["status"],
                    row["error"],
                )


def _key_halves(hex_key: str | None) -> tuple[int, int]:
    value = int(hex_key or "0", 16)
    return value >> 64, value & ((1 << 64) - 1)


def _wanted_requests(prompts: Partition, model_fingerprint: str) -> pl.DataFrame:
    """The table to fill: a row a request, in order, with its key; about 40 bytes each."""
    schema = {
        "row_index": pl.Int64,
        "sample_index": pl.Int32,
        "ready": pl.Boolean,
        "key_high": pl.UInt64,
        "key_low": pl.UInt64,
        "limit": pl.Int32,
    }
    chunks: list[pl.DataFrame] = [pl.DataFrame(schema=schema)]
    rows: list[tuple[Any, ...]] = []

    def flush() -> None:
        chunks.append(pl.DataFrame(rows, schema=schema, orient="row"))
        rows.clear()

    for wanted in _each_wanted(prompts):
        sampling = wanted.sampling
        key = request_key(wanted.input_ids, sampling, model_fingerprint) if sampling else None
        limit = sampling.max_new_tokens if sampling else 0
        rows.append(
            (wanted.row_index, wanted.sample_index, bool(sampling), *_key_halves(key), limit)
        )
        if len(rows) >= SORT_ROWS:
            flush()
    flush()
    return pl.concat(chunks).with_row_index("request")


def _stored(partition: Partition, parts: list[Part]) -> pl.DataFrame:
    """What is in the parts: a row a completion that was run, with its place and its key."""
    columns = ["request_key", "status", "completion_tokens", "max_new_tokens", "attempts"]
    frames = [
        pl.DataFrame(
            schema={
                "status": pl.String,
                "completion_tokens": pl.Int32,
                "max_new_tokens": pl.Int32,
                "attempts": pl.Int32,
                "key_high": pl.UInt64,
                "key_low": pl.UInt64,
                "part": pl.Int32,
                "offset": pl.Int64,
            }
        )
    ]
    for number, part in enumerate(parts):
        offset = 0
        for batch in partition.read_part(part, columns, batch_size=SORT_ROWS):
            halves = [_key_halves(key) for key in batch.column("request_key").to_pylist()]
            frame = (
                _frame(batch)
                .drop("request_key")
                .with_columns(
                    pl.Series("key_high", [high for high, _ in halves], pl.UInt64),
                    pl.Series("key_low", [low for _, low in halves], pl.UInt64),
                    pl.lit(number, pl.Int32).alias("part"),
                    pl.Series("offset", np.arange(offset, offset + batch.num_rows), pl.Int64),
                )
            )
            offset += batch.num_rows
            frames.append(frame.filter(~pl.col("status").is_in([str(s) for s in NOT_RUN])))
    return pl.concat(frames)


def _frame(batch: pa.RecordBatch) -> pl.DataFrame:
    frame = pl.from_arrow(batch)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _served(wanted: pl.DataFrame, stored: pl.DataFrame, any_error: bool = False) -> pl.DataFrame:
    """Pair every request with the stored completion that answers it: request, part, offset.

    A completion answers a request of equal key if it stopped by itself within the request's
    limit, or was cut off at the same limit. An error answers once it has failed
    `MAX_ATTEMPTS` times, or with `any_error`; it never stands before an answer.
    """
    by_itself = pl.col("status").is_in([str(Status.STOP), str(Status.LOOP)])
    cut_off = pl.col("status") == str(Status.LENGTH)
    is_error = pl.col("status") == str(Status.ERROR)
    return (
        wanted.lazy()
        .filter("ready")
        .join(stored.lazy(), on=KEY)
        .filter(
            (by_itself & (pl.col("completion_tokens") <= pl.col("limit")))
            | (cut_off & (pl.col("max_new_tokens") == pl.col("limit")))
            | (is_error & ((pl.col("attempts") >= MAX_ATTEMPTS) | any_error))
        )
        .sort(is_error, "part", "offset", descending=[True, False, False])
        .group_by("request")
        .agg(pl.last("part"), pl.last("offset"))
        .collect()
    )


class _RunState:
    """Which requests run: of those with no stored answer, the first of each key and limit."""

    def __init__(self, wanted: pl.DataFrame, served: pl.DataFrame, stored: pl.DataFrame):
        missing = wanted.filter("ready").join(served, on="request", how="anti")
        first = missing.group_by([*KEY, "limit"]).agg(pl.min("request"))["request"]
        self.leaders = np.sort(first.to_numpy())
        self.num_fan_out = missing.height - len(self.leaders)
        errors = stored.filter(pl.col("status") == str(Status.ERROR))
        self.attempts = {
            (high, low): attempts
            for high, low, attempts in errors.select([*KEY, "attempts"]).iter_rows()
        }
        self.in_flight: dict[int, tuple[_Wanted, str]] = {}


def _run_requests(
    run: _RunState,
    prompts: Partition,
    generator: Generator,
    model_fingerprint: str,
    sink: "_PartSink",
) -> None:
    """Put the leaders through the engine; what finished is stored even if the rest fails."""

    def requests() -> Iterator[Request]:
        leaders = iter(run.leaders)
        leader = next(leaders, None)
        for number, wanted in enumerate(_each_wanted(prompts)):
            if number == leader:
                assert wanted.sampling is not None
                key = request_key(wanted.input_ids, wanted.sampling, model_fingerprint)
                run.in_flight[number] = (replace(wanted, input_ids=[]), key)
                yield Request(number, wanted.input_ids, wanted.sampling)
                leader = next(leaders, None)

    produced_by = json.dumps(generator.provenance, sort_keys=True)
    try:
        for completion in generator.run(requests(), on_step=sink.tick):
            wanted, key = run.in_flight.pop(cast(int, completion.request_id))
            attempts = run.attempts.get(_key_halves(key), 0) + 1
            row = _completion_row(wanted, completion, key)
            sink.add(row | {"attempts": attempts, "produced_by": produced_by})
    finally:
        sink.flush()
    assert sink.progress.done == len(run.leaders), (sink.progress.done, len(run.leaders))


def _completion_row(wanted: _Wanted, completion: Completion, key: str) -> dict[str, Any]:
    sampling = wanted.sampling
    assert sampling is not None
    return {
        "row_id": wanted.row_id,
        "row_index": wanted.row_index,
        "sample_index": wanted.sample_index,
        "turn": 0,
        "status": str(completion.status),
        "completion": completion.text,
        "completion_ids": list(completion.token_ids),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "stop_reason": completion.stop_reason,
        "incomplete_character": completion.incomplete_character,
        "seed": None if sampling.is_greedy else sampling.seed,
        "max_new_tokens": sampling.max_new_tokens,
        "request_key": key,
        "error": completion.error,
        "cached_tokens": completion.cached_tokens,
        "queue_seconds": completion.queue_seconds,
        "prefill_seconds": completion.prefill_seconds,
        "generate_seconds": completion.generate_seconds,
    }


class _PartSink:
    """Commits finished completions every few rows or seconds, and reports progress."""

    def __init__(
        self,
        spec: BulkInferenceSpec,
        writer: PartitionWriter,
        progress: Progress,
        on_progress: Callable[[Progress], None],
    ):
        self._output, self._writer = spec.output, writer
        self.progress, self._on_progress = progress, on_progress
        self._rows: list[dict[str, Any]] = []
        self._flushed = self._reported = time.monotonic()

    def add(self, row: dict[str, Any]) -> None:
        """Take a finished completion."""
        if not self._rows:
            self._flushed = time.monotonic()  # an idle sink owes nothing
        self._rows.append(row)
        self.progress.done += 1
        self.progress.completion_tokens += row["completion_tokens"]
        if len(self._rows) >= self._output.flush_rows:
            self.flush()

    def tick(self) -> None:
        """Look at the clock; called after each step of the generator."""
        now = time.monotonic()
        if self._rows and now - self._flushed >= self._output.flush_seconds:
            self.flush()
        if now - self._reported >= PROGRESS_SECONDS:
            self._on_progress(self.progress)
            self._reported = now

    def flush(self) -> None:
        """Make what was taken durable."""
        if not self._rows:
            return
        rows = sorted(self._rows, key=lambda row: (row["row_index"], row["sample_index"]))
        with self._writer.new_part(COMPLETIONS_SCHEMA) as part:
            part.write(pa.RecordBatch.from_pylist(rows, schema=COMPLETIONS_SCHEMA))
        self._writer.commit([*self._writer.manifest.parts, part.part], complete=False)
        self._rows.clear()
        self._flushed = time.monotonic()


def _finish(
    prompts: Partition,
    partition: Partition,
    writer: PartitionWriter,
    wanted: pl.DataFrame,
    inputs: dict[str, Any],
    spec: BulkInferenceSpec,
) -> None:
    """Deal the stored completions out to the requests, sort, count, and commit the table."""
    parts = writer.manifest.parts
    served = _served(wanted, _stored(partition, parts), any_error=True)
    assert served.height == wanted.filter("ready").height, (served.height, wanted.height)
    dealt = wanted.select("request", "row_index", "sample_index").join(served, on="request")
    pieces = list(_deal(partition, writer, parts, dealt))
    if not wanted["ready"].all():
        pieces += _not_run(prompts, writer)
    counts: Counter[str] = Counter()
    failed_allowed = spec.output.max_error_rate
    rows = RowStream(prompts.read(["row_id", "row_index"]))
    offset = 0
    with writer.new_part(COMPLETIONS_SCHEMA) as part:
        for table in partition.read_sorted(pieces):
            _check_conserved(table, wanted, offset)
            offset += table.num_rows
            row_ids = rows.take(table["row_index"])["row_id"]
            part.write(table.set_column(0, COMPLETIONS_SCHEMA.field("row_id"), row_ids))
            counts.update(table["status"].to_pylist())
    assert offset == wanted.height, f"{offset} completions for {wanted.height} requests"
    failed = sum(counts.get(status, 0) for status in _FAILED)
    writer.commit(
        [part.part],
        complete=not wanted.height or failed / wanted.height <= failed_allowed,
        inputs=inputs,
        meta={"status_counts": dict(counts)},
    )
    writer.discard(pieces)


def _deal(
    partition: Partition, writer: PartitionWriter, parts: list[Part], dealt: pl.DataFrame
) -> Iterator[Part]:
    """Write sorted pieces: each stored completion under the rows that it answers."""
    for number, part in enumerate(parts):
        places = dealt.filter(pl.col("part") == number).sort("offset")
        offset = 0
        for batch in partition.read_part(part, batch_size=SORT_ROWS):
            inside = pl.col("offset").is_between(offset, offset + batch.num_rows, closed="left")
            here = places.filter(inside).sort("row_index", "sample_index")
            table = pa.Table.from_batches([batch]).take(here["offset"].to_numpy() - offset)
            for name in ("row_index", "sample_index"):
                position = table.schema.get_field_index(name)
                column = here[name].to_arrow()
                table = table.set_column(position, COMPLETIONS_SCHEMA.field(name), column)
            offset += batch.num_rows
            if table.num_rows:
                yield _write_piece(writer, table)


def _not_run(prompts: Partition, writer: PartitionWriter) -> Iterator[Part]:
    """Write sorted pieces of the rows that cannot run: their status and reason, no answer."""
    rows: list[dict[str, Any]] = []
    for wanted in _each_wanted(prompts):
        if wanted.sampling is None:
            rows.append(
                {
                    "row_id": wanted.row_id,
                    "row_index": wanted.row_index,
                    "sample_index": wanted.sample_index,
                    "turn": 0,
                    "status": wanted.status,
                    "prompt_tokens": len(wanted.input_ids),
                    "completion_tokens": 0,
                    "incomplete_character": False,
                    "error": wanted.error,
                    "attempts": 0,
                }
            )
        if len(rows) >= SORT_ROWS:
            yield _write_piece(writer, pa.Table.from_pylist(rows, schema=COMPLETIONS_SCHEMA))
            rows.clear()
    if rows:
        yield _write_piece(writer, pa.Table.from_pylist(rows, schema=COMPLETIONS_SCHEMA))


def _write_piece(writer: PartitionWriter, table: pa.Table) -> Part:
    with writer.new_part(COMPLETIONS_SCHEMA, temporary=True) as part:
        part.write(table)
    return part.part


def _check_conserved(table: pa.Table, wanted: pl.DataFrame, offset: int) -> None:
    """The contract: each request once, none else, in order."""
    expected = wanted.slice(offset, table.num_rows)
    for name in ("row_index", "sample_index"):
        found = table[name].to_numpy()
        assert np.array_equal(found, expected[name].to_numpy()), f"{name} near row {offset}"
