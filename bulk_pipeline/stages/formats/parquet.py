"""Parquet files and other Arrow rows: the types stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulk_pipeline.stages.formats.batch import BATCH_BYTES, BATCH_ROWS, Batch, is_utf8


@contextmanager
def parquet_file(fs: Any, path: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file.

    Raises
    ------
    ValueError
        If it is not one, also while it is read.
    """
    try:
        with fs.open(path, "rb") as raw, pq.ParquetFile(raw) as file:
            yield file
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(
            f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}); "
            "replace or remove it"
        ) from None


def read_parquet(fs: Any, path: str, start: int, stop: int | None) -> Iterator[Batch]:
    """Yield the rows `start` to `stop`, reading the row groups that hold them."""
    with parquet_file(fs, path) as file:
        metadata = file.metadata
        empty = [pa.array([], type_) for type_ in file.schema_arrow.types]
        names = file.schema_arrow.names
        yield arrow_batch(pa.RecordBatch.from_arrays(empty, names), path)  # its columns
        first = 0  # of the row group
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            last, offset = first + group.num_rows, first
            if last > start and (stop is None or first < stop) and group.num_rows:
                row_bytes = max(1, group.total_byte_size // group.num_rows)
                size = max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
                for rows in file.iter_batches(size, row_groups=[number]):
                    end = offset + len(rows) if stop is None else min(stop, offset + len(rows))
                    begin = max(start, offset)
                    if begin < end:
                        yield arrow_batch(rows.slice(begin - offset, end - begin), path)
                    offset += len(rows)
            first = last


def arrow_batch(rows: pa.RecordBatch, path: str) -> Batch:
    """Make a batch of Arrow rows, text that is not UTF-8 shown as escapes.

    Raises
    ------
    ValueError
        If such text is inside a nested column.
    """
    columns = [_plain_column(column) for column in rows.columns]
    errors: dict[int, list[str]] = {}
    for number, name in enumerate(rows.schema.names):
        try:
            columns[number].validate(full=True)
        except pa.ArrowInvalid as error:
            if not pa.types.is_string(columns[number].type):
                raise ValueError(
                    f"{path}: column {name!r} is not valid ({error}); write the file again"
                ) from None
            columns[number], places = _escape_text(columns[number])
            for place in places:
                problem = f"column {name!r} holds bytes that are not UTF-8, shown as \\xNN"
                errors.setdefault(place, []).append(problem)
    batch = pa.RecordBatch.from_arrays(columns, rows.schema.names)
    return Batch(batch, {place: "; ".join(problems) for place, problems in errors.items()})


def _plain_column(column: pa.Array) -> pa.Array:
    """Undo encodings that are not part of the values."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        return column.cast(pa.string())
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _escape_text(column: pa.Array) -> tuple[pa.Array, list[int]]:
    """Show bytes that are not UTF-8 as escapes; also say in which places."""
    values = column.cast(pa.binary()).to_pylist()
    texts = [
        None if value is None else value.decode("utf-8", "backslashreplace") for value in values
    ]
    places = [
        place for place, value in enumerate(values) if value is not None and not is_utf8(value)
    ]
    return pa.array(texts, pa.string()), places
