"""A request on its way through the engine, and what was done for all of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bulk_pipeline.engine.bans import RowBans
from bulk_pipeline.engine.request import Request
from bulk_pipeline.engine.structured import RowGrammar

NOT_NUMBERS = (
    "the model's logits are not numbers (NaN): its values overflow in this precision; use another "
    "quantisation of the model, or another model"
)
NO_TOKEN = -1  # what is sampled where logits are not numbers


class StopFinder(Protocol):
    """Looks for a row's stop strings."""

    def ends_with_stop(self, token_id: int) -> bool:
        """Take the next token; say whether the text now contains a stop string."""


@dataclass(slots=True)
class Row:
    """A request on its way; times are `time.monotonic` seconds."""

    request: Request
    stop_finder: StopFinder | None = None
    grammar: RowGrammar | None = None
    bans: RowBans | None = None
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    found_stop_string: bool = False
    completed_grammar: bool = False
    found_loop: bool = False
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None
    error: str | None = None
    cached_tokens: int = 0
    queued: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    # while it runs
    context: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    stored: int = 0  # tokens of `context` in pages, or on their way there
    described: int = 0  # of those, tokens that the page table knows of
    to_score: bool = False  # the log-probabilities of its prompt's tokens are still wanted


@dataclass(slots=True)
class Stats:
    """What a generator has done so far.

    Attributes
    ----------
    prefill_tokens
        Prompt tokens that went through the model.
    cached_tokens
        Prompt tokens whose keys and values were reused.
    completion_tokens
        Tokens of finished completions.
    steps
        Forward passes that generated tokens.
    rows
        Sum of the batch sizes of these passes.
    preemptions
        Rows that gave their pages to others for a while.
    drafted_tokens, accepted_tokens
        Guesses that were checked, and those of them that were right.
    cache_use
        Share of the cache's pages that running rows hold, as of the last step.
    seconds
        Time inside the generator.
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    rows: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cache_use: float = 0.0
    seconds: float = 0.0

    @property
    def mean_batch_size(self) -> float:
        """Rows of an average step; 0 before the first."""
        return self.rows / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that were right; None where none were drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


def page_table(rows: Sequence[Row], width: int | None = None) -> np.ndarray:
    """Return the pages of rows as int32 [rows, `width` or most pages], 0 past a row's end."""
    table = np.zeros((len(rows), width or max(len(row.pages) for row in rows)), np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row.pages)] = row.pages
    return table
