"""Stored completions → the finished table of a partition, committed as one part.

Each request has one row there and none else has, in order; a table in which more requests than
`output.max_error_rate` have no answer is committed as not complete.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bulk_pipeline.engine.request import NOT_RUN, Status
from bulk_pipeline.stages.dealing import deal, in_order, not_run
from bulk_pipeline.stages.job import Job
from bulk_pipeline.stages.rows import RowStream
from bulk_pipeline.stages.stored import keep_unwanted
from bulk_pipeline.stages.wanted import WantedRequests
from bulk_pipeline.storage.schemas import COMPLETIONS_SCHEMA, PLACE

WITHOUT_ANSWER = (*sorted(NOT_RUN), Status.ERROR)


def finish_table(job: Job, max_error_rate: float, runs: list[dict[str, Any]]) -> None:
    """Deal the stored completions out to the requests, sort, count, and commit the table.

    `runs` are the records of those that made them.
    """
    writer, counts, offset = job.writer, Counter[str](), 0
    row_ids = RowStream(job.prompts.read(["row_id", "row_index"]))
    with in_order(writer, _rows(job)) as tables:
        with writer.new_part(COMPLETIONS_SCHEMA) as part:
            for table in tables:
                _check_conserved(table, job.wanted, offset)
                offset += table.num_rows
                ids = row_ids.take(table["row_index"])["row_id"]
                part.write(table.set_column(0, COMPLETIONS_SCHEMA.field("row_id"), ids))
                for count in pc.value_counts(table["status"]).to_pylist():
                    counts[count["values"]] += count["counts"]
        assert offset == job.num_requests, f"{offset} rows for {job.num_requests} requests"
        writer.commit(
            [part.part],
            complete=not offset or num_failed(counts) / offset <= max_error_rate,
            inputs=job.inputs,
            meta={"status_counts": dict(counts), "made_with": job.made_with, "runs": runs},
            # Once the sampling is reset, the answers of before are wanted again.
            kept=keep_unwanted(writer, job.wanted) if job.changed_sampling else [],
        )
    job.journal.forget(list(job.journal.failures))


def num_failed(status_counts: Mapping[str, int]) -> int:
    """How many requests have no answer."""
    return sum(status_counts.get(status, 0) for status in WITHOUT_ANSWER)


def _rows(job: Job) -> Iterator[pa.Table]:
    """A row for each request, in no order."""
    answers = job.answers()
    is_left_out = answers.settle()
    assert answers.has_all(), "a request has neither an answer nor an error"
    ready = np.flatnonzero(job.wanted.ready).astype(np.uint32)
    parts = job.writer.manifest.stored
    yield from deal(job.writer.partition, parts, job.wanted, answers, ready, is_left_out)
    if job.num_not_ready:
        yield from not_run(job.prompts)


def _check_conserved(table: pa.Table, wanted: WantedRequests, offset: int) -> None:
    """The contract: each request once, none else, in order."""
    for name in PLACE:
        expected = getattr(wanted, name)[offset : offset + table.num_rows]
        assert np.array_equal(table[name].to_numpy(), expected), f"{name} near row {offset}"
