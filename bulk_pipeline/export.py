"""The output table as one file: finished partitions, one after another, a batch at a time."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline.stages.exporters import EXPORTERS, Exporter, Write, token_bytes
from bulk_pipeline.stages.formats.openai_batch_results import TokenBytes
from bulk_pipeline.storage.part_writer import ROW_GROUP_BYTES, ROW_GROUP_ROWS
from bulk_pipeline.storage.schemas import OUTPUT
from bulk_pipeline.storage.store import Store

PARTITION = "partition"  # the column that says where a row is from, as in `scan_table`
READ_ROWS = 4096
FORMATS = (*EXPORTERS, "parquet")


def export_output(
    store: Store,
    keys: Sequence[str],
    format_: str,
    file: IO[bytes],
    model: GeneratorSettings | None = None,
) -> int:
    """Write the output of finished partitions to a file; the number of rows.

    Columns are those of all partitions together, null where one has none, and ``partition``,
    unless the source has a column of that name.

    Parameters
    ----------
    format_
        One of `FORMATS`.
    model
        The one that answered, for formats that show tokens as text.

    Raises
    ------
    ValueError
        If a partition is missing or unfinished, or a column has types in two of them that do not
        go together.
    """
    schema = _common_schema(store, keys)
    rows = 0
    writer = _parquet(schema) if format_ == "parquet" else EXPORTERS[format_]
    with writer(file, token_bytes(model)) as write:
        for key in keys:
            partition = store.partition(OUTPUT, key)
            meta = partition.complete_manifest().meta
            for batch in partition.read(batch_size=READ_ROWS):
                write(_conform(batch, schema, key), meta)
                rows += batch.num_rows
        if not rows and format_ == "csv":
            write(schema.empty_table(), {})  # the header
    return rows


@contextmanager
def open_new(path: Path, force: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that appears, whole, when the block ends without error.

    Raises
    ------
    FileExistsError
        If it is there already, unless `force`.
    """
    if path.exists() and not force:
        raise FileExistsError(f"{path} is there already; name another file or add --force")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _common_schema(store: Store, keys: Sequence[str]) -> pa.Schema:
    schemas = [store.partition(OUTPUT, key).schema().remove_metadata() for key in keys]
    bare = [pa.schema([(field.name, field.type) for field in schema]) for schema in schemas]
    try:
        schema = pa.unify_schemas(bare, promote_options="permissive")
    except pa.ArrowException as error:
        raise ValueError(
            f"the partitions' columns do not go together ({error}); export them one at a time"
        ) from None
    return schema if PARTITION in schema.names else schema.append(pa.field(PARTITION, pa.string()))


def _conform(batch: pa.RecordBatch, schema: pa.Schema, key: str) -> pa.Table:
    """A batch with the common columns, in their order and types."""
    columns = []
    for field in schema:
        if field.name in batch.schema.names:
            column = batch.column(field.name)
            columns.append(column if column.type == field.type else column.cast(field.type))
        else:
            value = key if field.name == PARTITION else None
            columns.append(pa.array([value] * batch.num_rows, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _parquet(schema: pa.Schema) -> Exporter:
    @contextmanager
    def writer(file: IO[bytes], token_bytes: TokenBytes) -> Iterator[Write]:
        with pq.ParquetWriter(file, schema, compression="zstd") as parquet:
            pending: list[pa.Table] = []

            def flush() -> None:
                if pending:
                    parquet.write_table(pa.concat_tables(pending))
                    pending.clear()

            def write(table: pa.Table, meta: Mapping[str, Any]) -> None:
                pending.append(table)
                rows = sum(each.num_rows for each in pending)
                if rows >= ROW_GROUP_ROWS or sum(t.nbytes for t in pending) >= ROW_GROUP_BYTES:
                    flush()

            yield write
            flush()

    return writer
