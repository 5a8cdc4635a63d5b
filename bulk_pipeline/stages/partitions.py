"""How a dataset is cut into partitions: the source's listing in, a slice for each key out.

A key, once given, stays: which file or folder has which is stored in ``partitions.json``.
"""

import hashlib
import posixpath
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from fsspec.core import has_magic

from bulk_pipeline.spec import BulkInferenceSpec, FilesSource, HuggingFaceSource
from bulk_pipeline.stages.sources import (
    FilesReader,
    HuggingFaceReader,
    SourceFile,
    file_system,
    split_name,
)
from bulk_pipeline.storage.objects import ChangedError, ObjectStorage
from bulk_pipeline.storage.store import Store, check_partition_key

PARTITIONS_FILE = "partitions.json"
TRIES = 5  # at giving keys while other machines do
WHOLE = "all"  # the key of a dataset that is not cut
MAX_KEY_LENGTH = 150
HASH_DIGITS = 8
# What fsspec's file systems call the time of a file's last change.
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


@dataclass(frozen=True, slots=True)
class Slice:
    """What belongs to one partition.

    Attributes
    ----------
    files
        The files, or ranges of their rows, in order; empty for a Hugging Face dataset.
    start, stop
        First row of a Hugging Face dataset, and the row after the last; None is its end.
    """

    files: tuple[SourceFile, ...] = ()
    start: int = 0
    stop: int | None = None


class NoFilesError(ValueError):
    """`source.path` matches no file (yet)."""


def plan_partitions(
    spec: BulkInferenceSpec, store: Store, files: list[SourceFile] | None = None
) -> dict[str, Slice]:
    """Cut the dataset as it is now; new files and folders get a key, which is stored.

    Parameters
    ----------
    spec
        The dataset.
    store
        Where ``partitions.json`` is kept; it is written only if something is new.
    files
        What `list_files` gave, where it was just called.

    Returns
    -------
    dict
        A slice for each partition key, in order. Keys of files that are gone are not in it, but
        stay reserved.

    Raises
    ------
    NoFilesError
        If `source.path` matches no file.
    """
    for _ in range(TRIES):
        try:
            return _plan_once(spec, store, files)
        except ChangedError:  # another machine gave keys at the same time; its keys count
            continue
    raise RuntimeError(
        f"{store.path}/{PARTITIONS_FILE} is changed by others all the time; run again later"
    )


def _plan_once(
    spec: BulkInferenceSpec, store: Store, files: list[SourceFile] | None
) -> dict[str, Slice]:
    stored, seen = store.read_seen_json(PARTITIONS_FILE)
    stored = stored or {}
    known = {name: dict(stored.get(name, {})) for name in ("file", "folder", "row_counts")}
    if isinstance(spec.source, HuggingFaceSource):
        plan = _plan_dataset(spec, spec.source)
    else:
        plan = _plan_files(spec, spec.source, known, files or list_files(spec.source))
    if any(known[name] != stored.get(name, {}) for name in known):
        store.replace_json(PARTITIONS_FILE, known, seen)
    return plan


def _plan_dataset(spec: BulkInferenceSpec, source: HuggingFaceSource) -> dict[str, Slice]:
    if spec.partitions.by == "none":
        return {WHOLE: Slice()}
    ranges = _row_ranges(HuggingFaceReader(source).num_rows(), spec.partitions.rows)
    return {_range_key(start, stop): Slice((), start, stop) for start, stop in ranges}


def _plan_files(
    spec: BulkInferenceSpec,
    source: FilesSource,
    known: dict[str, dict[str, Any]],
    files: list[SourceFile],
) -> dict[str, Slice]:
    match spec.partitions.by:
        case "none":
            return {WHOLE: Slice(tuple(files))}
        case "rows":
            counts = _count_rows(source, files, known["row_counts"])
            ranges = _row_ranges(sum(counts), spec.partitions.rows)
            return {
                _range_key(start, stop): Slice(_cut_files(files, counts, start, stop))
                for start, stop in ranges
            }
        case "file":
            groups = {file.relative: [file] for file in files}
            stems = {name: _file_stem(name) for name in groups}
        case "folder":
            groups = {}
            for file in files:
                groups.setdefault(posixpath.dirname(file.relative), []).append(file)
            stems = {name: name or "root" for name in groups}
    keys = known[spec.partitions.by]
    keys.update(assign_keys(stems, keys))
    return {keys[name]: Slice(tuple(group)) for name, group in groups.items()}


def list_files(source: FilesSource) -> list[SourceFile]:
    """List the source's files, sorted by their path below the common root.

    Raises
    ------
    NoFilesError
        If one of its paths matches no file.
    """
    fs, paths = file_system(source)
    fs.invalidate_cache()  # a listing kept in memory does not know new files
    roots, found = [], {}
    for path in paths:
        root, matches = _expand(fs, path, any_format=source.format != "auto")
        if not matches:
            shown = fs.url(path) if isinstance(fs, ObjectStorage) else path
            raise NoFilesError(f"source.path: no files match {shown!r}; correct it or add files")
        roots.append(root)
        found.update(matches)
    common = posixpath.commonpath(roots) if len(roots) > 1 else roots[0]
    files = [
        SourceFile(
            path,
            posixpath.relpath(path, common or "/"),
            size=info["size"],
            version=_version(info),
            modified=_modified(info),
        )
        for path, info in found.items()
    ]
    return sorted(files, key=lambda file: file.relative)


def _version(info: dict[str, Any]) -> str:
    """A file's size, tag (on object storage) and time, from its listing: nothing is read."""
    tag = info.get("ETag") or info.get("etag")
    told = [info["size"], tag, _time(info)]
    return ":".join(str(value) for value in told if value is not None)


def _modified(info: dict[str, Any]) -> float | None:
    """When a file was written, in seconds since 1970."""
    value = _time(info)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    return value.timestamp() if isinstance(value, datetime) else value


def _time(info: dict[str, Any]) -> Any:
    """When a file was written, as its file system tells it."""
    return next((info[name] for name in _TIMES if info.get(name) is not None), None)


def _expand(fs: Any, path: str, any_format: bool) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the fixed part of a path, and the files that it names, with what is known of them."""
    path = path.rstrip("/")
    if fs.isfile(path):
        return posixpath.dirname(path), {path: fs.info(path)}
    if has_magic(path):
        first_magic = min(path.find(mark) for mark in "*?[" if mark in path)
        root = path[:first_magic].rpartition("/")[0]
        matches = {
            name: info
            for name, info in fs.glob(path, detail=True).items()
            if info["type"] != "directory"
        }
        return root, {name: info for name, info in matches.items() if not _is_hidden(name, root)}
    matches = fs.find(path, detail=True) if fs.isdir(path) else {}
    return path, {
        name: info
        for name, info in matches.items()
        if not _is_hidden(name, path) and (any_format or split_name(name)[1] is not None)
    }


def _is_hidden(path: str, root: str) -> bool:
    """Whether a name below the root starts like those of markers and temporary files."""
    return any(part.startswith((".", "_")) for part in path[len(root) :].split("/"))


def find_recent(
    files: Iterable[SourceFile], settle_seconds: float, now: float | None = None
) -> dict[str, str]:
    """Find the files that may still be being written: changed within `settle_seconds`.

    Returns
    -------
    dict
        The version of each by its relative path.
    """
    before = (time.time() if now is None else now) - settle_seconds
    return {
        file.relative: file.version
        for file in files
        if file.modified is None or file.modified > before
    }


def assign_keys(stems: dict[str, str], assigned: dict[str, str]) -> dict[str, str]:
    """Give a key to each name that has none yet.

    Parameters
    ----------
    stems
        What a name's key is made of, by name.
    assigned
        The keys that were given before, by name.

    Returns
    -------
    dict
        The new keys by name. Stems that are equal once cleaned, or but for case, get a hash of
        their name behind them.
    """
    taken = {key.casefold() for key in assigned.values()}
    wanted = {name: clean_key(stem) for name, stem in stems.items() if name not in assigned}
    counts = Counter(key.casefold() for key in wanted.values())
    keys: dict[str, str] = {}
    for name, key in sorted(wanted.items()):
        digits = HASH_DIGITS if not key or counts[key.casefold()] > 1 else 0
        while (unique := _with_hash(key, name, digits)).casefold() in taken:
            digits += HASH_DIGITS
        keys[name] = check_partition_key(unique)
        taken.add(unique.casefold())
    return keys


def clean_key(stem: str) -> str:
    """Replace what a partition key must not hold; may be empty."""
    key = re.sub(r"[^A-Za-z0-9_.-]", "_", stem)
    return re.sub(r"\.{2,}", ".", key).lstrip("_.-").rstrip(".")


def _with_hash(key: str, name: str, digits: int) -> str:
    if not digits and len(key) <= MAX_KEY_LENGTH:
        return key
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape")).hexdigest()
    suffix = digest[: digits or HASH_DIGITS]
    return f"{(key or 'file')[: MAX_KEY_LENGTH - 1 - len(suffix)]}-{suffix}"


def _file_stem(relative: str) -> str:
    folder, name = posixpath.split(relative)
    return posixpath.join(folder, split_name(name)[0])


def _count_rows(
    source: FilesSource, files: Iterable[SourceFile], known: dict[str, Any]
) -> list[int]:
    """Count each file's rows, of files that have changed since the last time only."""
    counts = []
    for file in files:
        if known.get(file.relative, {}).get("version") != file.version:
            rows = FilesReader(source, ()).num_rows(file)
            known[file.relative] = {"version": file.version, "rows": rows}
        counts.append(known[file.relative]["rows"])
    return counts


def _row_ranges(num_rows: int, size: int) -> list[tuple[int, int]]:
    """Ranges of `size` rows; the last keeps its full width, so that it may grow."""
    return [(start, start + size) for start in range(0, max(num_rows, 1), size)]


def _range_key(start: int, stop: int) -> str:
    return f"rows-{start:012d}-{stop - 1:012d}"


def _cut_files(
    files: list[SourceFile], counts: list[int], start: int, stop: int
) -> tuple[SourceFile, ...]:
    """Return the parts of the files that hold the rows `start` to `stop` of all."""
    cut, first = [], 0
    for file, count in zip(files, counts, strict=True):
        begin, end = max(start, first), min(stop, first + count)
        if begin < end:
            cut.append(replace(file, start=begin - first, stop=end - first))
        first += count
    return tuple(cut) or tuple(replace(file, stop=0) for file in files)
