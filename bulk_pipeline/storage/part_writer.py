"""Writing a part: batches of a schema in, row groups of one Parquet file out.

A row group is closed by so many rows or so many bytes, whichever comes first, since it is what a
reader holds at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bulk_pipeline.storage.faults import fault_point
from bulk_pipeline.storage.manifest import SCHEMA_VERSION, Part

ROW_GROUP_ROWS = 16_384  # what a reader holds at once, and 150 KB for each group of a file
ROW_GROUP_BYTES = 64 << 20  # long rows come in smaller groups
PIECE_ROWS = 1024  # the same for a temporary part, since many of them are merged at once


@contextmanager
def open_part(file: IO[bytes], schema: pa.Schema, temporary: bool) -> Iterator["PartWriter"]:
    """Write a part's Parquet file; it is whole when the block has ended."""
    metadata = {**(schema.metadata or {}), b"schema_version": str(SCHEMA_VERSION).encode()}
    with pq.ParquetWriter(
        file,
        schema.with_metadata(metadata),
        compression="zstd",
        write_page_checksum=True,
        # Bounds of long texts would fill the footer, which a reader holds whole.
        write_statistics=[f.name for f in schema if not pa.types.is_string(f.type)],
    ) as parquet:
        part_writer = PartWriter(parquet, schema, PIECE_ROWS if temporary else ROW_GROUP_ROWS)
        yield part_writer
        part_writer.flush()


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
