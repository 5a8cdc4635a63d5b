"""Readers: a source in, batches of rows out, in the source's order and in bounded memory.

Nothing is repaired silently: a file that cannot be read is an error that names file and line; a
row with text that is not UTF-8 is kept, and says so.
"""

import codecs
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import fsspec
import pyarrow as pa

from bulk_pipeline.spec import FilesSource, HuggingFaceSource
from bulk_pipeline.stages.formats.batch import BATCH_ROWS, Batch
from bulk_pipeline.stages.formats.json import json_lines, read_json, read_jsonl
from bulk_pipeline.stages.formats.openai_batch import find_batch, read_openai_batch
from bulk_pipeline.stages.formats.parquet import arrow_batch, parquet_file, read_parquet
from bulk_pipeline.stages.formats.text import read_delimited, read_text, text_lines
from bulk_pipeline.storage.objects import ObjectStorage, is_object_url

READ_BYTES = 1 << 20

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_LINES = {"jsonl": json_lines, "text": text_lines, "openai_batch": json_lines}
_READERS = {
    "jsonl": read_jsonl,
    "openai_batch": read_openai_batch,
    "json": read_json,
    "csv": read_delimited(","),
    "tsv": read_delimited("\t"),
    "text": read_text,
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, or the rows `start` to `stop` of it.

    Attributes
    ----------
    path
        Where fsspec's file system finds it.
    relative
        Its path below the source's common root: its name in keys and manifests.
    start, stop
        First row, and the row after the last; None is the file's end.
    size
        Its bytes; None where it was not listed.
    version
        Changes with the file, as far as its listing tells: its size and time.
    modified
        When it was written, in seconds since 1970; None where the listing does not tell.
    """

    path: str
    relative: str
    start: int = 0
    stop: int | None = None
    size: int | None = field(default=None, compare=False)
    version: str = field(default="", compare=False)
    modified: float | None = field(default=None, compare=False)


def split_name(name: str) -> tuple[str, str | None, str | None]:
    """Split a file's name into stem, format and compression; None where no ending tells."""
    stem, ending = os.path.splitext(name)
    compression = COMPRESSIONS.get(ending.lower())
    if compression is None:
        stem, compression = name, None
    base, ending = os.path.splitext(stem)
    format_ = FORMATS.get(ending.lower())
    return (base if format_ else stem), format_, compression


def file_format(source: FilesSource, path: str) -> str:
    """Return the format of a file, from the configuration or its name.

    Raises
    ------
    ValueError
        If the format is auto and the name does not tell it.
    """
    if source.format != "auto":
        return source.format
    if (format_ := split_name(path)[1]) is None:
        raise ValueError(
            f"source.format: cannot be told from the name {path!r} (known endings: "
            f"{', '.join(FORMATS)}, with or without {' or '.join(COMPRESSIONS)}); set source.format"
        )
    return format_


class FilesReader:
    """Reads files one after another; `inputs` describes those read so far."""

    def __init__(self, source: FilesSource, files: Iterable[SourceFile]):
        self.source, self.files = source, files
        self.inputs: dict[str, Any] = {"files": []}

    def batches(self) -> Iterator[Batch]:
        """Yield the rows, at most `source.limit` of them."""
        left = self.source.limit
        for file in self.files:
            stop = file.stop
            if left is not None:
                stop = file.start + left if stop is None else min(stop, file.start + left)
            for batch in self._read(file, stop):
                if left is not None:
                    left -= len(batch)
                yield batch
            if left == 0:
                return

    def num_rows(self, file: SourceFile) -> int:
        """Count a file's rows, all of them."""
        fs, _ = file_system(self.source)
        format_ = file_format(self.source, file.path)
        if format_ == "parquet":
            with parquet_file(fs, file.path) as parquet:
                return parquet.metadata.num_rows
        with _open_lines(fs, file.path) as (stream, _):
            if format_ in _LINES:
                return sum(1 for _ in _LINES[format_](stream))
            return sum(len(batch) for batch in _READERS[format_](stream, file.path, 0, None))

    def _read(self, file: SourceFile, stop: int | None) -> Iterator[Batch]:
        fs, _ = file_system(self.source)
        format_ = file_format(self.source, file.path)
        if format_ == "parquet":
            yield from read_parquet(fs, file.path, file.start, stop)
            digest = None if stop is not None else content_hash(fs, file.path)
            size = fs.size(file.path)
        else:
            with _open_lines(fs, file.path) as (stream, raw):
                lines: Any = stream
                if self.source.format == "auto" and format_ == "jsonl":
                    is_batch, lines = find_batch(stream)
                    format_ = "openai_batch" if is_batch else format_
                yield from _READERS[format_](lines, file.path, file.start, stop)
                size = fs.size(file.path)
                digest = raw.hash.hexdigest() if raw.size == size else None
        self.inputs["files"].append(
            {"path": file.relative, "version": file.version, "bytes": size, "blake2b": digest}
            | ({"start": file.start, "stop": file.stop} if file.stop is not None else {})
        )


def file_system(source: FilesSource) -> tuple[Any, list[str]]:
    """Return the source's file system, and its paths there.

    Raises
    ------
    ValueError
        If the paths are on different file systems.
    """
    paths = [source.path] if isinstance(source.path, str) else source.path
    pairs = [_find_file_system(path, source.storage_options) for path in paths]
    if len({id(fs) for fs, _ in pairs}) != 1:
        raise ValueError(
            f"source.path must name at least one path, all on one file system, got {paths}; "
            "make a dataset for each"
        )
    return pairs[0][0], [path for _, path in pairs]


def _find_file_system(path: str, options: dict[str, Any]) -> tuple[Any, str]:
    scheme = path.partition("://")[0]
    if is_object_url(path) and scheme != "memory":  # which is fsspec's own
        return ObjectStorage(scheme, **options), ObjectStorage._strip_protocol(path)
    return fsspec.core.url_to_fs(path, **options)


class _HashedFile(io.RawIOBase):
    """Passes a file's bytes through and hashes them on the way."""

    def __init__(self, file: Any):
        self._file = file
        self.hash = hashlib.blake2b(digest_size=16)
        self.size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self.hash.update(data)
        self.size += len(data)
        return len(data)


@contextmanager
def _open_lines(fs: Any, path: str) -> Iterator[tuple[io.BufferedReader, _HashedFile]]:
    """Open a text file decompressed and without its byte order mark."""
    compression = split_name(path)[2]
    with fs.open(path, "rb") as file:
        raw = _HashedFile(file)
        stream: Any = io.BufferedReader(raw, READ_BYTES)
        if compression:
            # Arrow's stream tells a cut-off file from a whole one; zstandard's does not.
            compressed = pa.PythonFile(stream, mode="r")
            stream = io.BufferedReader(pa.CompressedInputStream(compressed, compression), 1 << 18)
        try:
            start = stream.peek(3)[:3]
            if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise ValueError(f"{path}: must be UTF-8, is UTF-16; save it as UTF-8")
            if start == codecs.BOM_UTF8:
                stream.read(3)
            yield stream, raw
        except OSError as error:
            if not compression:
                raise
            raise ValueError(
                f"{path}: not a whole {compression} file ({error}); replace or remove it"
            ) from None


def content_hash(fs: Any, path: str) -> str:
    """A hash of a file's bytes."""
    with fs.open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class HuggingFaceReader:
    """Reads a Hugging Face dataset; `inputs` says which."""

    def __init__(self, source: HuggingFaceSource, start: int = 0, stop: int | None = None):
        self.source, self.start, self.stop = source, start, stop
        self.inputs: dict[str, Any] = {}

    def batches(self) -> Iterator[Batch]:
        """Yield the rows, at most `source.limit` of them."""
        source, stop = self.source, self.stop
        if source.limit is not None:
            end = self.start + source.limit
            stop = end if stop is None else min(stop, end)
        dataset, revision = load_dataset(source)
        self.inputs = {
            "dataset": source.dataset,
            "config": source.config,
            "split": source.split,
            "revision": revision,
            "fingerprint": getattr(dataset, "_fingerprint", None),
        }
        if hasattr(dataset, "select"):
            end = len(dataset) if stop is None else min(stop, len(dataset))
            dataset = dataset.select(range(min(self.start, end), end))
        else:
            dataset = dataset.skip(self.start) if self.start else dataset
            dataset = dataset if stop is None else dataset.take(stop - self.start)
        for table in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
            for rows in table.to_batches():
                yield arrow_batch(rows, source.dataset)

    def num_rows(self) -> int:
        """Count the dataset's rows.

        Raises
        ------
        ValueError
            If it is streamed and does not say how many it has.
        """
        is_folder = os.path.isdir(self.source.dataset)  # which knows, streamed or not
        dataset, _ = load_dataset(
            self.source.model_copy(update={"streaming": False}) if is_folder else self.source
        )
        if hasattr(dataset, "select"):
            return len(dataset)
        info = (dataset.info.splits or {}).get(self.source.split)
        if info is None or not info.num_examples:
            raise ValueError(
                "partitions.by: rows needs the number of rows, which this streamed dataset does "
                "not tell; set source.streaming to false or partitions.by to none"
            )
        return info.num_examples


def load_dataset(source: HuggingFaceSource) -> tuple[Any, str | None]:
    """Load the dataset's split; also the hub commit it is of, where known.

    Raises
    ------
    ValueError
        If the folder is not one of `save_to_disk`, or there is no such split.
    """
    if os.path.isdir(source.dataset):
        return _load_folder(source), None
    import datasets

    revision = _hub_commit(source)
    try:
        dataset = datasets.load_dataset(
            source.dataset,
            source.config,
            split=source.split,
            revision=revision or source.revision,
            streaming=source.streaming,
        )
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        raise ValueError(
            f"source.dataset: cannot load {source.dataset!r}, config {source.config!r}, split "
            f"{source.split!r} ({message}); correct it or check the connection"
        ) from None
    return dataset, revision


def _hub_commit(source: HuggingFaceSource) -> str | None:
    """Pin the branch or tag, so that what is read is what is recorded; None when offline."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return HfApi().dataset_info(source.dataset, revision=source.revision).sha
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError):
        return None


def _load_folder(source: HuggingFaceSource) -> Any:
    import datasets

    folder = source.dataset
    is_split = os.path.isfile(f"{folder}/state.json")
    if not is_split and not os.path.isfile(f"{folder}/dataset_dict.json"):
        raise ValueError(
            f"source.dataset: {folder} was not written by save_to_disk; for other files set "
            "source.type to files"
        )
    dataset = datasets.load_from_disk(folder)
    splits = {str(dataset.split or "train"): dataset} if is_split else dataset
    if source.split not in splits:
        raise ValueError(
            f"source.split: {folder} has no split {source.split!r}, it has "
            f"{', '.join(splits)}; set source.split to one of them"
        )
    split = splits[source.split]
    return split.to_iterable_dataset() if source.streaming else split
