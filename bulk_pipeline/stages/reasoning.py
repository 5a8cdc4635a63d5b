"""A reasoning model's text, split into what it thought and its answer."""

from collections.abc import Mapping

from bulk_pipeline.spec import ReasoningSpec


def check_reasoning(marks: ReasoningSpec | None, special_tokens: Mapping[str, int]) -> None:
    """Raise a ValueError if a mark is a special token, which no completion's text has."""
    for name in ("start", "end") if marks is not None else ():
        if getattr(marks, name) in special_tokens:
            raise ValueError(
                f"output.reasoning.{name}: {getattr(marks, name)} is a special token of the model, "
                "which the text of a completion never holds; remove output.reasoning"
            )


def is_reasoning_open(prompt: str, prefix: str, marks: ReasoningSpec) -> bool:
    """Whether a prompt ends within thoughts: by its template, or by the prefix of its answer."""
    if marks.start in prefix or marks.end in prefix:
        return prefix.rfind(marks.start) > prefix.rfind(marks.end)
    return prompt.removesuffix(prefix).rstrip().endswith(marks.start)


def check_not_open(prompt: str, prefix: str, marks: ReasoningSpec) -> None:
    """Raise a ValueError if answers of a given structure would begin within thoughts."""
    if is_reasoning_open(prompt, prefix, marks):
        raise ValueError(
            f"sampling.structured_output: the prompt opens {marks.start}, and the answer follows "
            f"the structure from its first token on; set prompt.assistant_prefix to {marks.end!r}"
        )


def split_reasoning(text: str, marks: ReasoningSpec, is_open: bool) -> tuple[str | None, str]:
    """Split a completion into its thoughts, None where there are none, and the answer.

    Thoughts that do not end take the whole text. An end without a start ends thoughts that began
    in the prompt.
    """
    rest = text.lstrip()
    begins = rest.startswith(marks.start)
    thoughts, end, answer = rest.removeprefix(marks.start).partition(marks.end)
    if end and (begins or is_open or marks.start not in thoughts):
        return thoughts.strip(), answer.lstrip()
    if begins or is_open:
        return thoughts.strip(), ""
    return None, text
