"""The index of a table: id -> row, with rows numbered 0, 1, 2, ... without gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from recckpt.sparse.table.kernels import mix64, prefetch

Int64s = npt.NDArray[np.int64]

_MIN_CAPACITY = 64
_EMPTY = 0  # in place of row + 1: every int64 is a legal id, so no id can mark an empty cell
_CELL_BYTES = 16
_AHEAD = 16  # ids; far enough to hide a miss, near enough to be in the cache still when its turn comes


class IdIndex:
    """Open addressing with linear probing over cells (id, row + 1), at most 70 % full.

    Erasing shifts the following cells back (Knuth, TAOCP 3, 6.4, algorithm R), so there are no
    tombstones and look-ups never slow down. Not thread-safe while it changes; the loops run without the
    GIL.
    """

    def __init__(self) -> None:
        self._cells = _empty_cells(_MIN_CAPACITY)
        self._n_rows = 0

    def __len__(self) -> int:
        return self._n_rows

    @property
    def nbytes(self) -> int:
        """Bytes of the cells."""
        return self._cells.nbytes

    def reserve(self, n_rows: int) -> None:
        """Make room for ``n_rows`` ids in all, so that adding them does not rehash."""
        capacity = len(self._cells)
        while capacity * 7 < n_rows * 10:
            capacity *= 2
        if capacity > len(self._cells):
            cells = _empty_cells(capacity)
            _rehash(self._cells, cells)
            self._cells = cells

    def clear(self, keep_rows: int = 0) -> None:
        """Forget all ids, and memory beyond what ``keep_rows`` need."""
        self._n_rows = 0
        if len(self._cells) * 7 <= max(keep_rows, _MIN_CAPACITY) * 20:
            self._cells.fill(0)
        else:
            self._cells = _empty_cells(_MIN_CAPACITY)

    def copy(self) -> IdIndex:
        """Return an independent copy."""
        twin = IdIndex()
        twin._cells, twin._n_rows = self._cells.copy(), self._n_rows
        return twin

    def find(self, ids: Int64s) -> Int64s:
        """Return the row of each id, -1 where it is absent."""
        rows = np.empty(len(ids), np.int64)
        _find(self._cells, ids, rows)
        return rows

    def find_or_add(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return the row of each id, and the ids that were new; their rows come last, in this order."""
        rows = np.empty(len(ids), np.int64)
        new_ids = np.empty(len(ids), np.int64)
        done = n_new = 0
        while done < len(ids):
            room = len(self._cells) * 7 // 10 - self._n_rows
            if room <= 0:
                self.reserve(self._n_rows + 1)
                continue
            n_done, n_added = _find_or_add(self._cells, ids[done:], self._n_rows, room, rows[done:], new_ids[n_new:])
            done, n_new, self._n_rows = done + n_done, n_new + n_added, self._n_rows + n_added
        return rows, new_ids[:n_new]

    def erase(self, ids: Int64s) -> Int64s:
        """Forget ``ids`` and return the rows they had; the caller closes the gaps with :meth:`move`."""
        rows = np.empty(len(ids), np.int64)
        n_erased = _erase(self._cells, ids, rows)
        self._n_rows -= n_erased
        return rows[:n_erased]

    def move(self, ids: Int64s, rows: Int64s) -> None:
        """Give present ``ids`` new ``rows``."""
        _move(self._cells, ids, rows)


def _empty_cells(capacity: int) -> Int64s:
    return np.zeros((capacity, 2), np.int64)


@njit(nogil=True, inline="always")
def _home(id_: Any, mask: int) -> Any:
    """Return the cell where the search for ``id_`` begins."""
    return np.int64(mix64(np.uint64(id_))) & mask


@njit(nogil=True, inline="always")
def _cell_of(cells: Any, id_: Any) -> Any:
    """Return the cell that holds ``id_``, or the empty cell where it belongs."""
    mask = len(cells) - 1
    cell = _home(id_, mask)
    while cells[cell, 1] != _EMPTY and cells[cell, 0] != id_:
        cell = (cell + 1) & mask
    return cell


@njit(nogil=True, inline="always")
def _prefetch_cell(cells: Any, ids: Any, i: int) -> None:
    """Fetch the home of ``ids[i]``, if there is one, so that the misses of many ids overlap."""
    if i < len(ids):
        prefetch(cells.ctypes.data + _home(ids[i], len(cells) - 1) * _CELL_BYTES)


@njit(nogil=True, cache=True)
def _find(cells: Any, ids: Any, rows: Any) -> None:
    for i in range(len(ids)):
        _prefetch_cell(cells, ids, i + _AHEAD)
        rows[i] = cells[_cell_of(cells, ids[i]), 1] - 1


@njit(nogil=True, cache=True)
def _find_or_add(  # noqa: PLR0917  # compiled functions take positions only
    cells: Any, ids: Any, n_rows: int, room: int, rows: Any, new_ids: Any
) -> tuple[int, int]:
    """Go on until the ids or the room end; return how many ids are done, and how many were added."""
    added = 0
    for i in range(len(ids)):
        _prefetch_cell(cells, ids, i + _AHEAD)
        id_ = ids[i]
        cell = _cell_of(cells, id_)
        if cells[cell, 1] == _EMPTY:
            if added == room:
                return i, added
            new_ids[added] = id_
            added += 1
            cells[cell, 0] = id_
            cells[cell, 1] = n_rows + added
        rows[i] = cells[cell, 1] - 1
    return len(ids), added


@njit(nogil=True, cache=True)
def _rehash(old: Any, new: Any) -> None:
    mask = len(new) - 1
    for i in range(len(old)):
        if old[i, 1] != _EMPTY:
            cell = _home(old[i, 0], mask)
            while new[cell, 1] != _EMPTY:  # the ids are all different: none has to be compared
                cell = (cell + 1) & mask
            new[cell, 0] = old[i, 0]
            new[cell, 1] = old[i, 1]


@njit(nogil=True, cache=True)
def _erase(cells: Any, ids: Any, rows: Any) -> int:
    mask = len(cells) - 1
    n_erased = 0
    for i in range(len(ids)):
        hole = _cell_of(cells, ids[i])
        if cells[hole, 1] == _EMPTY:
            continue
        rows[n_erased] = cells[hole, 1] - 1
        n_erased += 1
        follower = (hole + 1) & mask
        while cells[follower, 1] != _EMPTY:
            home = _home(cells[follower, 0], mask)
            if ((follower - home) & mask) >= ((follower - hole) & mask):
                cells[hole, 0] = cells[follower, 0]
                cells[hole, 1] = cells[follower, 1]
                hole = follower
            follower = (follower + 1) & mask
        cells[hole, 1] = _EMPTY
    return n_erased


@njit(nogil=True, cache=True)
def _move(cells: Any, ids: Any, rows: Any) -> None:
    for i in range(len(ids)):
        cells[_cell_of(cells, ids[i]), 1] = rows[i] + 1
