"""The chat template of a dataset: its source in, from the model, a family or a file; its day fixed.

A template that asks for today's date is made to give one and the same day, so that two runs render
equal prompts.
"""

import re
from datetime import date as Date
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from bulk_pipeline.spec import FAMILIES, PromptSpec

if TYPE_CHECKING:  # transformers takes seconds to import
    from bulk_pipeline.engine.tokenizer import PromptTokenizer

DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


def chat_template_text(prompt: PromptSpec, tokenizer: "PromptTokenizer") -> str:
    """The chat template's source: the model's own, a family's or a file's."""
    name = prompt.chat_template
    if name == "model":
        if tokenizer.chat_template is None:
            raise ValueError(
                f"prompt.chat_template: the model in {tokenizer.folder} has no chat template; "
                f"set it to a family ({', '.join(FAMILIES)}) or a file"
            )
        return tokenizer.chat_template
    if name in FAMILIES:
        folder = resources.files("bulk_pipeline") / "chat_templates"
        return (folder / f"{name}.jinja").read_text("utf-8")
    if not Path(name).is_file():
        raise ValueError(
            f"prompt.chat_template must be model, a family ({', '.join(FAMILIES)}) "
            f"or a file, got {name!r}; correct it"
        )
    return Path(name).read_text("utf-8")


def fix_date(chat_template: str, date: str) -> str:
    """`chat_template` with the given day in place of today."""
    day = Date.fromisoformat(date)
    fixed = DATE_CALL.sub(lambda match: repr(day.strftime(match[2])), chat_template)
    if "strftime_now(" in fixed:
        raise ValueError(
            "prompt.chat_template: it calls strftime_now with something other than a literal "
            "format, so its date cannot be fixed; set prompt.chat_template to an edited copy"
        )
    return fixed
