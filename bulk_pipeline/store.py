"""Partitioned Parquet tables on a local disk or object storage, committed one way.

``<root>/<dataset>/<table>/<partition>/`` holds immutable parts with unique names, and
``manifest.json``, which says which of them count and is replaced in one step. A reader that goes
by the manifest sees one committed state and never half a file. A second writer is kept out by a
lock on a local disk. On object storage it takes the partition over, by putting a manifest with
the next epoch: whoever held it before cannot commit any more, since each manifest is put on
condition that the writer's last one is still there.
"""

import errno
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import filelock
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ValidationError

from bulk_pipeline.objects import (
    SCHEMES,
    ChangedError,
    ObjectStorage,
    StorageError,
    Version,
    is_object_url,
)

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
SET_ASIDE = "_set_aside"
TEMPORARY = ".tmp-"  # starts the name of a file that no manifest will ever name
ROW_GROUP_ROWS = 16_384  # what a reader holds at once, and 150 KB for each group of a file
ROW_GROUP_BYTES = 64 << 20  # long rows come in smaller groups
PIECE_ROWS = 1024  # the same for a temporary part, since many of them are merged at once
EPOCH = re.compile(rf"(?:part-|{re.escape(TEMPORARY)})(\d{{6,}})-[0-9a-f]{{32}}\.parquet")
READERS = 16  # requests to object storage at once, where many small files are read
PARTITION_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,149}")

RAW_DATASET, PROMPTS, COMPLETIONS, OUTPUT = "raw_dataset", "prompts", "completions", "output"
TABLES = (RAW_DATASET, PROMPTS, COMPLETIONS, OUTPUT)
SLICES = "slices"  # folder of the slices of completions, beside the tables

T = TypeVar("T")
R = TypeVar("R")

fault = os.environ.get("BULK_PIPELINE_FAULT", "")  # <point>:<nth time>:<KILL or TERM>, for tests
points_passed: Counter[str] = Counter()


def fault_point(name: str) -> None:
    """Mark a step at which a test may end the process; nothing happens elsewhere."""
    points_passed[name] += 1
    if fault and fault.startswith(f"{name}:{points_passed[name]}:"):
        os.kill(os.getpid(), signal.Signals[f"SIG{fault.rpartition(':')[2]}"])


@contextmanager
def disk_errors(path: str) -> Iterator[None]:
    """Say in one line what is wrong with the disk, where, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            reason = "the disk cannot be written; make it writable, or set another output.root"
        else:
            raise
        raise OSError(
            error.errno, f"{path}: {reason}, then run again: what was committed is kept"
        ) from None


def _field(name: str, type_: pa.DataType, description: str, stable: bool = True) -> pa.Field:
    """Describe a column; one that is not stable may differ between two equal runs."""
    metadata = {"description": description} | ({} if stable else {"stable": "false"})
    return pa.field(name, type_, metadata=metadata)


ROW_FIELDS = (
    _field("row_id", pa.string(), "Identity of the input row, unique in its partition"),
    _field("row_index", pa.int64(), "Place of the input row in its partition, from 0"),
)
ROW_ERROR_FIELD = _field(
    "row_error", pa.string(), "Why the row cannot be used as it stands in the source, else null"
)

THINKING_FIELDS = [
    ("tokens", pa.int64()),
    ("start", pa.string()),
    ("end", pa.string()),
    ("is_open", pa.bool_()),
]
SAMPLING_TYPE = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("min_p", pa.float64()),
        ("max_new_tokens", pa.int64()),
        ("min_new_tokens", pa.int64()),
        ("seed", pa.int64()),
        ("stop", pa.list_(pa.string())),
        ("stop_token_ids", pa.list_(pa.int64())),
        ("repetition_penalty", pa.float64()),
        ("frequency_penalty", pa.float64()),
        ("presence_penalty", pa.float64()),
        ("logit_bias", pa.list_(pa.struct([("token_id", pa.int64()), ("bias", pa.float64())]))),
        ("banned_token_ids", pa.list_(pa.int64())),
        ("logprobs", pa.int64()),
        ("prompt_logprobs", pa.bool_()),
        ("structured", pa.struct([("kind", pa.string()), ("value", pa.string())])),
        ("loop_guard", pa.struct([("ngram", pa.int64()), ("repeats", pa.int64())])),
        ("allowed_token_ids", pa.list_(pa.int64())),
        ("bad_words", pa.list_(pa.string())),
        ("banned_strings", pa.list_(pa.string())),
        ("thinking", pa.struct(THINKING_FIELDS)),
        ("adapter", pa.string()),
    ]
)
TOP_LOGPROBS_TYPE = pa.list_(
    pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())]))
)

LATER_TURNS_TYPE = pa.list_(pa.struct([("text", pa.string()), ("input_ids", pa.list_(pa.int32()))]))

PROMPTS_SCHEMA = pa.schema(
    [
        *ROW_FIELDS,
        _field("prompt", pa.string(), "The exact text given to the model"),
        _field("input_ids", pa.list_(pa.int32()), "The prompt's token ids"),
        _field("prompt_tokens", pa.int32(), "Number of token ids"),
        _field("status", pa.string(), "ready, or why the row cannot run"),
        _field("error", pa.string(), "The reason in words, where status is not ready"),
        _field("truncated", pa.bool_(), "Whether the row's message was cut to fit"),
        _field("sampling", SAMPLING_TYPE, "The row's sampling values; seed is the run's"),
        _field("num_samples", pa.int32(), "How many completions the row asks for"),
        _field("num_turns", pa.int32(), "How many turns each of them has"),
        _field("later_turns", LATER_TURNS_TYPE, "What the model is given after each answer"),
    ]
)

COMPLETIONS_SCHEMA = pa.schema(
    [
        *ROW_FIELDS,
        _field("sample_index", pa.int32(), "Which of the row's samples, from 0"),
        _field("turn", pa.int32(), "Which turn of a row with several, from 0"),
        _field("status", pa.string(), "How the request ended"),
        _field("completion", pa.string(), "The answer, without what ended it"),
        _field("completion_ids", pa.list_(pa.int32()), "All generated token ids"),
        _field("prompt_tokens", pa.int32(), "Tokens of the prompt"),
        _field("completion_tokens", pa.int32(), "Tokens generated, the end token included"),
        _field("stop_reason", pa.string(), "The end token's id or the stop string"),
        _field("incomplete_character", pa.bool_(), "Whether a cut-off character was removed"),
        _field("seed", pa.uint64(), "The request's own seed; null where sampling is greedy"),
        _field("max_new_tokens", pa.int32(), "The limit the request ran with"),
        _field("request_key", pa.string(), "Hash of what decides the answer; null if not run"),
        _field("error", pa.string(), "Why there is no usable answer, else null"),
        _field("produced_by", pa.string(), "Model, versions, settings as JSON", stable=False),
        _field("attempts", pa.int32(), "How often the request was started", stable=False),
        _field("cached_tokens", pa.int32(), "Prompt tokens found in the cache", stable=False),
        _field("queue_seconds", pa.float32(), "Seconds in the queue", stable=False),
        _field("prefill_seconds", pa.float32(), "Seconds to the first token", stable=False),
        _field("generate_seconds", pa.float32(), "Seconds from then to the last", stable=False),
        _field("logprobs", pa.list_(pa.float32()), "Each generated token's log-probability"),
        _field("cumulative_logprob", pa.float64(), "The sum of logprobs"),
        _field("top_logprobs", TOP_LOGPROBS_TYPE, "The best tokens in each one's place"),
        _field(
            "prompt_logprobs",
            pa.list_(pa.float32()),
            "Each prompt token's log-probability, the first one's apart",
        ),
        _field("answers_before", pa.uint64(), "Hash of the answers of the turns before, or null"),
    ]
)
FIXED_SCHEMAS = {PROMPTS: PROMPTS_SCHEMA, COMPLETIONS: COMPLETIONS_SCHEMA}

# What the output table takes from a completion, behind the source's columns.
OUTPUT_FIELDS = tuple(
    COMPLETIONS_SCHEMA.field(name)
    for name in (
        "sample_index",
        "turn",
        "status",
        "completion",
        "prompt_tokens",
        "completion_tokens",
        "stop_reason",
        "incomplete_character",
        "seed",
        "request_key",
        "error",
    )
)
# What it has besides where that is asked for, from the completion or made of it.
LOGPROB_FIELDS = tuple(
    COMPLETIONS_SCHEMA.field(name)
    for name in ("logprobs", "cumulative_logprob", "top_logprobs", "completion_ids")
)
PROMPT_LOGPROB_FIELDS = (
    COMPLETIONS_SCHEMA.field("prompt_logprobs"),
    _field("cumulative_prompt_logprob", pa.float64(), "The sum of prompt_logprobs"),
    _field("perplexity", pa.float64(), "Of the prompt: e to the mean of -prompt_logprobs"),
)
REASONING_FIELD = _field("reasoning", pa.string(), "What the model thought before its answer")
PARSED_FIELD = _field("parsed", pa.bool_(), "Whether the answer is what the schema describes")
OUR_COLUMNS = frozenset(
    field.name
    for field in (
        *ROW_FIELDS,
        ROW_ERROR_FIELD,
        *PROMPTS_SCHEMA,
        *COMPLETIONS_SCHEMA,
        *PROMPT_LOGPROB_FIELDS,
        REASONING_FIELD,
        PARSED_FIELD,
    )
)


class Part(BaseModel):
    """One immutable Parquet file of a partition.

    `first_index` and `last_index` are the smallest and largest ``row_index`` in it.
    """

    name: str
    rows: int
    bytes: int
    first_index: int
    last_index: int


class Writer(BaseModel):
    """Who holds a partition for writing, or held it last."""

    id: str
    host: str
    pid: int
    started: float


class Manifest(BaseModel):
    """The committed state of one partition of one table.

    `kept` are parts whose rows the table does not hold now, for when they are asked for again.
    """

    schema_version: int = SCHEMA_VERSION
    table: str
    partition: str
    epoch: int = 0
    writer: Writer | None = None
    complete: bool = False
    parts: list[Part] = []
    kept: list[Part] = []
    inputs: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    replaced: list[str] = []  # parts that the last commit replaced; deleted, or about to be

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return sum(part.rows for part in self.parts)

    @property
    def stored(self) -> list[Part]:
        """All parts: those kept, then the table's."""
        return [*self.kept, *self.parts]


def is_partition_key(key: str) -> bool:
    """Whether a path may be built from `key`."""
    return PARTITION_KEY.fullmatch(key) is not None and ".." not in key


def check_partition_key(key: str) -> str:
    """Return `key` if a path may be built from it.

    Raises
    ------
    ValueError
        If it does not match ``[A-Za-z0-9][A-Za-z0-9_.-]{0,149}`` or holds ``..``.
    """
    if not is_partition_key(key):
        raise ValueError(
            f"partition key must be 1 to 150 letters, digits, '_', '-' or single '.', "
            f"starting with a letter or digit, got {key!r}; rename it"
        )
    return key


class Store:
    """All tables of one dataset.

    Parameters
    ----------
    root
        Local folder, or a URL: s3://, gs://, az:// or memory://.
    dataset
        The dataset's name, a folder under `root`.
    storage_options
        Options of `ObjectStorage`.

    Raises
    ------
    ValueError
        If `root` is another kind of URL, or an option is unknown.
    """

    def __init__(self, root: str, dataset: str, storage_options: dict[str, Any] | None = None):
        self.dataset = dataset
        self.is_local = not is_object_url(root)
        if self.is_local:
            if "://" in root and not root.startswith(("file://", "local://")):
                raise ValueError(
                    f"output.root must be a folder or a URL that starts with one of "
                    f"{', '.join(f'{scheme}://' for scheme in SCHEMES)}, got {root!r}; set another"
                )
            self.fs, path = LocalFileSystem(), LocalFileSystem._strip_protocol(root)
        else:
            self.fs, path = ObjectStorage(root.partition("://")[0], **(storage_options or {})), root
        self.path = f"{path.rstrip('/')}/{dataset}"

    def partition(self, table: str, key: str) -> "Partition":
        """One partition of one of `TABLES`, whether or not it exists yet."""
        assert table in TABLES, table
        return Partition(self, table, check_partition_key(key))

    def slice(self, key: str, number: int, of: int) -> "Partition":
        """One of the slices in which a partition's completions are made, counted from 1."""
        return Partition(self, COMPLETIONS, check_partition_key(key), f"{number}-of-{of}")

    def slices(self, key: str) -> list["Partition"]:
        """The slices of a partition's completions that were begun, however it was cut."""
        names = self._names(f"{SLICES}/{check_partition_key(key)}")
        return [Partition(self, COMPLETIONS, key, name) for name in names]

    def partition_keys(self, table: str) -> list[str]:
        """Keys of the partitions of a table that were begun, sorted."""
        return self._names(table)

    def _names(self, folder: str) -> list[str]:
        try:
            folders = self.fs.ls(f"{self.path}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        names = (folder.rstrip("/").rpartition("/")[2] for folder in folders)
        return sorted(name for name in names if is_partition_key(name))

    def manifests(self, table: str, keys: Sequence[str]) -> dict[str, Manifest | None]:
        """The manifests of many partitions, read at the same time where each is a request."""
        partitions = [self.partition(table, key) for key in keys]
        return dict(zip(keys, self.read_many(Partition.manifest, partitions), strict=True))

    def read_many(self, read: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """What `read` makes of each item; at the same time on object storage, where it waits."""
        if self.is_local:
            return [read(item) for item in items]
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(read, items))

    def set_aside_sizes(self) -> list[int]:
        """Bytes of each file that was found torn or foreign; lists everything of the dataset."""
        found = self.fs.find(self.path, detail=True)
        return [each["size"] for path, each in found.items() if f"/{SET_ASIDE}/" in path]

    def read_json(self, name: str) -> Any:
        """The value stored under `name`, or None."""
        try:
            return json.loads(self.fs.cat_file(f"{self.path}/{name}"))
        except FileNotFoundError:
            return None

    def write_json(self, name: str, value: Any) -> None:
        """Store `value` under `name`, in one step."""
        text = json.dumps(value, indent=1, sort_keys=True)
        with self.open_atomic(f"{self.path}/{name}") as file:
            file.write(text.encode())

    def read_seen_json(self, name: str) -> tuple[Any, Version | None]:
        """The value stored under `name`, or None, and what `replace_json` wants to know."""
        if self.is_local:
            return self.read_json(name), None
        try:
            data, seen = self.fs.read_version(f"{self.path}/{name}")
        except FileNotFoundError:
            return None, None
        return json.loads(data), seen

    def replace_json(self, name: str, value: Any, seen: Version | None) -> None:
        """Store `value` under `name`; on object storage, only if it is still what was seen.

        Raises
        ------
        ChangedError
            If somebody else has changed it.
        """
        if self.is_local:
            self.write_json(name, value)
            return
        text = json.dumps(value, indent=1, sort_keys=True)
        self.fs.replace(f"{self.path}/{name}", text.encode(), seen)

    @contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        """Open `path` for writing; it appears, whole, only when the block ends without error."""
        folder, _, name = path.rpartition("/")
        kind = _kind(name)
        fault_point(f"{kind} open")
        if not self.is_local:
            # Never a file that is open on the storage: closing it would commit what is there.
            with tempfile.TemporaryFile() as spool:
                yield spool
                spool.seek(0)
                fault_point(f"{kind} upload")
                self.fs.upload(path, spool)
            fault_point(f"{kind} uploaded")
            return
        temporary = f"{folder}/{TEMPORARY}{uuid.uuid4().hex}-{name}"
        with disk_errors(path):
            os.makedirs(folder, exist_ok=True)
            try:
                with open(temporary, "wb") as file:
                    yield file
                    fault_point(f"{kind} flush")
                    file.flush()
                    fault_point(f"{kind} sync")
                    os.fsync(file.fileno())
                fault_point(f"{kind} replace")
                os.replace(temporary, path)
            except BaseException:
                _remove_if_there(temporary)
                raise
            fault_point(f"{kind} sync folder")
            _sync_folder(folder)


class DamagedManifestError(ValueError):
    """A manifest that cannot be read; the next writer makes a new one from the parts."""


class Partition:
    """One partition of one table: read through its manifest, written through `writer`.

    So is a slice of one, in a folder of its own.
    """

    def __init__(self, store: Store, table: str, key: str, slice_name: str = ""):
        self.store, self.table, self.key, self.slice_name = store, table, key, slice_name
        self.path = f"{store.path}/{table}/{key}"
        if slice_name:
            self.path = f"{store.path}/{SLICES}/{key}/{slice_name}"

    @property
    def label(self) -> str:
        """How messages name the partition."""
        slice_name = self.slice_name and f" (slice {self.slice_name})"
        return f"{self.store.dataset}/{self.table}/{self.key}{slice_name}"

    def manifest(self) -> Manifest | None:
        """The committed state, or None where nothing was ever written.

        Raises
        ------
        ValueError
            If the manifest cannot be read, or was written by a newer version.
        """
        try:
            return self._parse(self.store.fs.cat_file(f"{self.path}/{MANIFEST}"))
        except FileNotFoundError:
            return None

    def _parse(self, data: bytes) -> Manifest:
        path = f"{self.path}/{MANIFEST}"
        try:
            manifest = Manifest.model_validate_json(data)
        except ValidationError:
            raise DamagedManifestError(
                f"{path} is not a manifest; materialise {self.table} again, which makes it anew"
            ) from None
        if manifest.schema_version > SCHEMA_VERSION:
            raise ValueError(
                f"{path} has schema version {manifest.schema_version}, this version reads up to "
                f"{SCHEMA_VERSION}; upgrade bulk_pipeline"
            )
        return manifest

    def complete_manifest(self) -> Manifest:
        """The manifest of a finished partition.

        Raises
        ------
        ValueError
            If the partition is missing or unfinished.
        """
        manifest = self.manifest()
        if manifest is None or not manifest.complete:
            state = "missing" if manifest is None else "unfinished"
            raise ValueError(
                f"partition {self.key} of {self.table} is {state}; materialise "
                f"{self.store.dataset}/{self.table} for it first"
            )
        return manifest

    def part_path(self, part: Part) -> str:
        """Where a part is."""
        return f"{self.path}/{part.name}"

    def schema(self) -> pa.Schema:
        """The table's schema, from its first part."""
        with self._open(self.complete_manifest().parts[0]) as file:
            return file.schema_arrow

    def read(
        self, columns: Sequence[str] | None = None, batch_size: int = 1024
    ) -> Iterator[pa.RecordBatch]:
        """Yield the finished partition's rows, in order, a bounded number at a time."""
        for part in self.complete_manifest().parts:
            yield from self.read_part(part, columns, batch_size)

    def read_part(
        self, part: Part, columns: Sequence[str] | None = None, batch_size: int = 1024
    ) -> Iterator[pa.RecordBatch]:
        """Yield one part's rows; what an earlier version did not have is null.

        Raises
        ------
        ValueError
            If the file is missing, or is not the one that was committed.
        """
        self.check_part(part)
        try:
            with self._open(part) as file:
                for batch in file.iter_batches(batch_size, columns=columns):
                    yield _with_later_columns(batch, FIXED_SCHEMAS.get(self.table), columns)
        except StorageError:  # which says nothing against the part
            raise
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{self.part_path(part)} is damaged ({reason}); move the file away and "
                f"materialise {self.table} again"
            ) from error

    def read_sorted(self, parts: Sequence[Part], batch_size: int = 1024) -> Iterator[pa.Table]:
        """Merge parts that are each sorted by row_index, sample_index and turn.

        Opens only parts whose row ranges overlap, and holds `batch_size` rows of each.
        """
        waiting = sorted(parts, key=lambda part: part.first_index)
        cursors: list[_Cursor] = []
        while waiting or cursors:
            bound = min((cursor.bound() for cursor in cursors), default=None)
            if waiting and (bound is None or waiting[0].first_index < bound):
                cursors.append(_Cursor(self.read_part(waiting.pop(0), batch_size=batch_size)))
                continue
            assert bound is not None
            if tables := [table for cursor in cursors if (table := cursor.take_below(bound))]:
                yield pa.concat_tables(tables).sort_by(
                    [(name, "ascending") for name in ("row_index", "sample_index", "turn")]
                )
            cursors = [cursor for cursor in cursors if not cursor.is_done]

    def delete(self, name: str) -> None:
        """Delete a file of the partition, if it is there."""
        try:
            self.store.fs.rm_file(f"{self.path}/{name}")
        except FileNotFoundError:
            pass

    def delete_all(self) -> None:
        """Delete the partition with everything in it; nobody may be writing it."""
        for name in (MANIFEST, *self.file_sizes()):  # what no manifest names does not count
            self.delete(name)
        if self.store.is_local:
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def writer(self) -> Iterator["PartitionWriter"]:
        """Hold the partition for writing.

        Raises
        ------
        RuntimeError
            If another run is writing it; the message names that run.
        """
        with ExitStack() as stack:
            if self.store.is_local:
                try:
                    with disk_errors(self.path):
                        os.makedirs(self.path, exist_ok=True)
                        stack.enter_context(filelock.FileLock(f"{self.path}/.lock", timeout=0))
                except filelock.Timeout:
                    raise RuntimeError(self._busy(self.manifest())) from None
            writer = PartitionWriter(self)
            try:
                writer.clear_away()
                yield writer
            except StorageError:
                raise
            except (OSError, ValueError) as error:
                # One that takes the partition over clears away what is not committed.
                if not self.store.is_local and (holder := writer.overtaken_by()):
                    raise RuntimeError(self._busy(holder)) from error
                raise

    def _busy(self, manifest: Manifest | None) -> str:
        holder = "another run"
        if manifest and (writer := manifest.writer):
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(writer.started))
            holder = f"a run on {writer.host} (process {writer.pid}, since {since})"
        return f"{self.label} is being written by {holder}; wait for it or stop it"

    def check_part(self, part: Part) -> None:
        """Raise a ValueError if a part is missing, or is not the file that was committed."""
        try:
            sizes = {part.name: self.store.fs.size(self.part_path(part))}
        except FileNotFoundError:
            sizes = {}
        self._raise_problem(part, sizes)

    def check_parts(self, parts: Sequence[Part]) -> None:
        """The same for several parts, with one look at the folder."""
        sizes = self.file_sizes()
        for part in parts:
            self._raise_problem(part, sizes)

    def file_sizes(self) -> dict[str, int]:
        """What lies in the partition's folder, by name: one request for a thousand files."""
        try:
            entries = self.store.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        return {
            entry["name"].rpartition("/")[2]: entry["size"]
            for entry in entries
            if entry["type"] == "file"
        }

    def _raise_problem(self, part: Part, sizes: Mapping[str, int]) -> None:
        if problem := _problem(part, sizes):
            raise ValueError(f"{self.part_path(part)} {problem}; materialise {self.table} again")

    @contextmanager
    def _open(self, part: Part) -> Iterator[pq.ParquetFile]:
        path = self.part_path(part)
        # Arrow's own file leaves no holes in Python's memory.
        if self.store.is_local:
            opened = pa.OSFile(path)
        else:
            opened = self.store.fs.open(path, "rb", size=part.bytes)
        with opened as raw, pq.ParquetFile(raw, page_checksum_verification=True) as file:
            yield file


class PartitionWriter:
    """The right to write one partition: adds parts, and says which of them count.

    `Partition.writer` makes one, and has it clear the folder.

    Attributes
    ----------
    manifest
        The last committed state; parts that turned out torn or missing are not in it.
    set_aside
        Files that were found torn or foreign, by their new paths.
    lost
        Committed parts that are missing or torn, and how.
    """

    def __init__(self, partition: Partition):
        self.partition = partition
        self.set_aside: list[str] = []
        self.lost: list[str] = []
        self._seen: Version | None = None  # the state of the manifest on object storage
        try:
            manifest = self._read_manifest()
        except DamagedManifestError:
            manifest = self._adopt_parts()
        manifest = manifest or Manifest(table=partition.table, partition=partition.key)
        self.manifest = manifest.model_copy(
            update={
                "epoch": manifest.epoch + 1,
                "writer": Writer(
                    id=uuid.uuid4().hex,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    started=time.time(),
                ),
            }
        )
        self._write_manifest()  # from here on the partition is this writer's

    @contextmanager
    def new_part(self, schema: pa.Schema, temporary: bool = False) -> Iterator["PartWriter"]:
        """Write a part, a batch at a time; it counts only once it is committed.

        `PartWriter.part` describes it after the block. A `temporary` part is never committed:
        it is deleted with `discard`, or by the next writer.
        """
        prefix = TEMPORARY if temporary else "part-"
        name = f"{prefix}{self.manifest.epoch:06d}-{uuid.uuid4().hex}.parquet"
        store = self.partition.store
        metadata = {**(schema.metadata or {}), b"schema_version": str(SCHEMA_VERSION).encode()}
        with store.open_atomic(f"{self.partition.path}/{name}") as file:
            with pq.ParquetWriter(
                file,
                schema.with_metadata(metadata),
                compression="zstd",
                write_page_checksum=True,
                # Bounds of long texts would fill the footer, which a reader holds whole.
                write_statistics=[f.name for f in schema if not pa.types.is_string(f.type)],
            ) as parquet:
                rows = PIECE_ROWS if temporary else ROW_GROUP_ROWS
                part_writer = PartWriter(parquet, schema, rows)
                yield part_writer
                part_writer.flush()
            size = file.tell()
        part_writer.part = Part(
            name=name,
            rows=part_writer.rows,
            bytes=size,
            first_index=part_writer.first_index,
            last_index=part_writer.last_index,
        )

    def commit(
        self,
        parts: Sequence[Part],
        complete: bool,
        inputs: dict[str, Any] | None = None,
        meta: dict[str, Any] | None = None,
        kept: Sequence[Part] | None = None,
    ) -> None:
        """Make `parts` the table, in one step, and delete the parts that were replaced.

        What is None stays as it is.

        Raises
        ------
        RuntimeError
            If another writer has taken the partition over.
        """
        if self.partition.store.is_local:
            current = self.partition.manifest()
            if current is None or current.writer != self.manifest.writer:
                raise RuntimeError(self.partition._busy(current))
        fault_point("commit")
        kept = self.manifest.kept if kept is None else kept
        replaced = {part.name for part in self.manifest.stored}
        replaced -= {part.name for part in (*parts, *kept)}
        self.manifest = self.manifest.model_copy(
            update={
                "parts": list(parts),
                "kept": list(kept),
                "complete": complete,
                "inputs": self.manifest.inputs if inputs is None else inputs,
                "meta": self.manifest.meta if meta is None else meta,
                "replaced": sorted(replaced),
            }
        )
        self._write_manifest()
        for name in self.manifest.replaced:
            fault_point("delete part")
            self.partition.delete(name)

    def discard(self, parts: Sequence[Part]) -> None:
        """Delete temporary parts."""
        for part in parts:
            fault_point("delete piece")
            self.partition.delete(part.name)

    def overtaken_by(self) -> Manifest | None:
        """The manifest of another writer that has taken the partition over, or None."""
        current = sound_manifest(self.partition)
        return current if current and current.writer != self.manifest.writer else None

    def _read_manifest(self) -> Manifest | None:
        store, path = self.partition.store, f"{self.partition.path}/{MANIFEST}"
        if store.is_local:
            return self.partition.manifest()
        try:
            data, self._seen = store.fs.read_version(path)
        except FileNotFoundError:
            return None
        return self.partition._parse(data)

    def _write_manifest(self) -> None:
        store, path = self.partition.store, f"{self.partition.path}/{MANIFEST}"
        data = self.manifest.model_dump_json(indent=1).encode()
        if store.is_local:
            with store.open_atomic(path) as file:
                file.write(data)
            return
        fault_point("manifest open")
        try:
            self._seen = store.fs.replace(path, data, self._seen)
        except ChangedError:
            raise RuntimeError(self.partition._busy(sound_manifest(self.partition))) from None
        fault_point("manifest uploaded")
        store.fs.check_conditions(path, data)

    def _adopt_parts(self) -> Manifest:
        """Put a damaged manifest aside; what whole parts hold is not lost with it."""
        fs, folder = self.partition.store.fs, self.partition.path
        self._put_aside(MANIFEST, f"{uuid.uuid4().hex}-{MANIFEST}")
        self._seen = None
        parts = []
        for path in fs.glob(f"{folder}/part-*.parquet"):
            try:
                with fs.open(path, "rb") as raw, pq.ParquetFile(raw) as file:
                    rows, bounds = file.metadata.num_rows, _row_index_bounds(file)
            except StorageError:
                raise
            except (pa.ArrowException, OSError):
                continue  # not whole: set aside with the strangers
            parts.append(
                Part(
                    name=path.rpartition("/")[2],
                    rows=rows,
                    bytes=fs.size(path),
                    first_index=bounds[0],
                    last_index=bounds[1],
                )
            )
        return Manifest(
            table=self.partition.table,
            partition=self.partition.key,
            epoch=max((_epoch(part.name) for part in parts), default=0),
            parts=parts,
        )

    def _put_aside(self, name: str, new_name: str) -> None:
        fs, folder = self.partition.store.fs, self.partition.path
        fs.makedirs(f"{folder}/{SET_ASIDE}", exist_ok=True)
        fs.mv(f"{folder}/{name}", f"{folder}/{SET_ASIDE}/{new_name}")
        self.set_aside.append(f"{folder}/{SET_ASIDE}/{new_name}")

    def clear_away(self) -> None:
        """Move away what no manifest names and parts that are not as committed."""
        with disk_errors(self.partition.path):
            self._set_aside_strangers()
        if self.lost:
            self._write_manifest()

    def _set_aside_strangers(self) -> None:
        folder, sizes = self.partition.path, self.partition.file_sizes()
        problems = {part.name: _problem(part, sizes) for part in self.manifest.stored}
        torn = {name for name, problem in problems.items() if problem}
        self.lost += [f"{folder}/{name} {problems[name]}" for name in sorted(torn)]
        known = problems.keys() - torn
        for name in sizes:
            if _epoch(name) >= self.manifest.epoch:
                continue  # of a writer that has taken the partition over meanwhile
            if name.startswith(TEMPORARY) or name in self.manifest.replaced:
                self.partition.delete(name)  # an interrupted write or deletion of ours
            elif name.endswith(".parquet") and name not in known:
                with suppress(FileNotFoundError):  # a writer that was overtaken did it
                    self._put_aside(name, name)
        self.manifest.kept = [p for p in self.manifest.kept if p.name not in torn]
        if torn & {part.name for part in self.manifest.parts}:
            self.manifest.parts = [p for p in self.manifest.parts if p.name not in torn]
            self.manifest.complete = False


def sound_manifest(partition: Partition) -> Manifest | None:
    """The committed state; None also where it cannot be read, since a run then makes it anew."""
    try:
        return partition.manifest()
    except ValueError:
        return None


def _epoch(name: str) -> int:
    """The epoch of the writer of a part, going by its name; 0 for what is none of ours."""
    match = EPOCH.match(name)
    return int(match[1]) if match else 0


def _problem(part: Part, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with a part, going by the sizes of the files that are there."""
    size = sizes.get(part.name)
    if size is None:
        return "is missing"
    return None if size == part.bytes else f"is torn ({size} of {part.bytes} bytes)"


def _with_later_columns(
    batch: pa.RecordBatch, schema: pa.Schema | None, columns: Sequence[str] | None
) -> pa.RecordBatch:
    """The batch with nulls for those of the columns that came into the schema after it."""
    names = [] if schema is None else schema.names if columns is None else columns
    if schema is None or not set(names) - set(batch.schema.names):
        return batch
    arrays = {name: batch.column(name) for name in batch.schema.names}
    for name in names:
        if name not in arrays:
            arrays[name] = pa.nulls(batch.num_rows, schema.field(name).type)
    # the schema's own order, where whole rows are asked for
    order = schema.names if columns is None else list(arrays)
    return pa.RecordBatch.from_arrays([arrays[name] for name in order], names=order)


def _row_index_bounds(file: pq.ParquetFile) -> tuple[int, int]:
    """The smallest and largest row_index of a part."""
    if not file.metadata.num_rows:
        return 0, -1
    indices = pc.min_max(file.read(["row_index"])["row_index"])
    return indices["min"].as_py(), indices["max"].as_py()


class PartWriter:
    """Collects batches into row groups of one Parquet file."""

    part: Part

    def __init__(self, parquet: pq.ParquetWriter, schema: pa.Schema, group_rows: int):
        self._parquet, self._schema, self._group_rows = parquet, schema, group_rows
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_bytes = 0
        self.rows = 0
        self.first_index, self.last_index = 0, -1

    def write(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Add rows; their columns must be the schema's."""
        if not batch.num_rows:
            return
        bounds = pc.min_max(batch.column("row_index"))
        first, last = bounds["min"].as_py(), bounds["max"].as_py()
        self.first_index = min(self.first_index, first) if self.rows else first
        self.last_index = max(self.last_index, last)
        self.rows += batch.num_rows
        for rows in batch.to_batches() if isinstance(batch, pa.Table) else [batch]:
            while rows.num_rows:
                some = rows.slice(0, self._group_rows - self._pending_rows)
                rows = rows.slice(some.num_rows)
                self._pending.append(some)
                self._pending_rows += some.num_rows
                self._pending_bytes += some.nbytes
                if self._pending_rows >= self._group_rows or self._pending_bytes >= ROW_GROUP_BYTES:
                    self.flush()

    def flush(self) -> None:
        """Write what was collected as a row group."""
        if self._pending:
            fault_point("part write")
            table = pa.Table.from_batches(self._pending)
            # Arrow's cast breaks lists of nulls, even to the same type.
            is_same = table.schema.equals(self._schema)
            table = table if is_same else table.cast(self._schema)
            self._parquet.write_table(table)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0


class _Cursor:
    """A sorted part being merged: the rows read so far that were not taken yet."""

    def __init__(self, batches: Iterator[pa.RecordBatch]):
        self._batches = batches
        self._rows: pa.Table | None = None
        self._next = next(batches, None)
        self.is_done = False
        self._advance()

    def _advance(self) -> None:
        if self._next is None:
            self.is_done = self._rows is None or not self._rows.num_rows
            return
        tables = [self._rows] if self._rows is not None and self._rows.num_rows else []
        self._rows = pa.concat_tables([*tables, pa.Table.from_batches([self._next])])
        self._next = next(self._batches, None)

    def bound(self) -> float:
        """All of this part's rows below this row_index are at hand."""
        if self._next is None:
            return float("inf")
        assert self._rows is not None
        return self._rows["row_index"][-1].as_py()

    def take_below(self, bound: float) -> pa.Table | None:
        """Take the rows at hand with a row_index below `bound`, and read on."""
        if self._rows is None:
            return None
        taken: pa.Table | None
        if bound == float("inf"):
            taken, self._rows = self._rows, None
        else:
            num = pc.sum(pc.less(self._rows["row_index"], bound)).as_py() or 0
            taken, self._rows = self._rows.slice(0, num), self._rows.slice(num)
        if self.bound() == bound or not (self._rows is not None and self._rows.num_rows):
            self._advance()
        return taken if taken is not None and taken.num_rows else None


def _kind(name: str) -> str:
    """What a file is, as fault points name it: manifest, part, piece or the name's ending."""
    if name.endswith(".parquet"):
        return "piece" if name.startswith(TEMPORARY) else "part"
    return "manifest" if name == MANIFEST else name


def _remove_if_there(path: str) -> None:
    try:
        os.remove(path)
    except FileNotFoundError:
        pass


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage did to one partition, as `assets.py` shows it."""

    partition: str
    rows: int
    path: str
    metadata: dict[str, Any]
