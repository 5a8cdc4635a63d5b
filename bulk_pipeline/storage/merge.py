"""Merging sorted parts: parts in, their rows in one order out, a bounded number held at once.

Each part is sorted by row_index, sample_index and turn. All rows of a row_index come out together.
"""

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from bulk_pipeline.storage.manifest import Part
from bulk_pipeline.storage.schemas import PLACE


def merge_parts(
    parts: Sequence[Part], read: Callable[[Part], Iterator[pa.RecordBatch]]
) -> Iterator[pa.Table]:
    """Merge the rows of `parts`, of which `read` gives a batch at a time.

    Opens only parts whose row ranges overlap, and holds about a batch of each.
    """
    waiting = sorted(parts, key=lambda part: part.first_index)
    cursors: list[_Cursor] = []
    while waiting or cursors:
        bound = min((cursor.bound() for cursor in cursors), default=None)
        if waiting and (bound is None or waiting[0].first_index < bound):
            cursors.append(_Cursor(read(waiting.pop(0))))
            continue
        assert bound is not None
        if tables := [table for cursor in cursors if (table := cursor.take_below(bound))]:
            yield pa.concat_tables(tables).sort_by([(name, "ascending") for name in PLACE])
        cursors = [cursor for cursor in cursors if not cursor.is_done]


class _Cursor:
    """A sorted part being merged: the rows read so far that were not taken yet."""

    def __init__(self, batches: Iterator[pa.RecordBatch]):
        self._batches = batches
        self._rows: pa.Table | None = None
        self._next = next(batches, None)
        self.is_done = False
        self._advance()

    def _advance(self) -> None:
        if self._next is None:
            self.is_done = self._rows is None or not self._rows.num_rows
            return
        tables = [self._rows] if self._rows is not None and self._rows.num_rows else []
        self._rows = pa.concat_tables([*tables, pa.Table.from_batches([self._next])])
        self._next = next(self._batches, None)

    def bound(self) -> float:
        """All of this part's rows below this row_index are at hand."""
        if self._next is None:
            return float("inf")
        assert self._rows is not None
        return self._rows["row_index"][-1].as_py()

    def take_below(self, bound: float) -> pa.Table | None:
        """Take the rows at hand with a row_index below `bound`, and read on."""
        if self._rows is None:
            return None
        taken: pa.Table | None
        if bound == float("inf"):
            taken, self._rows = self._rows, None
        else:
            num = pc.sum(pc.less(self._rows["row_index"], bound)).as_py() or 0
            taken, self._rows = self._rows.slice(0, num), self._rows.slice(num)
        if self.bound() == bound or not (self._rows is not None and self._rows.num_rows):
            self._advance()
        return taken if taken is not None and taken.num_rows else None
