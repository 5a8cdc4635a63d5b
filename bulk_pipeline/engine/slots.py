"""Which row has which slot, its place in all arrays while it runs, and how far it is."""

import numpy as np

from bulk_pipeline.engine.rows import Row
from bulk_pipeline.spec import PAGE_TOKENS


class Slots:
    """The slots of a batch, on the host.

    Attributes
    ----------
    size
        How many there are.
    rows
        By slot, as all that follows but `active`; None where it is free.
    serials
        Which row has the slot: a number that no other row has, nor the same one after tokens of
        it were taken back. What was started for a row counts while this stays.
    lengths
        Tokens in the row's pages.
    room
        Tokens that its pages hold.
    scheduled
        Tokens asked of the model.
    active
        The slots whose rows generate. Never changed in place.
    """

    def __init__(self, num_slots: int) -> None:
        self.size = num_slots
        self.serials = np.full(num_slots, -1, np.int64)
        self.lengths = np.zeros(num_slots, np.int64)
        self.room = np.zeros(num_slots, np.int64)
        self.scheduled = np.zeros(num_slots, np.int64)
        self.clear()

    def clear(self) -> None:
        """Let all slots be free."""
        self.rows: list[Row | None] = [None] * self.size
        self.serials[:] = -1
        self._next_serial = 0
        self._free = list(range(self.size - 1, -1, -1))
        self.active = np.empty(0, np.int64)

    @property
    def num_free(self) -> int:
        """Slots that no row has."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Slots that rows have."""
        return self.size - len(self._free)

    def row(self, slot: int) -> Row:
        """Return the row in a slot that is not free."""
        row = self.rows[slot]
        assert row is not None
        return row

    def enter(self, row: Row) -> None:
        """Give a row, which has its pages, a free slot."""
        slot = row.slot = self._free.pop()
        self.rows[slot] = row
        self.renew(slot)
        self.lengths[slot] = len(row.context) - 1
        self.room[slot] = len(row.pages) * PAGE_TOKENS
        self.scheduled[slot] = len(row.token_ids)

    def renew(self, slot: int) -> None:
        """Let nothing count any more that was started for the row in this slot."""
        self.serials[slot] = self._next_serial
        self._next_serial += 1

    def leave(self, row: Row) -> None:
        """Take a row, which does not generate any more, out of its slot."""
        self.rows[row.slot] = None
        self.serials[row.slot] = -1
        self._free.append(row.slot)
        row.slot = -1

    def activate(self, slots: np.ndarray) -> None:
        """Let more rows generate."""
        self.active = np.concatenate([self.active, slots])

    def deactivate(self, slots: np.ndarray) -> None:
        """Let rows generate no more, those of them that do."""
        gone = np.isin(self.active, slots)
        if gone.any():
            self.active = self.active[~gone]
