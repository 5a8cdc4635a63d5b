"""Of several samples of a row, the best by mean log-probability.

A sample of several turns is kept or dropped with all of them; the mean is over all its tokens.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# read to tell them
COLUMNS = ("row_index", "sample_index", "cumulative_logprob", "completion_tokens")


def keep_best(batches: Iterator[pa.RecordBatch], num_kept: int) -> Iterator[pa.RecordBatch]:
    """Of each row's samples the `num_kept` best, in their order; all have the same schema.

    Samples without log-probabilities, such as errors, come last; of equal ones the first do.
    """
    rest: pa.RecordBatch | None = None
    for batch in batches:
        whole = batch if rest is None else _joined(rest, batch)
        # The last row may go on in the next batch.
        is_last = pc.equal(whole.column("row_index"), whole.column("row_index")[-1])
        num_whole = whole.num_rows - pc.sum(is_last).as_py()
        rest = whole.slice(num_whole)
        if num_whole:
            yield _best(whole.slice(0, num_whole), num_kept)
    if rest is not None:
        yield _best(rest, num_kept)


def _joined(first: pa.RecordBatch, second: pa.RecordBatch) -> pa.RecordBatch:
    return pa.Table.from_batches([first, second]).combine_chunks().to_batches()[0]


def _best(batch: pa.RecordBatch, num_kept: int) -> pa.RecordBatch:
    rows, samples = (batch.column(name).to_numpy() for name in ("row_index", "sample_index"))
    begins = np.ones(len(rows), bool)  # a sample's first turn
    begins[1:] = (rows[1:] != rows[:-1]) | (samples[1:] != samples[:-1])
    firsts = np.flatnonzero(begins)
    tokens = batch.column("completion_tokens").to_numpy(zero_copy_only=False)
    total = batch.column("cumulative_logprob").to_numpy(zero_copy_only=False)
    total = np.add.reduceat(np.where(np.isnan(total), -np.inf, total), firsts)
    mean, rows = total / np.maximum(np.add.reduceat(tokens, firsts), 1), rows[firsts]
    order = np.lexsort((-mean, rows))  # stable: of equal ones the first sample is first
    starts = np.searchsorted(rows, rows)  # rows rise
    is_best = np.zeros(len(rows), bool)
    is_best[order] = np.arange(len(rows)) - starts < num_kept
    return batch.filter(pa.array(is_best[np.cumsum(begins) - 1]))
