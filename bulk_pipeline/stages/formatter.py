"""Batches of raw_dataset in, batches of prompts out: each row read, rendered, made to fit.

Every row gives one row, in order; one that cannot run has a status that says why.
"""

from collections.abc import Sequence

import pyarrow as pa

from bulk_pipeline.engine.request import READY, Status
from bulk_pipeline.spec import BulkInferenceSpec
from bulk_pipeline.stages.prompt_rows import PromptCounts, PromptRow, prompts_batch
from bulk_pipeline.stages.reasoning import is_reasoning_open
from bulk_pipeline.stages.rendering import Renderer
from bulk_pipeline.stages.row_sampling import SamplingReader
from bulk_pipeline.stages.shortening import Shortener
from bulk_pipeline.stages.turns import BadRow, TurnReader
from bulk_pipeline.storage.schemas import ROW_ERROR_FIELD


class Formatter:
    """Turns batches of raw_dataset into batches of prompts."""

    def __init__(
        self,
        spec: BulkInferenceSpec,
        reader: TurnReader,
        sampling_reader: SamplingReader,
        renderer: Renderer,
        shortener: Shortener,
    ):
        self._prefix, self._reasoning = spec.prompt.assistant_prefix, spec.output.reasoning
        self._reader, self._sampling_reader = reader, sampling_reader
        self._renderer, self._shortener = renderer, shortener

    def format_batch(self, batch: pa.RecordBatch, counts: PromptCounts) -> pa.RecordBatch:
        """Format a batch of raw rows; the result has as many rows, in the same order."""
        rows = self._read(batch)
        self._renderer.render(rows)
        for row in rows:
            if row.status == READY:
                self._shortener.fit(row)
        self._open_thoughts(rows)
        counts.add(rows)
        return prompts_batch(batch, rows)

    def _read(self, batch: pa.RecordBatch) -> list[PromptRow]:
        default = self._sampling_reader.default
        rows = [PromptRow(row_id, default) for row_id in batch.column("row_id").to_pylist()]
        for row, values in zip(rows, batch.to_pylist(), strict=True):
            if row_error := values.get(ROW_ERROR_FIELD.name):
                row.set_aside(Status.INVALID, row_error)
                continue
            try:
                row.sampling = self._sampling_reader.read(values)
            except BadRow as bad:
                row.set_aside(bad.status, bad.reason)
            try:
                chat = self._reader.read(values)
            except BadRow as bad:
                row.set_aside(bad.status, bad.reason)
                row.num_turns = bad.num_turns
                continue
            row.num_turns = chat.num_turns
            if row.status == READY:
                row.chat = chat
        return rows

    def _open_thoughts(self, rows: Sequence[PromptRow]) -> None:
        """Let budgets count from the first token where a prompt ends within thoughts."""
        prefix, marks = self._prefix, self._reasoning
        for row in rows:
            opened = row.sampling.opened
            if opened is None or marks is None or row.prompt is None:
                continue
            if is_reasoning_open(row.prompt, prefix, marks):
                row.sampling = opened
