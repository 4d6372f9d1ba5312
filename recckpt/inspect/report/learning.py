"""Norms of rows against how often they were looked up: which rows never learn (no torch here)."""

from __future__ import annotations

import numpy as np

from recckpt.inspect.report.result import CountBin
from recckpt.inspect.spread import Floats, Histogram, Int64s


class NormsByCount:
    """Counts the rows of a table by their look-ups: 0, 1, 2 to 3, 4 to 7, and so on; not thread-safe."""

    def __init__(self) -> None:
        self._norms: dict[int, Histogram] = {}
        self._n_rows: dict[int, int] = {}
        self._untrained: dict[int, int] = {}

    def add(self, counts: Int64s, norms: Floats, untrained: Int64s | None) -> None:
        """Count rows.

        Args:
            counts: of their look-ups.
            norms: of their embeddings, NaN where a value is not finite.
            untrained: which of them have no optimizer state; None where the table has no optimizer.
        """
        # 0 of 0, else 1 + the exponent of 2; of int8, which numpy sorts in one pass
        bins = np.frexp(np.maximum(counts, 0).astype(np.float64))[1].astype(np.int8)
        n_rows = np.bincount(bins)
        kinds = np.flatnonzero(n_rows)
        in_order = norms[np.argsort(bins, kind="stable")]
        for kind, some in zip(kinds.tolist(), np.split(in_order, np.cumsum(n_rows[kinds])[:-1]), strict=True):
            self._n_rows[kind] = self._n_rows.get(kind, 0) + len(some)
            self._norms.setdefault(kind, Histogram()).add(some)
        for kind, n_there in enumerate(np.bincount(bins[untrained]).tolist() if untrained is not None else ()):
            self._untrained[kind] = self._untrained.get(kind, 0) + n_there

    def merge(self, other: NormsByCount) -> None:
        """Count what another has counted."""
        for kind, histogram in other._norms.items():
            self._norms.setdefault(kind, Histogram()).merge(histogram)
            self._n_rows[kind] = self._n_rows.get(kind, 0) + other._n_rows[kind]
        for kind, n_rows in other._untrained.items():
            self._untrained[kind] = self._untrained.get(kind, 0) + n_rows

    def norms(self) -> Histogram:
        """Return the norms of all rows."""
        norms = Histogram()
        for histogram in self._norms.values():
            norms.merge(histogram)
        return norms

    def result(self, *, has_optimizer: bool) -> tuple[CountBin, ...]:
        """Return all of it, the fewest look-ups first."""
        bins = []
        for kind in sorted(self._norms):
            least, most = (1 << kind - 1, (1 << kind) - 1) if kind else (0, 0)
            untrained = self._untrained.get(kind, 0) if has_optimizer else None
            bins.append(CountBin(least, most, self._n_rows[kind], self._norms[kind].spread(), untrained))
        return tuple(bins)
