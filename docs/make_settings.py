"""Write settings.md from the specification: ``python docs/make_settings.py``, or ``make docs``."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bulk_pipeline.spec import BulkInferenceSpec, FilesSource, HuggingFaceSource

PAGE = Path(__file__).with_name("settings.md")
HEAD = """\
# Every setting

Made from `bulk_pipeline/spec.py` by `make docs`; do not edit. In a `defs.yaml` these stand under
`attributes`; in Python they are the dictionary given to `build_bulk_inference_defs`. Unknown
settings are refused. A setting without a default has to be set.
"""


def settings_page() -> str:
    """The page's text."""
    return HEAD + "".join(_sections("The dataset", "", BulkInferenceSpec))


def _sections(title: str, prefix: str, model: type[BaseModel]) -> Iterator[str]:
    """A table of the settings, and the tables of those that hold settings themselves."""
    yield _section(title, prefix, model)
    for name, field in model.model_fields.items():
        if name == "source":
            yield _section("source, of files", "source.", FilesSource)
            yield _section("source, of a Hugging Face dataset", "source.", HuggingFaceSource)
        elif held := _model(field.annotation):
            yield from _sections(prefix + name, f"{prefix}{name}.", held)


def _section(title: str, prefix: str, model: type[BaseModel]) -> str:
    doc = (model.__doc__ or "").strip().splitlines()[0]
    rows = [
        f"| `{prefix}{name}` | {_type_name(field.annotation)} | {_default(field)} "
        f"| {_cell(field.description)} |\n"
        for name, field in model.model_fields.items()
    ]
    head = "| setting | value | default | |\n| --- | --- | --- | --- |\n"
    return f"\n## {title}\n\n{doc}\n\n{head}{''.join(rows)}"


def _model(annotation: Any) -> type[BaseModel] | None:
    """The settings that a field holds, also where it may be null."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if _model(annotation):
        return "settings, below"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, UnionType):
        return " or ".join(_type_name(each) for each in arguments if each is not NoneType)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return names.get(annotation, "any")


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return ""
    if isinstance(default, BaseModel):
        return "as below"
    if default in ("", [], {}):
        return "empty"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(settings_page(), "utf-8")
