"""The index of a table: maps ids to rows, which are numbered 0, 1, 2, ... without gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from recckpt.sparse.table.kernels import compiled, fence, mix64, prefetch

Int64s = npt.NDArray[np.int64]

_MIN_CAPACITY = 64
_EMPTY = 0  # stands in the place of row + 1: every int64 is a legal id, so no id can mark an empty cell
_CELL_BYTES = 16
_AHEAD = 16  # ids; early enough to hide a cache miss, late enough that the cell is still in the cache when it is read
N_PARTS = 1 << 16  # parts of the ids, cut by the last bits of their hash (buckets are cut by the first bits)
N_ROWS, N_CLAIMED, VERSION = 0, 1, 2  # indices into ``counts``


class IdIndex:
    """Open addressing with linear probing over cells (id, row + 1), at most 70 % full.

    Erasing shifts the following cells back (Knuth, TAOCP 3, 6.4, algorithm R), so there are no tombstones and look-ups
    never slow down.

    New ids are claimed first: they have cells and rows, but :meth:`find` does not see them until one store of a number
    publishes them. :meth:`settle` undoes unpublished claims. Only one thread at a time may change an index. Any number
    of threads may call :meth:`find` meanwhile; they must repeat it if :attr:`version` was odd or has changed. Loops run
    without the GIL.

    Attributes:
        cells: the array is replaced when it grows.
        counts: an array, so that one compiled call can change cells, counts and columns.
    """

    def __init__(self) -> None:
        self.cells = np.zeros((_MIN_CAPACITY, 2), np.int64)
        self.counts = np.zeros(3, np.int64)

    def __len__(self) -> int:
        return int(self.counts[N_ROWS])

    @property
    def n_claimed(self) -> int:
        """Number of rows, including unpublished ones."""
        return int(self.counts[N_CLAIMED])

    @property
    def version(self) -> int:
        """Incremented before and after rows are renumbered, so that it is odd during the renumbering."""
        return int(self.counts[VERSION])

    def reserve(self, n_rows: int) -> None:
        capacity = len(self.cells)
        while capacity * 7 < n_rows * 10:
            capacity *= 2
        if capacity > len(self.cells):
            cells = np.zeros((capacity, 2), np.int64)
            _rehash(self.cells, cells)
            self.cells = cells  # threads that search the old cells keep them alive

    def clear(self, keep_rows: int = 0) -> None:
        """Forget all ids, and free memory beyond what ``keep_rows`` need. No search may run at the same time."""
        self.counts[:] = 0
        if len(self.cells) * 7 <= max(keep_rows, _MIN_CAPACITY) * 20:
            self.cells.fill(0)
        else:
            self.cells = np.zeros((_MIN_CAPACITY, 2), np.int64)

    def fitted(self) -> IdIndex:
        twin = IdIndex()
        twin.reserve(len(self))
        _rehash(self.cells, twin.cells)
        twin.counts[:VERSION] = len(self)
        return twin

    def copy(self) -> IdIndex:
        twin = IdIndex()
        twin.cells, twin.counts = self.cells.copy(), self.counts.copy()
        return twin

    def find(self, ids: Int64s) -> Int64s:
        rows = np.empty(len(ids), np.int64)
        _find(self.cells, self.counts, ids, rows)
        return rows

    def part(self, begin: int, end: int) -> tuple[Int64s, Int64s]:
        """Return rows and ids, unordered, of hashes with their last 16 bits in [begin, end); read no other cells."""
        part: Int64s = _part(self.cells, self.counts, begin, end)
        return part[0], part[1]

    def claim(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return the row of each id, and the new ids; their rows are numbered last, in this order, unpublished."""
        rows = np.empty(len(ids), np.int64)
        new_ids = np.empty(len(ids), np.int64)
        done = n_new = 0
        while done < len(ids):
            n_claimed = int(self.counts[N_CLAIMED])
            room = len(self.cells) * 7 // 10 - n_claimed
            if room <= 0:
                self.reserve(n_claimed + 1)
                continue
            n_done, n_added = _claim(self.cells, self.counts, ids[done:], room, rows[done:], new_ids[n_new:])
            done, n_new = done + n_done, n_new + n_added
        return rows, new_ids[:n_new]

    def publish(self) -> None:
        self.counts[N_ROWS] = self.counts[N_CLAIMED]

    def find_or_add(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        rows, new_ids = self.claim(ids)
        self.counts[N_ROWS] = self.counts[N_CLAIMED]
        return rows, new_ids

    def settle(self) -> None:
        """Undo claims that a failed change has not published, and a renumbering that it has not finished."""
        if self.counts[N_CLAIMED] != self.counts[N_ROWS] or self.counts[VERSION] & 1:
            _drop_claims(self.cells, self.counts)


@njit(nogil=True, inline="always")
def _home(id_: Any, mask: int) -> Any:
    return np.int64(mix64(np.uint64(id_))) & mask


@njit(nogil=True, inline="always")
def _cell_of(cells: Any, id_: Any) -> Any:
    mask = len(cells) - 1
    cell = _home(id_, mask)
    while cells[cell, 1] != _EMPTY and cells[cell, 0] != id_:
        cell = (cell + 1) & mask
    return cell


@njit(nogil=True, inline="always")
def _prefetch_cell(cells: Any, ids: Any, i: int) -> None:
    if i < len(ids):
        prefetch(cells.ctypes.data + _home(ids[i], len(cells) - 1) * _CELL_BYTES)


@compiled
def _find(cells: Any, counts: Any, ids: Any, rows: Any) -> None:
    n_rows = counts[N_ROWS]
    fence()
    for i in range(len(ids)):
        _prefetch_cell(cells, ids, i + _AHEAD)
        row = cells[_cell_of(cells, ids[i]), 1] - 1
        rows[i] = row if row < n_rows else -1


@compiled
def _part(cells: Any, counts: Any, begin: int, end: int) -> Any:
    mask = len(cells) - 1
    n_homes = min(end - begin, len(cells))  # cells of the part per run; there is one run for each 65,536 cells
    part = np.empty((2, counts[N_ROWS]), np.int64)  # untouched memory costs nothing
    n = 0
    for run in range(max(1, len(cells) // N_PARTS)):
        first = (run * N_PARTS + begin) & mask
        for i in range(len(cells)):
            cell = (first + i) & mask
            if cells[cell, 1] == _EMPTY:
                if i >= n_homes:
                    break
                continue
            is_in_part = ((_home(cells[cell, 0], mask) - first) & mask) < n_homes  # false for ids displaced from before
            if is_in_part and begin <= _home(cells[cell, 0], N_PARTS - 1) < end and cells[cell, 1] <= counts[N_ROWS]:
                part[0, n] = cells[cell, 1] - 1
                part[1, n] = cells[cell, 0]
                n += 1
    return part[:, :n].copy()


@compiled
def _claim(  # noqa: PLR0917  # compiled functions take positions only
    cells: Any, counts: Any, ids: Any, room: int, rows: Any, new_ids: Any
) -> tuple[int, int]:
    """Claim ids until all are done or ``room`` is used up; return how many are done, and how many were new."""
    n_claimed, added = counts[N_CLAIMED], 0
    for i in range(len(ids)):
        _prefetch_cell(cells, ids, i + _AHEAD)
        id_ = ids[i]
        cell = _cell_of(cells, id_)
        if cells[cell, 1] == _EMPTY:
            if added == room:
                counts[N_CLAIMED] += added
                return i, added
            new_ids[added] = id_
            added += 1
            cells[cell, 0] = id_
            cells[cell, 1] = n_claimed + added
        rows[i] = cells[cell, 1] - 1
    counts[N_CLAIMED] += added
    return len(ids), added


@compiled
def _rehash(old: Any, new: Any) -> None:
    mask = len(new) - 1
    for i in range(len(old)):
        if old[i, 1] != _EMPTY:
            cell = _home(old[i, 0], mask)
            while new[cell, 1] != _EMPTY:  # all ids are distinct, so none has to be compared
                cell = (cell + 1) & mask
            new[cell, 0] = old[i, 0]
            new[cell, 1] = old[i, 1]


@njit(nogil=True, inline="always")
def _empty_cell(cells: Any, hole: Any) -> None:
    mask = len(cells) - 1
    follower = (hole + 1) & mask
    while cells[follower, 1] != _EMPTY:
        home = _home(cells[follower, 0], mask)
        if ((follower - home) & mask) >= ((follower - hole) & mask):
            cells[hole, 0] = cells[follower, 0]
            cells[hole, 1] = cells[follower, 1]
            hole = follower
        follower = (follower + 1) & mask
    cells[hole, 1] = _EMPTY


@compiled
def begin_renumbering(counts: Any) -> None:
    """Make look-ups repeat until :func:`erase_ids` or ``settle`` completes the renumbering."""
    counts[VERSION] |= 1
    fence()


@compiled
def _drop_claims(cells: Any, counts: Any) -> None:
    begin_renumbering(counts)
    for cell in range(len(cells)):
        while cells[cell, 1] > counts[N_ROWS]:
            _empty_cell(cells, cell)
    counts[N_CLAIMED] = counts[N_ROWS]
    fence()
    counts[VERSION] += 1


@compiled
def erase_ids(cells: Any, counts: Any, ids: Any, moved_ids: Any, rows: Any) -> None:
    """Remove distinct present ``ids``, and give ``moved_ids`` their new ``rows``, which closes the gaps."""
    counts[VERSION] |= 1
    fence()
    for i in range(len(ids)):
        _prefetch_cell(cells, ids, i + _AHEAD)
        _empty_cell(cells, _cell_of(cells, ids[i]))
    for i in range(len(moved_ids)):
        _prefetch_cell(cells, moved_ids, i + _AHEAD)
        cells[_cell_of(cells, moved_ids[i]), 1] = rows[i] + 1
    counts[N_ROWS] -= len(ids)
    counts[N_CLAIMED] = counts[N_ROWS]
    fence()
    counts[VERSION] += 1
