"""Rows of the prompts table on their way: made of raw rows, filled in, counted, written.

A row gets its text, then its token ids, or a status that says why it cannot run, which stays.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from bulk_pipeline.engine.request import READY
from bulk_pipeline.stages.row_sampling import RowSampling
from bulk_pipeline.stages.turns import Chat
from bulk_pipeline.storage.schemas import PROMPTS_SCHEMA, SAMPLING_TYPE


@dataclass(slots=True)
class PromptRow:
    """A row on its way; `chat` is None where it had none.

    `later` are the texts that follow each answer but the last, and `later_ids` their token ids.
    """

    row_id: str
    sampling: RowSampling
    chat: Chat | None = None
    prompt: str | None = None
    ids: list[int] | None = None
    num_turns: int = 1
    later: list[str] = field(default_factory=list)
    later_ids: list[list[int]] = field(default_factory=list)
    status: str = READY
    error: str | None = None
    truncated: bool = False

    def set_aside(self, status: str, error: str) -> None:
        """Say why the row cannot run; the first reason stays."""
        if self.status == READY:
            self.status, self.error = status, error

    def num_tokens(self, tokens_of_answer: int) -> int:
        """Tokens of the prompt, all later turns and their answers, which have so many each."""
        assert self.ids is not None
        later = sum(map(len, self.later_ids))
        return len(self.ids) + later + self.num_turns * tokens_of_answer


@dataclass(slots=True)
class PromptCounts:
    """Numbers of a partition; tokens are those of ready rows, without later turns."""

    limit: int
    statuses: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    max_prompt_tokens: int = 0
    max_request_tokens: int = 0
    num_requests: int = 0

    @property
    def num_ready(self) -> int:
        """Rows that can run."""
        return self.statuses[READY]

    def meta(self) -> dict[str, Any]:
        """What the manifest says; `max_request_tokens` is the longest row with its answers."""
        return {
            "status_counts": dict(self.statuses),
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "max_request_tokens": self.max_request_tokens,
        }

    def add(self, rows: Sequence[PromptRow]) -> None:
        """Count finished rows."""
        self.statuses.update(row.status for row in rows)
        self.num_requests += sum(row.sampling.num_samples * row.num_turns for row in rows)
        for row in rows:
            if row.status == READY and row.ids is not None:
                length = len(row.ids)
                self.prompt_tokens += length
                self.max_prompt_tokens = max(self.max_prompt_tokens, length)
                most = row.num_tokens(row.sampling.max_new_tokens)
                self.max_request_tokens = max(self.max_request_tokens, min(most, self.limit))


def prompts_batch(batch: pa.RecordBatch, rows: Sequence[PromptRow]) -> pa.RecordBatch:
    """The prompts of a batch of raw rows, which became `rows`."""
    columns = [
        batch.column("row_id"),
        batch.column("row_index"),
        [row.prompt for row in rows],
        [row.ids for row in rows],
        [None if row.ids is None else len(row.ids) for row in rows],
        [row.status for row in rows],
        [row.error for row in rows],
        [row.truncated for row in rows],
        _sampling_column([row.sampling for row in rows]),
        [row.sampling.num_samples for row in rows],
        [row.num_turns for row in rows],
        [_later_turns(row) for row in rows],
    ]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, column_field.type)
        for column, column_field in zip(columns, PROMPTS_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=PROMPTS_SCHEMA.names)


def _later_turns(row: PromptRow) -> list[dict[str, Any]] | None:
    if not row.later_ids:
        return None
    pairs = zip(row.later, row.later_ids, strict=True)
    return [{"text": text, "input_ids": ids} for text, ids in pairs]


def _sampling_column(samplings: Sequence[RowSampling]) -> pa.Array:
    """The rows' values; rows with the same settings share one object."""
    distinct = {id(sampling): sampling for sampling in samplings}
    places = {each: place for place, each in enumerate(distinct)}
    values = pa.array([sampling.values for sampling in distinct.values()], SAMPLING_TYPE)
    return values.take(pa.array([places[id(each)] for each in samplings], pa.int32()))
