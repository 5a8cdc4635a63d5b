"""Writing a partition: new parts in, one committed manifest after the other out.

One writer at a time can commit. A second one is kept out by a lock on a local disk. On object
storage it takes the partition over, by putting a manifest with the next epoch: whoever held it
before cannot commit any more, since each manifest is put on condition that the writer's last one
is still there. Whoever begins to write moves away what is torn, and what no manifest names.
"""

import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import filelock
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bulk_pipeline.storage.atomic_files import TEMPORARY, disk_errors
from bulk_pipeline.storage.faults import fault_point
from bulk_pipeline.storage.manifest import (
    MANIFEST,
    DamagedManifestError,
    Manifest,
    Part,
    Writer,
    parse_manifest,
)
from bulk_pipeline.storage.objects import ChangedError, StorageError, Version
from bulk_pipeline.storage.part_writer import PartWriter, open_part

if TYPE_CHECKING:  # it makes a writer
    from bulk_pipeline.storage.partition import Partition

SET_ASIDE = "_set_aside"
EPOCH = re.compile(rf"(?:part-|{re.escape(TEMPORARY)})(\d{{6,}})-[0-9a-f]{{32}}\.parquet")


@contextmanager
def hold(partition: "Partition") -> Iterator["PartitionWriter"]:
    """Hold a partition for writing, as `Partition.writer` says."""
    with ExitStack() as stack:
        if partition.store.is_local:
            try:
                with disk_errors(partition.path):
                    os.makedirs(partition.path, exist_ok=True)
                    stack.enter_context(filelock.FileLock(f"{partition.path}/.lock", timeout=0))
            except filelock.Timeout:
                raise RuntimeError(_busy(partition, partition.manifest())) from None
        writer = PartitionWriter(partition)
        try:
            writer.clear_away()
            yield writer
        except StorageError:
            raise
        except (OSError, ValueError) as error:
            # One that takes the partition over clears away what is not committed.
            if not partition.store.is_local and (holder := writer.overtaken_by()):
                raise RuntimeError(_busy(partition, holder)) from error
            raise


def _busy(partition: "Partition", manifest: Manifest | None) -> str:
    holder = "another run"
    if manifest and (writer := manifest.writer):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(writer.started))
        holder = f"a run on {writer.host} (process {writer.pid}, since {since})"
    return f"{partition.label} is being written by {holder}; wait for it or stop it"


class PartitionWriter:
    """The right to write one partition: adds parts, and says which of them count.

    `hold` makes one, and has it clear the folder.

    Attributes
    ----------
    manifest
        The last committed state; parts that turned out torn or missing are not in it.
    set_aside
        Files that were found torn or foreign, by their new paths.
    lost
        Committed parts that are missing or torn, and how.
    """

    def __init__(self, partition: "Partition"):
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
    def new_part(self, schema: pa.Schema, temporary: bool = False) -> Iterator[PartWriter]:
        """Write a part, a batch at a time; it counts only once it is committed.

        `PartWriter.part` describes it after the block. A `temporary` part is never committed:
        it is deleted with `discard`, or by the next writer.
        """
        prefix = TEMPORARY if temporary else "part-"
        name = f"{prefix}{self.manifest.epoch:06d}-{uuid.uuid4().hex}.parquet"
        store = self.partition.store
        with store.open_atomic(f"{self.partition.path}/{name}") as file:
            with open_part(file, schema, temporary) as part_writer:
                yield part_writer
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
                raise RuntimeError(_busy(self.partition, current))
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
        current = self.partition.sound_manifest()
        return current if current and current.writer != self.manifest.writer else None

    def _read_manifest(self) -> Manifest | None:
        store, path = self.partition.store, f"{self.partition.path}/{MANIFEST}"
        if store.is_local:
            return self.partition.manifest()
        try:
            data, self._seen = store.fs.read_version(path)
        except FileNotFoundError:
            return None
        return parse_manifest(data, path, self.partition.table)

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
            raise RuntimeError(_busy(self.partition, self.partition.sound_manifest())) from None
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
        problems = {part.name: part.problem(sizes) for part in self.manifest.stored}
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


def _epoch(name: str) -> int:
    """The epoch of the writer of a part, going by its name; 0 for what is none of ours."""
    match = EPOCH.match(name)
    return int(match[1]) if match else 0


def _row_index_bounds(file: pq.ParquetFile) -> tuple[int, int]:
    """The smallest and largest row_index of a part."""
    if not file.metadata.num_rows:
        return 0, -1
    indices = pc.min_max(file.read(["row_index"])["row_index"])
    return indices["min"].as_py(), indices["max"].as_py()
