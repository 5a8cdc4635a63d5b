"""Partitions of tables: what is committed of one, and its rows, in order.

``<table>/<partition>/`` holds immutable parts with unique names, and ``manifest.json``, which says
which of them count and is replaced in one step. A reader that goes by the manifest sees one
committed state and never half a file.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from bulk_pipeline.storage.atomic_files import disk_errors
from bulk_pipeline.storage.manifest import MANIFEST, Manifest, Part, parse_manifest
from bulk_pipeline.storage.merge import merge_parts
from bulk_pipeline.storage.objects import StorageError
from bulk_pipeline.storage.partition_writer import PartitionWriter, hold
from bulk_pipeline.storage.schemas import FIXED_SCHEMAS, SLICES, with_later_columns

if TYPE_CHECKING:  # it makes partitions
    from bulk_pipeline.storage.store import Store


class Partition:
    """One partition of one table: read through its manifest, written through `writer`.

    So is a slice of one, in a folder of its own.
    """

    def __init__(self, store: "Store", table: str, key: str, slice_name: str = ""):
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
            path = f"{self.path}/{MANIFEST}"
            return parse_manifest(self.store.fs.cat_file(path), path, self.table)
        except FileNotFoundError:
            return None

    def sound_manifest(self) -> Manifest | None:
        """The same; None also where it cannot be read, since a run then makes it anew."""
        try:
            return self.manifest()
        except ValueError:
            return None

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
                    yield with_later_columns(batch, FIXED_SCHEMAS.get(self.table), columns)
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
        return merge_parts(parts, lambda part: self.read_part(part, batch_size=batch_size))

    def delete(self, name: str) -> None:
        """Delete a file of the partition, if it is there."""
        path = f"{self.path}/{name}"
        try:
            with disk_errors(path):
                self.store.fs.rm_file(path)
        except FileNotFoundError:
            pass

    def delete_all(self) -> None:
        """Delete the partition with everything in it; nobody may be writing it."""
        for name in (MANIFEST, *self.file_sizes()):  # what no manifest names does not count
            self.delete(name)
        if self.store.is_local:
            shutil.rmtree(self.path, ignore_errors=True)

    def writer(self) -> AbstractContextManager[PartitionWriter]:
        """Hold the partition for writing.

        Raises
        ------
        RuntimeError
            If another run is writing it; the message names that run.
        """
        return hold(self)

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
        if problem := part.problem(sizes):
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
