"""Lines of text, and text in columns (CSV and TSV): every value stays text."""

import csv
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from bulk_pipeline.stages.columns import escape_bad_text
from bulk_pipeline.stages.formats.batch import Batch, in_batches

MAX_CSV_FIELD_BYTES = 1 << 28


def text_lines(stream: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number the lines from 1, without their ends."""
    for number, line in enumerate(stream, 1):
        yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def read_text(stream: Any, path: str, start: int, stop: int | None) -> Iterator[Batch]:
    """Yield the lines `start` to `stop`, in the column `text`."""
    lines = islice(text_lines(stream), start, stop)
    for batch in in_batches((item, len(item[1])) for item in lines):
        yield _text_batch(
            ["text"], [[line.decode("utf-8", "surrogateescape")] for _, line in batch]
        )


def _text_batch(names: list[str], rows: list[list[str]]) -> Batch:
    """Make a batch of text columns, every value as it is."""
    errors: dict[int, str] = {}
    try:
        columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
    except UnicodeEncodeError:
        for place, row in enumerate(rows):
            cleaned, error = escape_bad_text(dict(zip(names, row, strict=True)), has_bad_bytes=True)
            if error:
                rows[place], errors[place] = list(cleaned.values()), error
        columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
    columns = columns or [pa.array([], pa.string()) for _ in names]
    return Batch(pa.RecordBatch.from_arrays(columns, names), errors)


def read_delimited(
    delimiter: str,
) -> Callable[[Any, str, int, int | None], Iterator[Batch]]:
    """Make the reader of a format whose fields are split by `delimiter` and quoted by `"`."""

    def read(stream: Any, path: str, start: int, stop: int | None) -> Iterator[Batch]:
        records = _csv_records(stream, path, delimiter)
        if (header := next(records, None)) is None:
            return
        names, _ = escape_bad_text(dict.fromkeys(header), has_bad_bytes=True)
        if repeated := [name for name in names if header.count(name) > 1]:
            raise ValueError(f"{path} line 1: column {repeated[0]!r} appears twice; rename one")
        is_empty = True
        for batch in in_batches((row, sum(map(len, row))) for row in islice(records, start, stop)):
            is_empty = False
            yield _text_batch(list(names), batch)
        if is_empty:
            yield _text_batch(list(names), [])

    return read


def _csv_records(stream: Any, path: str, delimiter: str) -> Iterator[list[str]]:
    """Yield the header, then the records, each checked to be as long as the header."""
    csv.field_size_limit(MAX_CSV_FIELD_BYTES)
    lines = (line.decode("utf-8", "surrogateescape") for line in stream)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    width = None
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as error:
            raise ValueError(
                f"{path} line {line}: not valid CSV ({error}); repair or remove the line"
            ) from None
        if record is None:
            return
        if not record:
            continue  # a blank line
        width = width or len(record)
        if len(record) != width:
            raise ValueError(
                f"{path} line {line}: must have {width} fields like the header, has "
                f"{len(record)}; repair or remove the line"
            )
        yield record
