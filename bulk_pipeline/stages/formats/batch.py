"""What readers yield: a bounded number of rows at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

BATCH_ROWS = 1000
BATCH_BYTES = 8 << 20  # long rows come in smaller batches


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in order: dictionaries where types are yet to be found, else Arrow.

    `errors` says of a row, by its place in the batch, why it cannot be used as it stands.
    """

    rows: list[dict[str, Any]] | pa.RecordBatch
    errors: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)


def in_batches(sized: Iterable[tuple[Any, int]]) -> Iterator[list[Any]]:
    """Group items, given with their size in bytes."""
    batch: list[Any] = []
    num_bytes = 0
    for item, size in sized:
        batch.append(item)
        num_bytes += size
        if len(batch) >= BATCH_ROWS or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def is_utf8(line: bytes) -> bool:
    """Whether the bytes are UTF-8 text."""
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
