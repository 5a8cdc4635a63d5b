"""Stored completions: which of them answer which request, and those of other partitions."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from bulk_pipeline.engine.request import Status
from bulk_pipeline.stages.wanted import KEY, key_halves, row_hashes
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
BUCKET_REQUESTS = 131_072  # requests joined at once
ALL = "all"

BY_ITSELF, CUT_OFF, NO_ANSWER = range(3)  # how a stored completion ended
STORED_SCHEMA = {
    "kind": pl.UInt8,
    "tokens": pl.Int32,
    "stored_limit": pl.Int32,
    "attempts": pl.Int32,
    "redo": pl.Boolean,
    "key_high": pl.UInt64,
    "key_low": pl.UInt64,
    "row_hash": pl.UInt64,
    "part": pl.UInt32,
    "offset": pl.UInt32,
}

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
    parts = [part.name for part in writer.manifest.parts]
    meta = writer.manifest.meta | {"redo": {"statuses": list(asked), "parts": parts}}
    writer.commit(writer.manifest.parts, complete=False, meta=meta)
    return Redo(asked, frozenset(parts)), True


def stored_completions(
    partition: Partition, parts: Sequence[Part], redo: Redo | None = None
) -> pl.DataFrame:
    """Every completion in the parts that was run, as `STORED_SCHEMA`."""
    frames = [pl.DataFrame(schema=STORED_SCHEMA)]
    columns = ["row_id", "request_key", "status", "completion_tokens", "max_new_tokens", "attempts"]
    for number, part in enumerate(parts):
        offset = 0
        for batch in partition.read_part(part, columns, READ_ROWS):
            frames.append(_stored_batch(batch, number, offset, part.name, redo))
            offset += batch.num_rows
    return pl.concat(frames, rechunk=True)


def _stored_batch(
    batch: pa.RecordBatch, number: int, offset: int, part: str, redo: Redo | None
) -> pl.DataFrame:
    ran = batch.column("request_key").is_valid()
    run = batch.filter(ran)
    statuses = run.column("status").dictionary_encode()
    names = statuses.dictionary.to_pylist()
    codes = statuses.indices.to_numpy()
    kinds = np.array([_kind(name) for name in names], np.uint8)
    redone = np.array([redo is not None and redo.covers(part, name) for name in names], bool)
    halves = key_halves(bytes.fromhex("".join(run.column("request_key").to_pylist())))
    return pl.DataFrame(
        {
            "kind": kinds[codes],
            "tokens": run.column("completion_tokens").to_numpy(),
            "stored_limit": run.column("max_new_tokens").to_numpy(),
            "attempts": run.column("attempts").to_numpy(),
            "redo": redone[codes],
            "key_high": halves[:, 0],
            "key_low": halves[:, 1],
            "row_hash": row_hashes(run.column("row_id")),
            "part": np.full(run.num_rows, number),
            "offset": np.flatnonzero(ran.to_numpy(zero_copy_only=False)) + offset,
        },
        schema_overrides=STORED_SCHEMA,
    )


def _kind(status: str) -> int:
    if status in (Status.STOP, Status.LOOP):
        return BY_ITSELF
    return CUT_OFF if status == Status.LENGTH else NO_ANSWER


def served(wanted: pl.DataFrame, stored: pl.DataFrame, any_error: bool = False) -> pl.DataFrame:
    """Pair every request with the stored completion that answers it: request, part, offset.

    A completion answers a request of equal key if it stopped by itself within the request's
    limit, or was cut off at the same limit. An error answers once it has failed
    `MAX_ATTEMPTS` times, or with `any_error`; it never stands before an answer.
    """
    num_buckets = -(-max(wanted.height, stored.height) // BUCKET_REQUESTS)
    frames = [pl.DataFrame(schema={"request": pl.UInt32, "part": pl.UInt32, "offset": pl.UInt32})]
    for bucket in range(num_buckets):
        here = pl.col("key_low") % num_buckets == bucket
        frames.append(
            _served_bucket(
                wanted.lazy().filter("ready", here),
                stored.lazy().filter(~pl.col("redo"), here),
                any_error,
            )
        )
    return pl.concat(frames, rechunk=True)


def _served_bucket(wanted: pl.LazyFrame, stored: pl.LazyFrame, any_error: bool) -> pl.DataFrame:
    by_itself, cut_off = pl.col("kind") == BY_ITSELF, pl.col("kind") == CUT_OFF
    is_error = pl.col("kind") == NO_ANSWER
    return (
        wanted.select("request", "limit", *KEY)
        .join(stored.drop("row_hash"), on=KEY)
        .filter(
            (by_itself & (pl.col("tokens") <= pl.col("limit")))
            | (cut_off & (pl.col("stored_limit") == pl.col("limit")))
            | (is_error & ((pl.col("attempts") >= MAX_ATTEMPTS) | any_error))
        )
        .sort(is_error, "part", "offset", descending=[True, False, False])
        .group_by("request")
        .agg(pl.last("part"), pl.last("offset"))
        .collect()
    )


def reasons(
    leaders: pl.DataFrame, stored: pl.DataFrame, made_with: dict[str, Any], now: dict[str, Any]
) -> dict[str, int]:
    """Why requests run, as far as it can be known without reading the old prompts.

    ``redo``, ``error_retried``, ``limit_changed`` (the same request with a max_new_tokens that
    the stored answer does not serve); for a row id that has answers to another request,
    ``model_changed`` or else ``sampling_changed`` where these differ from the last complete
    state, whether or not the prompt changed with them, or else ``prompt_changed``; ``changed``
    where there was no complete state; ``new`` for a row id without answers.
    """
    if not stored.height:
        return {"new": leaders.height} if leaders.height else {}
    answered = pl.col("kind") != NO_ANSWER
    by_key = stored.group_by(KEY).agg(
        pl.col("redo").any().alias("is_redo"), (answered & ~pl.col("redo")).any().alias("answered")
    )
    if not made_with:
        changed = "changed"
    elif made_with.get("model") != now["model"]:
        changed = "model_changed"
    elif made_with.get("sampling") != now["sampling"]:
        changed = "sampling_changed"
    else:
        changed = "prompt_changed"
    known_row = pl.col("row_hash").is_in(stored["row_hash"].unique().implode())
    reason = (
        pl.when(pl.col("is_redo"))
        .then(pl.lit("redo"))
        .when(pl.col("answered"))
        .then(pl.lit("limit_changed"))
        .when(pl.col("answered").is_not_null())
        .then(pl.lit("error_retried"))
        .when(known_row)
        .then(pl.lit(changed))
        .otherwise(pl.lit("new"))
    )
    found = leaders.join(by_key, on=KEY, how="left").select(reason.alias("reason"))
    return dict(sorted(found["reason"].value_counts().iter_rows()))


def copy_from_others(store: Store, writer: PartitionWriter, missing: pl.DataFrame) -> int:
    """Copy answers to `missing` requests out of the dataset's other partitions.

    Also out of those that the partitioning no longer has. Holds the keys of one part at a time.
    """
    own, num_copied = writer.partition.key, 0
    for key in store.partition_keys(COMPLETIONS):
        if key == own or not missing.height:
            continue
        try:
            other = store.partition(COMPLETIONS, key)
            manifest = other.manifest()
            for part in manifest.parts if manifest else []:
                completions = stored_completions(other, [part])
                found = served(missing, completions.filter(pl.col("kind") != NO_ANSWER))
                if found.height:
                    _copy(other, part, writer, found["offset"].unique().sort().to_numpy())
                    missing = missing.join(found, on="request", how="anti")
                    num_copied += found.height
        except (ValueError, FileNotFoundError) as error:  # it is being written, or is damaged
            log.warning("answers of partition %s are not looked at: %s", key, error)
    return num_copied


def _copy(other: Partition, part: Part, writer: PartitionWriter, offsets: np.ndarray) -> None:
    offset = 0
    with writer.new_part(COMPLETIONS_SCHEMA) as copy:
        for batch in other.read_part(part, batch_size=READ_ROWS):
            first, last = np.searchsorted(offsets, [offset, offset + batch.num_rows])
            copy.write(batch.take(pa.array(offsets[first:last] - offset)))
            offset += batch.num_rows
    writer.commit([*writer.manifest.parts, copy.part], complete=False)
