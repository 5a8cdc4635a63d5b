"""What the output table has of the completions: which columns, and how they are made."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from bulk_pipeline.spec import OutputSpec
from bulk_pipeline.stages.reasoning import is_reasoning_open, split_reasoning
from bulk_pipeline.stages.unfold import Unfolder
from bulk_pipeline.storage.schemas import (
    LOGPROB_FIELDS,
    OUTPUT_FIELDS,
    PROMPT_LOGPROB_FIELDS,
    REASONING_FIELD,
)


def answer_settings(output: OutputSpec) -> dict[str, Any]:
    """The settings that decide these columns, without those that are off."""
    reasoning = output.reasoning
    return ({"reasoning": reasoning.model_dump()} if reasoning else {}) | (
        {"unfold": True} if output.unfold else {}
    )


class Answers:
    """Makes the columns.

    Parameters
    ----------
    sampling
        What the completions were asked for, as the manifest of the prompts has it.
    prefix
        What every answer was made to begin with.
    source_names
        The source's columns in the output.

    Attributes
    ----------
    fields
        The columns, those that every dataset has first.
    columns_read
        The completions' columns that `columns` needs.
    needs_prompts
        Whether it needs the text of the prompts.

    Raises
    ------
    ValueError
        If a source's column has the name of one of them.
    """

    def __init__(
        self,
        output: OutputSpec,
        sampling: Mapping[str, Any],
        prefix: str,
        source_names: Sequence[str],
    ):
        self._reasoning, self._prefix = output.reasoning, prefix
        self.needs_prompts = output.reasoning is not None
        stored = list(OUTPUT_FIELDS)
        made = [REASONING_FIELD] if self.needs_prompts else []
        row_settings = sampling.get("from_columns") or {}
        if sampling.get("logprobs") is not None or "logprobs" in row_settings:
            stored += LOGPROB_FIELDS
        elif sampling.get("best_of"):
            stored += LOGPROB_FIELDS[1:2]
        if sampling.get("prompt_logprobs"):
            stored.append(PROMPT_LOGPROB_FIELDS[0])
            made += PROMPT_LOGPROB_FIELDS[1:]
        self.columns_read = [field.name for field in stored]
        self.fields = [*stored, *made]
        _check_names(self.fields, source_names)
        schema = (sampling.get("structured_output") or {}).get("json_schema")
        self._unfolder = None
        if output.unfold and schema is not None:
            taken = [*source_names, *(field.name for field in self.fields)]
            self._unfolder = Unfolder(schema, taken)
            self.fields += self._unfolder.fields

    def columns(self, completions: pa.RecordBatch, prompts: Sequence[str] | None) -> list[pa.Array]:
        """The columns `fields` of completions, and `prompts` where they are needed."""
        columns = {name: completions.column(name) for name in self.columns_read}
        if prompts is not None:
            columns["reasoning"], columns["completion"] = self._split(completions, prompts)
        if "prompt_logprobs" in columns:
            sums, perplexities = _scores(columns["prompt_logprobs"])
            columns |= {"cumulative_prompt_logprob": sums, "perplexity": perplexities}
        if self._unfolder is not None:
            unfolded = self._unfolder.columns(columns["completion"].to_pylist())
            names = [field.name for field in self._unfolder.fields]
            columns |= dict(zip(names, unfolded, strict=True))
        return [columns[field.name] for field in self.fields]

    def _split(
        self, completions: pa.RecordBatch, prompts: Sequence[str | None]
    ) -> tuple[pa.Array, pa.Array]:
        marks = self._reasoning
        assert marks is not None
        parts: list[tuple[str | None, str | None]] = [
            (None, None)
            if text is None
            else split_reasoning(text, marks, is_reasoning_open(prompt or "", self._prefix, marks))
            for text, prompt in zip(
                completions.column("completion").to_pylist(), prompts, strict=True
            )
        ]
        thoughts, answers = zip(*parts, strict=True) if parts else ((), ())
        return pa.array(thoughts, pa.string()), pa.array(answers, pa.string())


def _check_names(fields: Sequence[pa.Field], source_names: Sequence[str]) -> None:
    """Raw data of an earlier version may have a column of a name that is ours by now."""
    if taken := sorted({field.name for field in fields} & set(source_names)):
        raise ValueError(
            f"the source's column {taken[0]} has the name of one of the output's; materialise "
            "raw_dataset again, which renames it"
        )


def _scores(logprobs: pa.ListArray) -> tuple[pa.Array, pa.Array]:
    """Sums, and perplexities; null for a prompt without log-probabilities, or of one token."""
    rows = [np.array(row, np.float64) if row else None for row in logprobs.to_pylist()]
    with np.errstate(over="ignore"):
        perplexities = [None if row is None else float(np.exp(-row.mean())) for row in rows]
    sums = [None if row is None else float(row.sum()) for row in rows]
    return pa.array(sums, pa.float64()), pa.array(perplexities, pa.float64())
