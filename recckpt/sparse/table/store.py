"""The interface through which savers read a table: snapshots of its rows, and marks of changed rows."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.kernels import compiled, is_marked
from recckpt.sparse.table.rows import Erasure
from recckpt.sparse.table.snapshot import Log, PreImages, RowIds, Snapshot
from recckpt.types import EMBEDDING, SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_SPARE_BYTES, _SPARE_ID_BYTES = 256 << 20, 16 << 20  # memory of logs kept for reuse, because fresh memory is slow


class MarkSet:
    """Changes since a point in time: one bit per row and the erased ids, or the fact that all rows were replaced."""

    def __init__(self, *, is_replaced: bool) -> None:
        self.is_replaced = is_replaced
        self.bits = np.zeros(0, np.uint8)
        self._is_shared = False  # True if a save uses the bits, too: then they are copied before a change
        self._count = np.zeros(1, np.int64)  # number of bits that are 1, all of them for existing rows
        self.erased: list[Int64s] = []  # some may have been added again; their new rows are marked
        self.n_erased = 0

    @property
    def n_marked(self) -> int:
        return int(self._count[0])

    def mark(self, rows: Int64s, n_rows: int) -> None:
        if not self.is_replaced:
            self._reserve(n_rows)
            self._own()
            _mark(rows, self.bits, self._count)

    def erase(self, ids: Int64s, rows: Int64s, n_rows: int) -> None:
        """Note ``ids`` and mark their ``rows``. Called before the erase, so that nothing is lost if the erase fails."""
        if self.is_replaced:
            return
        if 2 * (self.n_erased + len(ids)) > n_rows - len(ids):  # then writing all rows costs hardly more
            self.replace()
            return
        self.mark(rows, n_rows)
        self.note_erased(ids)

    def note_erased(self, ids: Int64s) -> None:
        self.erased.append(ids)
        self.n_erased += len(ids)

    def move(self, erasure: Erasure) -> None:
        """Move the bits of rows that moved into gaps, and clear the bits behind the last row."""
        if not self.is_replaced:
            self._own()
            _move_marks(erasure.movers, erasure.holes, self.bits, self._count)
            _unmark(erasure.rows[len(erasure.holes) :], self.bits, self._count)

    def replace(self) -> None:
        self.is_replaced = True
        self.bits, self.erased, self._count = np.zeros(0, np.uint8), [], np.zeros(1, np.int64)

    def share(self, n_rows: int) -> Bytes:
        """Return one bit per row for ``n_rows`` rows; later changes go to a copy of the bits."""
        self._reserve(n_rows)
        self._is_shared = True
        return self.bits

    def _own(self) -> None:
        if self._is_shared:
            self.bits = self.bits.copy()
            self._is_shared = False

    def _reserve(self, n_rows: int) -> None:
        n_bytes = 8 * -(-n_rows // 64)  # padded to whole words
        if len(self.bits) < n_bytes:
            bits = np.zeros(max(n_bytes, 2 * len(self.bits)), np.uint8)
            bits[: len(self.bits)] = self.bits
            self.bits = bits
            self._is_shared = False


class HasMarkSets(Protocol):
    @property
    def sets(self) -> tuple[MarkSet, ...]: ...


def marked_rows(bits: Bytes, n_rows: int) -> Int64s:
    """Return the rows below ``n_rows`` whose bit is 1; ``bits`` come from :meth:`MarkSet.share`."""
    rows: Int64s = _marked_rows(bits.view(np.uint64), n_rows)
    return rows


@compiled
def _mark(rows: Any, bits: Any, count: Any) -> None:
    """Set bits and count them; one compiled call, so that no exception interrupts, as in the next two functions."""
    for i in range(len(rows)):
        if not is_marked(bits, rows[i]):
            bits[rows[i] >> 3] |= 1 << (rows[i] & 7)
            count[0] += 1


@compiled
def _unmark(rows: Any, bits: Any, count: Any) -> None:
    for i in range(len(rows)):
        if is_marked(bits, rows[i]):
            bits[rows[i] >> 3] &= ~(1 << (rows[i] & 7))
            count[0] -= 1


@compiled
def _move_marks(movers: Any, holes: Any, bits: Any, count: Any) -> None:
    """Move each mover's bit to its hole."""
    for i in range(len(movers)):
        mover, hole = movers[i], holes[i]
        bit = is_marked(bits, mover)
        count[0] -= is_marked(bits, hole)
        bits[mover >> 3] &= ~(1 << (mover & 7))
        bits[hole >> 3] = (bits[hole >> 3] & ~(1 << (hole & 7))) | (bit << (hole & 7))


@compiled
def _marked_rows(words: Any, n_rows: int) -> Any:
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


class Ids(Protocol):
    def pieces(self, begin: int, end: int) -> Iterator[Tensor]: ...

    def gather(self, rows: npt.NDArray[np.int64]) -> Tensor: ...

    def to_tensor(self, n_rows: int) -> Tensor: ...

    def gather_into(self, rows: npt.NDArray[Any], target: npt.NDArray[np.uint8]) -> None: ...


class Store(ABC):
    """Rows whose changes all go through the store, which first notifies snapshots and marks.

    Attributes:
        lock: hold it to change rows or to take a snapshot.
        says_what_changes: whether marks are notified of rows that change; otherwise fingerprints find those rows.
        audit: n to compare all marks with fingerprints at every n-th save, and some rows' marks at each save. None if
            only recckpt writes the rows.
    """

    lock: threading.RLock
    says_what_changes = True
    audit: int | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def ids(self) -> Ids: ...

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column]: ...

    @property
    def saved_columns(self) -> Mapping[str, Column]:
        return self.columns

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """Slots of :attr:`saved_columns`, in file order."""
        return in_order(column.spec for column in self.saved_columns.values())

    def find(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        here = self.ids.to_tensor(len(self)).numpy()
        order = np.argsort(here)
        at = np.searchsorted(here, ids, sorter=order).clip(max=max(0, len(here) - 1))
        rows = order[at] if len(here) else np.full(len(ids), -1)
        return np.where(here[rows] == ids, rows, -1) if len(here) else rows

    def mark_noted(self) -> None:
        """Mark rows whose changes were noted but not marked yet. Called before marks are read or dropped."""
        return

    def distrust(self) -> None:
        """From now on, do not rely on being notified of changes."""
        self.says_what_changes = False

    @abstractmethod
    def snapshot(self, name: str, slots: Collection[str] | None = None) -> Snapshot:
        """Return the current rows, with all or some slots; later changes of the table do not affect them."""

    @abstractmethod
    def track(self, marks: HasMarkSets) -> None: ...


def in_order(slots: Iterable[SlotSpec]) -> tuple[SlotSpec, ...]:
    """Sort slots in file order: ``embedding`` first, the others by name."""
    return tuple(sorted(slots, key=lambda slot: (slot.name != EMBEDDING, slot.name)))


class StoredTable(Protocol):
    """A table with its rows in a :class:`Store`: a HashTable or a live table."""

    name: str

    @property
    def store(self) -> Store: ...


def is_stored(table: object) -> TypeGuard[StoredTable]:
    return isinstance(getattr(table, "store", None), Store)


class Observers:
    """Snapshots and marks of one store, held by weak references. Used under the lock of the store."""

    def __init__(self) -> None:
        self._snapshots: list[weakref.ref[Snapshot]] = []
        self._marks: list[weakref.ref[HasMarkSets]] = []
        self._spare_logs: tuple[Log | None, Log] | None = None  # (for ids, for slots), to reuse

    @property
    def has_snapshot(self) -> bool:
        return any(reference() is not None for reference in self._snapshots)

    @property
    def has_marks(self) -> bool:
        return any(not marks.is_replaced for marks in self.mark_sets())

    def snapshot(
        self, name: str, n_rows: int, ids: Column | RowIds, columns: Mapping[str, Column], slots: Collection[str] | None
    ) -> Snapshot:
        """Return the first ``n_rows`` rows as they are now. Pass ``ids`` as a column if they may change."""
        names = sorted(columns, key=lambda slot: (slot != EMBEDDING, slot))
        columns = {slot: columns[slot] for slot in names if slots is None or slot in slots}
        specs = tuple(column.spec for column in columns.values())
        logs, self._spare_logs = self._spare_logs, None
        if logs is None or logs[1].specs != specs:
            logs = (Log([ids.spec]) if isinstance(ids, Column) else None, Log(specs))  # ids apart: they rarely change
        on_close = partial(self._take_back, *logs)
        if isinstance(ids, Column):
            assert logs[0] is not None
            ids = PreImages(n_rows, {ids.spec.name: ids}, logs[0])
        snapshot = Snapshot(name, n_rows, ids, columns, log=logs[1], on_close=on_close)
        self._snapshots = [*(r for r in self._snapshots if r() is not None), weakref.ref(snapshot)]
        return snapshot

    def track(self, marks: HasMarkSets) -> None:
        self._marks = [*(r for r in self._marks if r() is not None), weakref.ref(marks)]

    def announce(self, rows: Int64s, n_rows: int, *, with_ids: bool) -> None:
        """Before ``rows`` change, have snapshots copy and marks mark them; distinct rows if there is a snapshot.

        ``n_rows`` is the size of the store. Pass ``with_ids`` if the rows are about to get other ids.
        """
        self.keep(rows, with_ids=with_ids)
        self.mark(rows, n_rows)

    def mark(self, rows: Int64s, n_rows: int) -> None:
        for marks in self.mark_sets():
            marks.mark(rows, n_rows)

    def keep(self, rows: Int64s, *, with_ids: bool) -> None:
        for reference in self._snapshots:
            snapshot = reference()
            if snapshot is not None and len(rows):
                snapshot.keep(rows, with_ids=with_ids)

    def replaced(self) -> None:
        for marks in self.mark_sets():
            marks.replace()

    def mark_sets(self) -> list[MarkSet]:
        return [some for reference in self._marks if (marks := reference()) is not None for some in marks.sets]

    def fail_snapshots(self, error: Exception) -> None:
        """Raise this error in all further reads of snapshots, because rows changed before they were copied aside."""
        for reference in self._snapshots:
            snapshot = reference()
            if snapshot is not None:
                snapshot.fail(error)

    def forget_snapshots(self) -> None:
        """Stop copying rows aside for the snapshots that exist now."""
        self._snapshots = []

    def _take_back(self, ids: Log | None, slots: Log) -> None:
        if ids is not None:
            ids.forget(_SPARE_ID_BYTES)
        slots.forget(_SPARE_BYTES)
        self._spare_logs = ids, slots
