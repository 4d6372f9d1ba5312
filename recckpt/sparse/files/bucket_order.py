"""The rows of a table in bucket order, found by a counting sort that never needs more than its budget."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.sparse.table.kernels import count_buckets, place_rows

_UINT32_ROWS = 1 << 32


class Ids(Protocol):
    """Ids in row order, on the CPU."""

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the ids of the rows [begin, end), piece by piece."""

    def gather(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the ids of ``rows``."""

    def to_tensor(self, n_rows: int) -> Tensor:
        """Return the ids of the first rows."""


class BucketOrder:
    """Positions in bucket order -> rows. Thread-safe.

    Args:
        ids: the ids in row order, on the CPU.
        n_rows: number of rows.
        budget_rows: the most rows that are ordered at a time. A table with more is ordered in passes, each
            of which looks at all ids.
    """

    def __init__(self, ids: Ids, n_rows: int, budget_rows: int) -> None:
        self._ids, self._n_rows, self._budget_rows = ids, n_rows, budget_rows
        self._lock = threading.RLock()
        self._starts: npt.NDArray[np.int64] | None = None
        self._whole: weakref.ref[npt.NDArray[Any]] | None = None
        self._is_small = n_rows <= min(budget_rows, N_BUCKETS)  # counting would cost more than the rows themselves

    def rows(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Return the rows at positions [begin, end), at most ``budget_rows`` of them."""
        if self._n_rows <= self._budget_rows:
            return self._all_rows()[begin:end]
        starts = self._bucket_starts()
        first, last = self.bucket_range(begin, end)
        ordered = self._ordered(first, last)
        return ordered[begin - starts[first] : end - starts[first]]

    def bucket_range(self, begin: int, end: int) -> tuple[int, int]:
        """Return the buckets [first, last + 1) of the positions [begin, end)."""
        if self._is_small:
            ends = self._all_rows()[[begin, end - 1]].astype(np.int64)
            first, last = bucket_of(self._ids.gather(ends).numpy())
            return int(first), int(last) + 1
        starts = self._bucket_starts()
        first, last = np.searchsorted(starts, [begin, end - 1], side="right") - 1
        return int(first), int(last) + 1

    def bucket_begin(self, position: int) -> int:
        """Return the position of the first row of the bucket that a position lies in."""
        bucket, _ = self.bucket_range(position, position + 1)
        if self._is_small:
            ids = self._ids.gather(self._all_rows().astype(np.int64)).numpy()
            return int(np.searchsorted(bucket_of(ids), bucket))
        return int(self._bucket_starts()[bucket])

    def _bucket_starts(self) -> npt.NDArray[np.int64]:
        with self._lock:
            if self._starts is None:
                counts = np.zeros(N_BUCKETS, np.int64)
                for piece in self._ids.pieces(0, self._n_rows):
                    count_buckets(piece.numpy(), counts)
                self._starts = np.concatenate([[0], np.cumsum(counts)])
            return self._starts

    def _all_rows(self) -> npt.NDArray[Any]:
        """Share the whole order between the threads that need it now; nobody keeps it longer."""
        with self._lock:
            whole = self._whole() if self._whole else None
            if whole is None:
                whole = self._sorted() if self._is_small else self._ordered(0, N_BUCKETS)
                self._whole = weakref.ref(whole)
            return whole

    def _sorted(self) -> npt.NDArray[Any]:
        buckets = bucket_of(self._ids.to_tensor(self._n_rows).numpy())
        return np.argsort(buckets.astype(np.uint16), kind="stable").astype(np.uint32)

    def _ordered(self, first: int, last: int) -> npt.NDArray[Any]:
        starts = self._bucket_starts()
        kind = np.uint32 if self._n_rows <= _UINT32_ROWS else np.int64
        order = np.empty(starts[last] - starts[first], kind)
        cursors = starts[:-1] - starts[first]
        row = 0
        for piece in self._ids.pieces(0, self._n_rows):
            place_rows(piece.numpy(), row, first, last, cursors, order)
            row += len(piece)
        if not np.array_equal(cursors[first:last], starts[first + 1 : last + 1] - starts[first]):
            raise RuntimeError(f"the ids of a table of {self._n_rows} rows changed while it was being saved")
        return order
