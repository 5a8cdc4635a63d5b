"""The output table in other formats: an open file in, a function that writes a table to it out."""

import csv
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any

import orjson
import pyarrow as pa

# Opens the format over a binary file; what it gives takes tables.
Exporter = Callable[[IO[bytes]], AbstractContextManager[Callable[[pa.Table], None]]]


def _to_json(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, default=str)


@contextmanager
def _export_jsonl(file: IO[bytes]) -> Iterator[Callable[[pa.Table], None]]:
    yield lambda table: file.writelines(_to_json(row) + b"\n" for row in table.to_pylist())


@contextmanager
def _export_json(file: IO[bytes]) -> Iterator[Callable[[pa.Table], None]]:
    separator = b"["

    def write(table: pa.Table) -> None:
        nonlocal separator
        for row in table.to_pylist():
            file.write(separator + b"\n" + _to_json(row))
            separator = b","

    yield write
    file.write(b"[]\n" if separator == b"[" else b"\n]\n")


@contextmanager
def _export_csv(file: IO[bytes]) -> Iterator[Callable[[pa.Table], None]]:
    """Text as it is; lists and structs as JSON text; null as an empty field."""
    has_header = False

    def write(table: pa.Table) -> None:
        nonlocal has_header
        text = _Utf8(file)
        rows = csv.writer(text)
        if not has_header:
            rows.writerow(table.column_names)
            has_header = True
        for row in table.to_pylist():
            rows.writerow(
                orjson.dumps(value, default=str).decode()
                if isinstance(value, list | dict)
                else value
                for value in row.values()
            )

    yield write


class _Utf8:
    """What `csv.writer` writes to, over a binary file."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text.encode())


EXPORTERS: dict[str, Exporter] = {
    "jsonl": _export_jsonl,
    "json": _export_json,
    "csv": _export_csv,
}
