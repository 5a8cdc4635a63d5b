"""What an answer must be, as the engine takes it; whether it can be made is known beforehand."""

import json
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
    ((kind, value),) = structured.model_dump(exclude_none=True).items()
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return StructuredOutput(kind, text)


def check_structured(structured: StructuredOutputSpec | None) -> None:
    """Raise a ValueError, of one line that names the field, if no answer can follow it."""
    if structured is None:
        return
    from llguidance import LLMatcher

    from bulk_pipeline.engine.structured import grammar_of, one_line

    value = to_engine(structured)
    assert value is not None
    problem = schema_problem(structured.json_schema)
    try:
        problem = problem or one_line(LLMatcher.validate_grammar(grammar_of(value)))
    except ValueError as error:
        problem = one_line(str(error))
    if problem:
        raise ValueError(f"structured_output.{value.kind}: cannot be used ({problem}); correct it")


def schema_problem(schema: Any) -> str | None:
    """Why a JSON schema is not one, in a line; None also where there is none."""
    if schema is None:
        return None
    try:
        validator_for(schema, Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path))
        return " ".join(f"{where}: {error.message}".removeprefix(": ").split())[:200]
    return None
