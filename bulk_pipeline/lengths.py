"""Distributions of lengths in tokens: counts by length in, a few numbers and a histogram out."""

from dataclasses import dataclass, field

import numpy as np

FIRST_BIN = 16  # tokens; each bin of the histogram is twice as wide as the one before
PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Lengths:
    """How many rows have how many tokens."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, lengths: np.ndarray) -> None:
        """Count some rows' lengths."""
        self.merge(np.bincount(lengths) if len(lengths) else np.zeros(0, np.int64))

    def merge(self, counts: np.ndarray) -> None:
        """Add counts by length."""
        longer, shorter = sorted((self.counts, counts), key=len, reverse=True)
        self.counts = longer.astype(np.int64)
        self.counts[: len(shorter)] += shorter

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return int(self.counts @ np.arange(len(self.counts)))

    def percentile(self, share: float) -> int:
        """The length that `share` percent of the rows do not exceed; 0 without rows."""
        if not self.counts.sum():
            return 0
        return int(np.searchsorted(self.counts.cumsum(), self.counts.sum() * share / 100))

    def numbers(self) -> dict[str, int | float]:
        """The distribution in a few numbers."""
        present = np.flatnonzero(self.counts)
        rows = int(self.counts.sum())
        return {
            "rows": rows,
            "total": self.total,
            "mean": self.total / max(rows, 1),
            "min": int(present[0]) if rows else 0,
            **{f"p{share}": self.percentile(share) for share in PERCENTILES},
            "max": int(present[-1]) if rows else 0,
        }

    def bins(self) -> list[tuple[int, int, int]]:
        """A histogram: first and last length of each bin, and its rows."""
        bins, first, last = [], 0, FIRST_BIN
        while first < len(self.counts):
            bins.append((first, last, int(self.counts[first : last + 1].sum())))
            first, last = last + 1, 2 * last
        while bins and not bins[0][2]:
            del bins[0]
        return bins
