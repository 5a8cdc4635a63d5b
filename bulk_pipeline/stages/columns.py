"""From Python values to Arrow columns without loss: which type fits, else JSON text.

A column's type depends on its values alone, never on how they were cut into batches.
"""

import json
import re
from typing import Any

import numpy as np
import pyarrow as pa

MAX_STRUCT_FIELDS = 200  # a wider struct is a mapping with data as its keys: JSON text
MAX_TYPE_DEPTH = 32  # Arrow and Parquet readers refuse deeper types at various depths
INT64_LIMIT = 2**63
EXACT_FLOAT = 2**53  # every integer up to here is a float64

_SURROGATE = re.compile(r"[\ud800-\udfff]")


class ValueShape:
    """What kinds of values a column holds, seen one value at a time."""

    __slots__ = ("fields", "has_big_int", "has_inexact_int", "items", "kinds")

    def __init__(self) -> None:
        self.kinds: set[type] = set()
        self.fields: dict[str, ValueShape] = {}
        self.items: ValueShape | None = None
        self.has_big_int = self.has_inexact_int = False

    def add(self, value: Any, depth: int = 0) -> None:
        """Take note of one value, as `json.loads` gives it."""
        kind = type(value)
        self.kinds.add(kind)
        if kind is int and not -EXACT_FLOAT <= value <= EXACT_FLOAT:
            self.has_inexact_int = True
            self.has_big_int |= not -INT64_LIMIT <= value < INT64_LIMIT
        elif kind is list and depth <= MAX_TYPE_DEPTH:
            self.items = self.items or ValueShape()
            for item in value:
                self.items.add(item, depth + 1)
        elif kind is dict and depth <= MAX_TYPE_DEPTH and len(self.fields) <= MAX_STRUCT_FIELDS:
            for name, item in value.items():
                if (field := self.fields.get(name)) is None:
                    field = self.fields[name] = ValueShape()
                field.add(item, depth + 1)

    def arrow_type(self, depth: int = 0) -> pa.DataType | None:
        """Return the type that holds every value as it is; None where only JSON text does."""
        kinds = self.kinds - {type(None)}
        if not kinds:
            return pa.null()
        if kinds <= {int, float}:
            return self._number_type(kinds)
        if len(kinds) > 1 or depth > MAX_TYPE_DEPTH:
            return None
        if kinds == {list}:
            assert self.items is not None
            items = self.items.arrow_type(depth + 1)
            return None if items is None else pa.list_(items)
        if kinds == {dict}:
            return self._struct_type(depth)
        return {str: pa.string(), bool: pa.bool_()}[kinds.pop()]

    def _number_type(self, kinds: set[type]) -> pa.DataType | None:
        if float not in kinds:
            return None if self.has_big_int else pa.int64()
        return None if self.has_inexact_int else pa.float64()

    def _struct_type(self, depth: int) -> pa.DataType | None:
        if not 1 <= len(self.fields) <= MAX_STRUCT_FIELDS:
            return None  # Parquet has no struct without fields
        types = {name: field.arrow_type(depth + 1) for name, field in self.fields.items()}
        return None if None in types.values() else pa.struct(list(types.items()))


def merge_types(first: pa.DataType | None, second: pa.DataType | None) -> pa.DataType | None:
    """Return a type that both can be cast to without loss; None where only JSON text does."""
    if first is None or second is None:
        return None
    if first == second:
        return first
    schemas = [pa.schema([("value", type_)]) for type_ in (first, second)]
    try:
        merged = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None
    is_bytes = pa.types.is_binary(merged) or pa.types.is_large_binary(merged)
    is_text = pa.types.is_string(first) or pa.types.is_string(second)
    return None if is_bytes and is_text else merged


def column_from_values(values: list[Any], type_: pa.DataType | None) -> pa.Array:
    """Make a column of Python values; with no type, of their JSON text.

    Raises
    ------
    pyarrow.ArrowInvalid
        If a value does not fit the type without loss.
    """
    if type_ is not None:
        return pa.array(values, type_)
    texts = [None if value is None else to_json(value) for value in values]
    return pa.array(texts, pa.string())


def to_json(value: Any) -> str:
    """Write a value as readable JSON; what JSON lacks (dates, decimals, bytes) as text."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


_encode_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain).encode


def to_canonical_json(value: Any) -> bytes:
    """Write a value so that equal values are equal bytes, whatever they were read from.

    A float without a fraction is written as an integer, and a key without a value not at all:
    both may differ between JSON and a typed column.
    """
    return _encode_canonical(_canonical(value)).encode()


def _canonical(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {name: _canonical(item) for name, item in value.items() if item is not None}
    if kind is list or kind is tuple:
        return [_canonical(item) for item in value]
    return int(value) if kind is float and value.is_integer() else value


def escape_bad_text(
    row: dict[str, Any], has_bad_bytes: bool = False
) -> tuple[dict[str, Any], str | None]:
    r"""Show lone surrogates as ``\udXXX``, since no UTF-8 file can hold them.

    Parameters
    ----------
    row
        A row's values by column.
    has_bad_bytes
        Whether the row was decoded with ``surrogateescape`` from bytes that are not UTF-8; these
        are shown as ``\xNN``.

    Returns
    -------
    tuple
        The row, and which columns were changed and why, or None.
    """
    cleaned, problems = {}, []
    for name, value in row.items():
        found: set[str] = set()
        clean_name = _escape(name, has_bad_bytes, found)
        cleaned[clean_name] = _escape(value, has_bad_bytes, found)
        problems += [f"column {clean_name!r} holds {problem}" for problem in sorted(found)]
    return cleaned, "; ".join(problems) or None


def _escape(value: Any, has_bad_bytes: bool, found: set[str]) -> Any:
    def shown(match: re.Match[str]) -> str:
        code = ord(match[0])
        if has_bad_bytes and 0xDC80 <= code <= 0xDCFF:
            found.add(r"bytes that are not UTF-8, shown as \xNN")
            return f"\\x{code - 0xDC00:02x}"
        found.add(r"half a character (a lone surrogate), shown as \uXXXX")
        return f"\\u{code:04x}"

    if isinstance(value, str):
        return _SURROGATE.sub(shown, value)
    if isinstance(value, list):
        return [_escape(item, has_bad_bytes, found) for item in value]
    if isinstance(value, dict):
        return {
            _escape(name, has_bad_bytes, found): _escape(item, has_bad_bytes, found)
            for name, item in value.items()
        }
    return value
