"""What an answer must be, as the engine takes it; whether it can be made is known beforehand."""

import json
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for

from bulk_pipeline.engine.request import StructuredOutput
from bulk_pipeline.sampling_spec import StructuredOutputSpec


def to_engine(structured: StructuredOutputSpec | None) -> StructuredOutput | None:
    """The kind, and its value as text."""
    if structured is None:
        return None
    kind: Any
    ((kind, value),) = structured.model_dump().items()
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return StructuredOutput(kind, text)


def check_structured(structured: StructuredOutputSpec | None) -> None:
    """Raise a ValueError, of one line that names the field, if no answer can follow it."""
    value = to_engine(structured)
    if value is not None and (problem := _problem(value)):
        raise ValueError(f"structured_output.{value.kind}: cannot be used ({problem}); correct it")


@lru_cache(1024)  # rows that differ in other settings share it
def _problem(structured: StructuredOutput) -> str | None:
    from llguidance import LLMatcher

    from bulk_pipeline.engine.structured import fault_of_grammar, grammar_of, one_line

    if structured.kind == "json_schema" and (
        problem := _schema_problem(json.loads(structured.value))
    ):
        return problem
    try:
        problem = LLMatcher.validate_grammar(grammar_of(structured))
    except BaseException as error:
        problem = fault_of_grammar(error)
    return one_line(problem) or None


def _schema_problem(schema: dict[str, Any]) -> str | None:
    """Why a JSON schema is not one, in a line."""
    try:
        validator_for(schema, Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path))
        return " ".join(f"{where}: {error.message}".removeprefix(": ").split())[:200]
    return None
