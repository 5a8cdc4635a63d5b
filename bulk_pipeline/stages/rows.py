"""Following a table by row_index: the other side of a streaming merge."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc


class RowStream:
    """Rows of a table whose ``row_index`` counts 0, 1, 2, …, taken in rising order.

    Holds only the batches between the last row taken and the furthest one asked for.

    Parameters
    ----------
    batches
        The whole table, in order; each batch has the column ``row_index``.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch]):
        self._batches = batches
        self._rows: pa.Table | None = None
        self._start = 0

    def take(self, row_index: pa.ChunkedArray | pa.Array) -> pa.Table:
        """Return the rows at `row_index`, which must not fall, within one call or over calls.

        Raises
        ------
        ValueError
            If the table ends before the last row asked for.
        """
        first, last = row_index[0].as_py(), row_index[-1].as_py()
        if self._rows is not None:
            passed = min(first - self._start, self._rows.num_rows)
            self._rows, self._start = self._rows.slice(passed), self._start + passed
        while self._rows is None or self._start + self._rows.num_rows <= last:
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError(f"the table has no row with row_index {last}")
            table = pa.Table.from_batches([batch])
            self._rows = table if self._rows is None else pa.concat_tables([self._rows, table])
        return self._rows.take(pc.subtract(row_index, self._start))
