"""One set of marks: the rows that have changed since one moment, and the ids that were erased."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.kernels import compiled, is_marked
from recckpt.sparse.table.rows import Erasure

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class MarkSet:
    """What has changed since one moment: a bit a row, and the ids that were erased; or everything."""

    def __init__(self, *, is_replaced: bool) -> None:
        self.is_replaced = is_replaced
        self.bits = np.zeros(0, np.uint8)
        self._is_shared = False  # the bits are those of a save, too, and change no more
        self._count = np.zeros(1, np.int64)  # of bits that are 1, all of them of rows that are there
        self.erased: list[Int64s] = []  # some may be there again: those have a row that is marked
        self.n_erased = 0

    @property
    def has_changes(self) -> bool:
        """Whether anything has changed."""
        return self.is_replaced or self.n_erased > 0 or self.n_marked > 0

    @property
    def n_marked(self) -> int:
        """Rows that are marked."""
        return int(self._count[0])

    def mark(self, rows: Int64s, n_rows: int) -> None:
        """Mark ``rows``, of ``n_rows``, which are about to change."""
        if not self.is_replaced:
            self._reserve(n_rows)
            self._own()
            _mark(rows, self.bits, self._count)

    def erase(self, ids: Int64s, rows: Int64s, n_rows: int) -> None:
        """Remember ``ids`` and mark their ``rows``, which are about to be erased: if they are not, nothing is lost."""
        if self.is_replaced:
            return
        if 2 * (self.n_erased + len(ids)) > n_rows - len(ids):  # then all rows are hardly more
            self.replace()
            return
        self.mark(rows, n_rows)
        self.erased.append(ids)
        self.n_erased += len(ids)

    def note_erased(self, ids: Int64s) -> None:
        """Remember ``ids``, which have no row by now."""
        self.erased.append(ids)
        self.n_erased += len(ids)

    def move(self, erasure: Erasure) -> None:
        """Follow the rows that have moved over erased ones, and forget the places that nothing is in any more."""
        if not self.is_replaced:
            self._own()
            _move_marks(erasure.movers, erasure.holes, self.bits, self._count)
            _unmark(erasure.rows[len(erasure.holes) :], self.bits, self._count)

    def replace(self) -> None:
        """Take everything for changed."""
        self.is_replaced = True
        self.bits, self.erased, self._count = np.zeros(0, np.uint8), [], np.zeros(1, np.int64)

    def share(self, n_rows: int) -> Bytes:
        """Return a bit for each of ``n_rows`` rows, in memory that this changes no more; what follows is copied."""
        self._reserve(n_rows)
        self._is_shared = True
        return self.bits

    def _own(self) -> None:
        if self._is_shared:
            self.bits = self.bits.copy()
            self._is_shared = False

    def _reserve(self, n_rows: int) -> None:
        n_bytes = 8 * -(-n_rows // 64)  # whole words
        if len(self.bits) < n_bytes:
            bits = np.zeros(max(n_bytes, 2 * len(self.bits)), np.uint8)
            bits[: len(self.bits)] = self.bits
            self.bits = bits
            self._is_shared = False


class HasMarkSets(Protocol):
    """Who wants to know which rows change."""

    @property
    def sets(self) -> tuple[MarkSet, ...]:
        """The sets in which each change is marked."""


def marked_rows(bits: Bytes, n_rows: int) -> Int64s:
    """Return the rows below ``n_rows`` whose bit is 1; ``bits`` are as a set shares them."""
    rows: Int64s = _marked_rows(bits.view(np.uint64), n_rows)
    return rows


@compiled
def _mark(rows: Any, bits: Any, count: Any) -> None:
    """Set the bits of ``rows``; as the others, with the count in one call, which no exception interrupts."""
    for i in range(len(rows)):
        if not is_marked(bits, rows[i]):
            bits[rows[i] >> 3] |= 1 << (rows[i] & 7)
            count[0] += 1


@compiled
def _unmark(rows: Any, bits: Any, count: Any) -> None:
    """Clear the bits of ``rows``."""
    for i in range(len(rows)):
        if is_marked(bits, rows[i]):
            bits[rows[i] >> 3] &= ~(1 << (rows[i] & 7))
            count[0] -= 1


@compiled
def _move_marks(movers: Any, holes: Any, bits: Any, count: Any) -> None:
    """Give each of the ``holes`` the bit of its mover, which is 0 then."""
    for i in range(len(movers)):
        mover, hole = movers[i], holes[i]
        bit = is_marked(bits, mover)
        count[0] -= is_marked(bits, hole)
        bits[mover >> 3] &= ~(1 << (mover & 7))
        bits[hole >> 3] = (bits[hole >> 3] & ~(1 << (hole & 7))) | (bit << (hole & 7))


@compiled
def _marked_rows(words: Any, n_rows: int) -> Any:
    """Return the rows below ``n_rows`` whose bit is 1, of 64 rows a word."""
    n = 0
    for i in range(len(words)):
        word = words[i]
        while word:
            word &= word - np.uint64(1)
            n += 1
    rows = np.empty(n, np.int64)
    n = 0
    for i in range(len(words)):
        word, row = words[i], 64 * i
        while word:
            if word & np.uint64(1):
                rows[n] = row
                n += row < n_rows
            word >>= np.uint64(1)
            row += 1
    return rows[:n]
