"""JSON Lines and JSON arrays: one object is one row."""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import orjson

from bulk_pipeline.stages.columns import escape_bad_text
from bulk_pipeline.stages.formats.batch import Batch, in_batches, is_utf8

READ_BYTES = 1 << 20
MAX_ROW_DEPTH = 200  # deeper JSON exhausts the stack of one library or another

# orjson reads an integer beyond 64 bits as a float; json keeps it.
_LONG_NUMBER = re.compile(rb"\d{19}")


def json_lines(stream: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number the lines from 1, without blank ones."""
    return ((number, line) for number, line in enumerate(stream, 1) if not line.isspace())


def read_jsonl(stream: Any, path: str, start: int, stop: int | None) -> Iterator[Batch]:
    """Yield the rows `start` to `stop` of a file with an object a line."""
    lines = islice(json_lines(stream), start, stop)
    for batch in in_batches((item, len(item[1])) for item in lines):
        rows: list[dict[str, Any]] = []
        errors: dict[int, str] = {}
        for number, line in batch:
            try:
                row, error = parse_row(line)
            except (ValueError, RecursionError) as problem:
                raise ValueError(
                    f"{path} line {number}: {problem}; repair or remove the line"
                ) from None
            if error:
                errors[len(rows)] = error
            rows.append(row)
        yield Batch(rows, errors)


def parse_row(line: bytes) -> tuple[dict[str, Any], str | None]:
    """Read one JSON object; also why it cannot be used as it stands, or None.

    Raises
    ------
    ValueError
        If the line is not a JSON object.
    """
    num_brackets = line.count(b"[") + line.count(b"{")
    if not _LONG_NUMBER.search(line):
        try:
            return _check_row(orjson.loads(line), num_brackets), None
        except orjson.JSONDecodeError:
            pass  # json has the last word
    row = _check_row(_load_with_json(line), num_brackets)
    return escape_bad_text(row, has_bad_bytes=not is_utf8(line))


def _load_with_json(line: bytes) -> Any:
    """Read what orjson refuses and json accepts: lone surrogates, long integers, NaN."""
    try:
        return json.loads(line.rstrip(b"\r\n").decode("utf-8", "surrogateescape"))
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise ValueError(f"not valid JSON ({reason} at character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_ROW_DEPTH} levels") from None


def _check_row(row: Any, num_brackets: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, got a {_json_kind(row)}")
    if num_brackets > MAX_ROW_DEPTH and _depth(row) > MAX_ROW_DEPTH:
        raise ValueError(f"nested deeper than {MAX_ROW_DEPTH} levels")
    return row


def _json_kind(value: Any) -> str:
    kinds = {str: "string", list: "list", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth <= MAX_ROW_DEPTH:
        depth += 1
        nested = [item for item in level if isinstance(item, dict | list)]
        level = [
            inner
            for item in nested
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def read_json(stream: Any, path: str, start: int, stop: int | None) -> Iterator[Batch]:
    """Yield the rows `start` to `stop` of a file that is one list of objects."""
    objects = islice(_json_objects(stream, path), start, stop)
    for batch in in_batches((item, item[1]) for item in objects):
        rows: list[dict[str, Any]] = []
        errors: dict[int, str] = {}
        for row, _, error in batch:
            if error:
                errors[len(rows)] = error
            rows.append(row)
        yield Batch(rows, errors)


def _json_objects(stream: Any, path: str) -> Iterator[tuple[dict[str, Any], int, str | None]]:
    """Yield the objects of a JSON array with their length in characters and what ails them."""
    cursor = _JsonCursor(stream, path)
    if (opening := cursor.next_character()) != "[":
        if opening == "":
            return  # an empty file has no rows
        raise ValueError(
            f"{path}: must hold a list of objects, starts with {opening!r}; "
            "set source.format to jsonl if it holds an object a line"
        )
    number = 0
    closing = cursor.next_character()
    if closing != "]":
        cursor.position -= 1
    while closing != "]":
        number += 1
        yield cursor.next_object(number)
        if (closing := cursor.next_character()) not in (",", "]"):
            cursor.fail(number, "expected ',' or ']' behind it")
    if cursor.next_character():
        raise ValueError(f"{path}: text follows the list; repair the file")


class _JsonCursor:
    """Reads JSON values one after another through a buffer of text."""

    def __init__(self, stream: Any, path: str):
        self._stream, self._path = stream, path
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._raw_decode = json.JSONDecoder().raw_decode
        self._is_at_end = False
        self._text = ""
        self.position = 0

    def _read_more(self) -> None:
        data = self._stream.read(max(READ_BYTES, len(self._text)))
        self._is_at_end = not data
        self._text = self._text[self.position :] + self._decode(data, final=not data)
        self.position = 0

    def next_character(self) -> str:
        """Take the next character that is not white space; empty at the end."""
        while True:
            while self.position < len(self._text):
                character = self._text[self.position]
                self.position += 1
                if character not in " \t\r\n":
                    return character
            if self._is_at_end:
                return ""
            self._read_more()

    def next_object(self, number: int) -> tuple[dict[str, Any], int, str | None]:
        """Take one object; `number` names it in errors."""
        if self.next_character():
            self.position -= 1
        while True:
            try:
                row, end = self._raw_decode(self._text, self.position)
                break
            except json.JSONDecodeError as error:
                # Only what is cut off by the buffer's end can get better with more text.
                is_cut = error.msg.startswith("Unterminated") or error.pos + 16 > len(self._text)
                if self._is_at_end or not is_cut:
                    self.fail(number, f"not valid JSON ({error.msg})")
                self._read_more()
            except RecursionError:
                self.fail(number, f"nested deeper than {MAX_ROW_DEPTH} levels")
        text = self._text[self.position : end]
        self.position = end
        try:
            _check_row(row, num_brackets=text.count("[") + text.count("{"))
        except ValueError as problem:
            self.fail(number, str(problem))
        error_text = None
        has_bad_bytes = not _can_encode(text)
        if has_bad_bytes or "\\u" in text:
            row, error_text = escape_bad_text(row, has_bad_bytes)
        return row, len(text), error_text

    def fail(self, number: int, problem: str) -> None:
        """Raise an error that names the file and the object."""
        raise ValueError(f"{self._path} object {number}: {problem}; repair or remove it")


def _can_encode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
