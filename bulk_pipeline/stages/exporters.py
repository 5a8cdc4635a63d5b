"""The output table in other formats: an open file in, a function that writes a table to it out."""

import csv
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, Any

import orjson
import pyarrow as pa

from bulk_pipeline.spec import GeneratorSettings
from bulk_pipeline.stages.formats.openai_batch_results import TokenBytes, export_openai_batch

if TYPE_CHECKING:  # transformers takes seconds to import
    from bulk_pipeline.engine.tokenizer import PromptTokenizer

# Takes rows of the output table, with what the manifest of their partition says of them.
Write = Callable[[pa.Table, Mapping[str, Any]], None]
# Opens the format over a binary file; some show tokens as text.
Exporter = Callable[[IO[bytes], TokenBytes], AbstractContextManager[Write]]


def token_bytes(model: GeneratorSettings | None) -> TokenBytes:
    """What gives the texts of a model's tokens; its tokenizer is loaded when it is asked."""

    @cache
    def tokenizer() -> "PromptTokenizer":
        from bulk_pipeline.engine.tokenizer import load_tokenizer, resolve_model

        assert model is not None, "tokens of no model"
        return load_tokenizer(resolve_model(model.model, model.revision, tokenizer_only=True))

    return lambda ids: tokenizer().token_bytes(ids)


def _to_json(row: dict[str, Any]) -> bytes:
    return orjson.dumps(row, default=str)


@contextmanager
def _export_jsonl(file: IO[bytes], token_bytes: TokenBytes) -> Iterator[Write]:
    yield lambda table, meta: file.writelines(_to_json(row) + b"\n" for row in table.to_pylist())


@contextmanager
def _export_json(file: IO[bytes], token_bytes: TokenBytes) -> Iterator[Write]:
    separator = b"["

    def write(table: pa.Table, meta: Mapping[str, Any]) -> None:
        nonlocal separator
        for row in table.to_pylist():
            file.write(separator + b"\n" + _to_json(row))
            separator = b","

    yield write
    file.write(b"[]\n" if separator == b"[" else b"\n]\n")


@contextmanager
def _export_csv(file: IO[bytes], token_bytes: TokenBytes) -> Iterator[Write]:
    """Text as it is; lists and structs as JSON text; null as an empty field."""
    has_header = False

    def write(table: pa.Table, meta: Mapping[str, Any]) -> None:
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
    "openai_batch": export_openai_batch,
}


def file_name(format_: str) -> str:
    """The file of a format beside a partition's output."""
    return f"output.{'openai_batch.jsonl' if format_ == 'openai_batch' else format_}"
