"""Finished completions → committed parts, every few rows or seconds; and the progress of the run.

What was taken is committed once: also where the model fails, or where an interrupt comes in the
middle of a commit.
"""

import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from bulk_pipeline.engine.request import Completion
from bulk_pipeline.spec import OutputSpec
from bulk_pipeline.stages.progress import Progress, ProgressFile, tell_watchers
from bulk_pipeline.stages.wanted import WantedRequest
from bulk_pipeline.storage.manifest import Part
from bulk_pipeline.storage.partition_writer import PartitionWriter
from bulk_pipeline.storage.schemas import COMPLETIONS_SCHEMA

PROGRESS_SECONDS = 5.0  # between two reports and two writes of the progress file
WATCH_SECONDS = 0.5  # between two looks of those who watch within the process


class PartSink:
    """Commits finished completions every few rows or seconds, and reports progress.

    Attributes
    ----------
    progress, file
        Of the run; what is added counts there.
    """

    def __init__(
        self,
        output: OutputSpec,
        writer: PartitionWriter,
        progress: Progress,
        file: ProgressFile,
        on_progress: Callable[[Progress], None],
    ):
        self._output, self._writer = output, writer
        self.progress, self.file, self._on_progress = progress, file, on_progress
        self._rows: list[tuple[Any, ...]] = []
        self._part: Part | None = None  # with them, not known to be committed
        self._flushed = self._reported = self._shown = time.monotonic()

    def add(
        self,
        request: WantedRequest,
        completion: Completion,
        produced_by: str | None,
        attempts: int,
    ) -> None:
        """Take a finished completion."""
        if not self._rows:
            self._flushed = time.monotonic()  # an idle sink owes nothing
        self._rows.append(_completion_row(request, completion, produced_by, attempts))
        self.progress.add(completion)
        self.progress.adapter = request.adapter
        if len(self._rows) >= self._output.flush_rows:
            self.flush()

    def tick(self) -> None:
        """Look at the clock; called after each step of the generator."""
        now = time.monotonic()
        if self._rows and now - self._flushed >= self._output.flush_seconds:
            self.flush()
        if now - self._shown >= WATCH_SECONDS:
            tell_watchers(self.progress)
            self._shown = now
        if now - self._reported >= PROGRESS_SECONDS:
            self.report()
            self._on_progress(self.progress)
            self._reported = now

    def report(self) -> None:
        """Tell other processes how far the run is."""
        self.progress.mark()
        self.file.write(self.progress)
        tell_watchers(self.progress)

    def close(self) -> None:
        """Generation is over, well or not: keep what is finished."""
        self.progress.stop()
        try:
            self.flush()
        finally:
            self.file.write(self.progress, is_last=True)
            tell_watchers(self.progress)

    def flush(self) -> None:
        """Make what was taken durable; once, also where an interrupt comes before its end."""
        if not self._rows:
            return
        if self._part is None:
            with self._writer.new_part(COMPLETIONS_SCHEMA) as part:
                part.write(_to_table(self._rows))
            self._part = part.part
        parts = self._writer.manifest.parts
        if parts[-1:] != [self._part]:  # as it is after an interrupt
            parts = [*parts, self._part]
        self._writer.commit(parts, complete=False)
        self._rows.clear()
        self._part = None
        self._flushed = time.monotonic()


def _completion_row(
    wanted: WantedRequest, completion: Completion, produced_by: str | None, attempts: int
) -> tuple[Any, ...]:
    """A row of `COMPLETIONS_SCHEMA`."""
    sampling = wanted.sampling
    return (
        wanted.row_id,
        wanted.row_index,
        wanted.sample_index,
        wanted.turn,
        str(completion.status),
        completion.text,
        completion.token_ids,
        completion.prompt_tokens,
        len(completion.token_ids),
        completion.stop_reason,
        completion.incomplete_character,
        None if sampling.is_greedy else sampling.seed,
        sampling.max_new_tokens,
        wanted.key,
        completion.error,
        produced_by,
        attempts,
        completion.cached_tokens,
        completion.queue_seconds,
        completion.prefill_seconds,
        completion.generate_seconds,
        completion.logprobs,
        completion.cumulative_logprob,
        completion.top_logprobs,
        completion.prompt_logprobs,
        wanted.answers_before,
    )


def _to_table(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = [
        pa.array(values, column.type)
        for values, column in zip(zip(*rows, strict=True), COMPLETIONS_SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=COMPLETIONS_SCHEMA)
