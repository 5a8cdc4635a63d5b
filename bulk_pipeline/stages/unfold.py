"""JSON answers in, a column for each top-level property of their schema out."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from bulk_pipeline.stages.columns import escape_bad_text, to_json
from bulk_pipeline.storage.schemas import PARSED_FIELD

TYPES = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}
_KINDS: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}


class Unfolder:
    """Parses and validates answers.

    Parameters
    ----------
    schema
        The JSON schema that they follow.
    taken
        Names that other columns have; a property of such a name is ``answer_<name>``.

    Attributes
    ----------
    fields
        `parsed`, and a column a property; one that is neither text, nor a number, nor a boolean
        holds JSON text.
    """

    def __init__(self, schema: Mapping[str, Any], taken: Collection[str]):
        # A registry of its own: nothing is fetched that a schema refers to.
        validator = validator_for(schema, Draft202012Validator)
        self._validator = validator(schema, registry=Registry())
        properties = _resolved(schema, schema).get("properties", {})
        self._kinds = {name: _kind(schema, node) for name, node in properties.items()}
        self.fields = [PARSED_FIELD]
        names = {*taken, PARSED_FIELD.name}
        for name, node in properties.items():
            column = name
            while column in names:
                column = f"answer_{column}"
            names.add(column)
            type_ = TYPES.get(self._kinds[name] or "", pa.string())
            said = node.get("description") if isinstance(node, dict) else None
            metadata = {"description": said or f"Property {name} of the answer"}
            self.fields.append(pa.field(column, type_, metadata=metadata))

    def columns(self, answers: Sequence[str | None]) -> list[pa.Array]:
        """The columns `fields` of answers; null where an answer is not what the schema says."""
        found = [self._cells(answer) for answer in answers]
        columns: list[list[Any]] = [[cells is not None for cells in found]]
        columns += [
            [None if cells is None else cells[place] for cells in found]
            for place in range(len(self._kinds))
        ]
        return [
            pa.array(values, field.type) for values, field in zip(columns, self.fields, strict=True)
        ]

    def _cells(self, answer: str | None) -> list[Any] | None:
        if not answer:
            return None
        try:
            value = json.loads(answer, parse_constant=_no_constant)
            if not self._validator.is_valid(value):
                return None
            values = value if isinstance(value, dict) else {}  # a schema may allow others
            if "\\u" in answer:  # half a character can be written so, but not in UTF-8
                values, _ = escape_bad_text(values)
            return [_cell(kind, values.get(name)) for name, kind in self._kinds.items()]
        except (ValueError, OverflowError, RecursionError, Unresolvable):
            return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _cell(kind: str | None, value: Any) -> Any:
    if value is None:
        return None
    if kind is None:
        return to_json(value)
    if kind == "integer" and not -(2**63) <= value < 2**63:
        raise OverflowError(value)
    return {"integer": int, "number": float}.get(kind, lambda same: same)(value)


def _kind(schema: Mapping[str, Any], node: Any) -> str | None:
    """The one JSON type besides null that a property has; None for several or others."""
    kinds = _kinds(schema, node) - {"null"}
    return next(iter(kinds)) if len(kinds) == 1 and kinds <= TYPES.keys() else None


def _kinds(schema: Mapping[str, Any], node: Any, depth: int = 0) -> set[str]:
    node = _resolved(schema, node)
    if "type" in node:
        return set([node["type"]] if isinstance(node["type"], str) else node["type"])
    if "const" in node or "enum" in node:
        values = node["enum"] if "enum" in node else [node["const"]]
        return {"null" if value is None else _KINDS.get(type(value), "other") for value in values}
    branches = node.get("anyOf") or node.get("oneOf")
    if not branches or depth > 10:
        return {"other"}
    return set().union(*(_kinds(schema, branch, depth + 1) for branch in branches))


def _resolved(schema: Mapping[str, Any], node: Any) -> Mapping[str, Any]:
    """What a node refers to within the schema; an empty one where that is nowhere."""
    for _ in range(10):
        if not isinstance(node, dict) or not str(node.get("$ref", "")).startswith("#"):
            break
        target: Any = schema
        for part in node["$ref"].removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part, {}) if isinstance(target, dict) else {}
        node = target
    return node if isinstance(node, dict) else {}
