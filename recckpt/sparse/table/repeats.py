"""Ids that come twice, found at the speed at which they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from recckpt.sparse.table.kernels import mix64

Int64s = npt.NDArray[np.int64]
_S48 = np.uint64(48)


class RepeatFinder:
    """Looks for equal ids among those that it is given piece by piece, in bucket order."""

    def __init__(self) -> None:
        self._open = np.empty(0, np.int64)  # of the bucket in which the last piece ended

    def find(self, ids: Int64s) -> int | None:
        """Return an id that came before, None where there is not one."""
        ids = np.concatenate([self._open, ids])
        repeat, begin = _first_repeat(ids)
        self._open = ids[begin:].copy()
        return None if repeat < 0 else int(ids[repeat])


@njit(nogil=True, cache=True)
def _first_repeat(ids: Any) -> tuple[int, int]:
    """Return the position of an id that came before, -1 without one, and where the last bucket begins."""
    longest = n_same = 0
    bucket = np.uint64(1 << 48)  # none
    for i in range(len(ids)):
        found = mix64(np.uint64(ids[i])) >> _S48
        n_same = n_same + 1 if found == bucket else 1
        bucket = found
        longest = max(longest, n_same)
    size = 1
    while size < 2 * longest:
        size *= 2
    cells = np.zeros((size, 2), np.int64)  # id, and 1 + where its bucket begins: what is of another bucket is empty
    bucket, begin = np.uint64(1 << 48), 0
    for i in range(len(ids)):
        hashed = mix64(np.uint64(ids[i]))
        if hashed >> _S48 != bucket:
            bucket, begin = hashed >> _S48, i
        cell = np.int64(hashed) & (size - 1)
        while cells[cell, 1] == begin + 1:
            if cells[cell, 0] == ids[i]:
                return i, begin
            cell = (cell + 1) & (size - 1)
        cells[cell, 0] = ids[i]
        cells[cell, 1] = begin + 1
    return -1, begin
