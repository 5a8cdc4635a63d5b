"""Stored completions → rows of the finished table: each under the requests that it answers.

Rows that cannot run, and turns that were not asked since one before them failed, get a row that
says so. What comes out is in no order until it is put into one (`in_order`), which takes temporary
parts and no more memory than a part.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bulk_pipeline.engine.request import READY
from bulk_pipeline.stages.stored import StoredAnswers
from bulk_pipeline.stages.wanted import WantedRequests
from bulk_pipeline.storage.manifest import Part
from bulk_pipeline.storage.partition import Partition
from bulk_pipeline.storage.partition_writer import PartitionWriter
from bulk_pipeline.storage.schemas import COMPLETIONS_SCHEMA, PLACE

SORT_ROWS, SORT_BYTES = 16_384, 64 << 20  # sorted in memory at once, whichever comes first
LEAST_MERGED = 64  # rows of each piece held at once, however many pieces there are
READ_ROWS = 2048  # read at once, so that long completions stay few


def deal(
    partition: Partition,
    parts: list[Part],
    wanted: WantedRequests,
    answers: StoredAnswers,
    numbers: np.ndarray,
    is_left_out: np.ndarray | None = None,
) -> Iterator[pa.Table]:
    """Each stored completion under those of the requests `numbers` that it answers.

    Also under those in the mask `is_left_out`, which were not asked because it failed.
    """
    numbers = numbers[np.lexsort((answers.offset[numbers], answers.part[numbers]))]
    starts = np.searchsorted(answers.part[numbers], np.arange(len(parts) + 1))
    for number, part in enumerate(parts):
        here = numbers[starts[number] : starts[number + 1]]
        offsets, offset = answers.offset[here].astype(np.int64), 0
        for batch in partition.read_part(part, batch_size=READ_ROWS) if len(here) else ():
            first, last = np.searchsorted(offsets, [offset, offset + batch.num_rows]).tolist()
            for start in range(first, last, READ_ROWS):
                some = slice(start, min(start + READ_ROWS, last))
                table = pa.Table.from_batches([batch]).take(pa.array(offsets[some] - offset))
                if is_left_out is not None and is_left_out[here[some]].any():
                    table = _not_asked(table, is_left_out[here[some]])
                yield _placed(table, wanted, here[some])
            offset += batch.num_rows


def not_run(prompts: Partition) -> Iterator[pa.Table]:
    """The rows that cannot run: their status and reason, no answer."""
    columns = ["row_id", "row_index", "prompt_tokens", "status", "error"]
    for batch in prompts.read([*columns, "num_samples", "num_turns"], READ_ROWS):
        rows = [
            {
                "row_id": row["row_id"],
                "row_index": row["row_index"],
                "sample_index": sample_index,
                "turn": turn,
                "status": row["status"],
                "prompt_tokens": row["prompt_tokens"] or 0,
                "completion_tokens": 0,
                "incomplete_character": False,
                "error": row["error"],
                "attempts": 0,
            }
            for row in batch.filter(pc.not_equal(batch.column("status"), READY)).to_pylist()
            for sample_index in range(row["num_samples"])
            for turn in range(row["num_turns"] or 1)
        ]
        if rows:
            yield pa.Table.from_pylist(rows, schema=COMPLETIONS_SCHEMA)


@contextmanager
def in_order(writer: PartitionWriter, tables: Iterable[pa.Table]) -> Iterator[Iterator[pa.Table]]:
    """Put rows into the order of the table; its temporary parts go in the end.

    All `tables` are taken before the first row comes.
    """
    pieces: list[Part] = []
    try:
        pieces.extend(_write_pieces(writer, tables))
        held = max(LEAST_MERGED, SORT_ROWS // max(len(pieces), 1))
        yield writer.partition.read_sorted(pieces, held)
    except BaseException:
        with suppress(OSError):  # the first error says more; the next writer deletes them
            writer.discard(pieces)
        raise
    writer.discard(pieces)


def _placed(completions: pa.Table, wanted: WantedRequests, numbers: np.ndarray) -> pa.Table:
    """The completions, in the places of these requests."""
    for name in PLACE:
        column = COMPLETIONS_SCHEMA.field(name)
        values = pa.array(getattr(wanted, name)[numbers], column.type)
        place = completions.schema.get_field_index(name)
        completions = completions.set_column(place, column, values)
    return completions


def _not_asked(completions: pa.Table, is_left_out: np.ndarray) -> pa.Table:
    """The completions, with the later turns of one that failed in place of those in the mask."""
    rows = [
        {
            "row_id": row["row_id"],
            "status": row["status"],
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "incomplete_character": False,
            "error": f"turn {row['turn']} ended as {row['status']}, so that this one was not asked",
            "attempts": 0,
        }
        if is_so
        else row
        for row, is_so in zip(completions.to_pylist(), is_left_out.tolist(), strict=True)
    ]
    return pa.Table.from_pylist(rows, schema=COMPLETIONS_SCHEMA)


def _write_pieces(writer: PartitionWriter, tables: Iterable[pa.Table]) -> Iterator[Part]:
    """Write rows as temporary parts, each sorted, as large as may be sorted in memory."""
    pending: list[pa.Table] = []
    for table in tables:
        pending.append(table)
        is_full = sum(t.num_rows for t in pending) >= SORT_ROWS
        if is_full or sum(t.nbytes for t in pending) >= SORT_BYTES:
            yield _write_piece(writer, pending)
            pending = []
    if pending:
        yield _write_piece(writer, pending)


def _write_piece(writer: PartitionWriter, tables: list[pa.Table]) -> Part:
    rows = pa.concat_tables(tables)
    order = [(name, "ascending") for name in PLACE]
    with writer.new_part(COMPLETIONS_SCHEMA, temporary=True) as part:
        part.write(rows.take(pc.sort_indices(rows, sort_keys=order)))
    return part.part
