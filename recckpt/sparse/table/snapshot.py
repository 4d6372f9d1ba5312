"""Snapshots: the rows of a table as they were at one time, while training goes on changing the table.

Before training changes a row that a writer still needs, the row's old values are copied aside, once. Writers replace
what they have read by these copies. So taking a snapshot costs nothing, and only rows that change later are copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import pick_marked, unmarked_rows
from recckpt.sparse.table.rows import keep_rows
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_PIECE_ROWS = 1 << 17  # number of ids read at a time, 1 MiB
_ALL = np.zeros(0, np.uint8)  # empty bits stand for "all rows are needed"


class Log:
    """Copies of rows on the CPU, in the order of copying; the memory is reused by one snapshot after another."""

    def __init__(self, specs: Sequence[SlotSpec]) -> None:
        self.specs = tuple(specs)  # the slots that are copied of each row
        self.columns = {spec.name: Column(spec, torch.device("cpu")) for spec in specs}
        self.places = IdIndex()  # row -> position of its copy

    def copy(self, rows: Int64s, columns: Mapping[str, Column], n_rows: int) -> None:
        begin = len(self.places)
        for name, column in self.columns.items():
            # Reserve a first block of full size: growing would copy it, and untouched memory costs nothing.
            column.reserve(max(begin + len(rows), min(n_rows, 1 << column.shift)))
            columns[name].copy_rows(rows, column, begin)

    def forget(self, keep_bytes: int) -> None:
        n_rows = keep_bytes // max(1, sum(spec.row_bytes for spec in self.specs))
        for column in self.columns.values():
            column.shrink(-(-n_rows >> column.shift))
        self.places.clear(n_rows)


class PreImages:
    """Columns as they were at one time: training copies rows aside before it writes; readers overlay these copies.

    A reader first reads the live values and only then looks up which of its rows were copied aside, so values that
    changed during the read are replaced. Thread-safe. The log must be empty and have the same columns.
    """

    def __init__(self, n_rows: int, columns: Mapping[str, Column], log: Log) -> None:
        self.n_kept = 0
        self._n_rows = n_rows
        self._open: tuple[dict[str, Column], Log] | None = {n: c.frozen() for n, c in columns.items()}, log
        self._marks = np.zeros(-(-n_rows // 8), np.uint8)  # one bit per row: copied aside, or read for the last time
        self._needed = _ALL  # one bit per row, or ``_ALL``
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def keep(self, rows: Int64s) -> None:
        """Copy aside those of the distinct ``rows`` that are still needed. Called before these rows change."""
        with self._lock:
            if self._open is None:
                return
            columns, log = self._open
            rows = unmarked_rows(rows, self._n_rows, self._marks, self._needed)
            try:
                log.places.settle()  # undoes claims of an interrupted call
                log.copy(rows, columns, self._n_rows)
                log.places.claim(rows)
                keep_rows(log.places.counts, rows, self._marks)
            except MemoryError as error:  # give up the snapshot, so that training goes on
                self._failure, self._open = error, None
            self.n_kept = len(log.places)

    def fail(self, error: Exception) -> None:
        with self._lock:
            if self._open is not None:
                self._failure, self._open = error, None

    def read(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy some columns of rows to one target each. After ``is_last`` the rows may change; do not read them again.

        Raises RuntimeError if they are read again or this object is closed, MemoryError if copying aside failed, or the
        error passed to :meth:`fail`.
        """
        columns, _ = self._opened()
        for name, target in targets.items():
            columns[name].gather_into(rows, target)
        with self._lock:  # rows that are not copied aside by now had not changed when they were read
            _, log = self._opened()
            if not (is_last or len(log.places)):
                return
            at = pick_marked(rows, self._marks, self._needed, is_last)
            if len(at) == 0:  # the common case, if few rows change during a save
                return
            places = log.places.find(rows[at].astype(np.int64))
            kept = {name: log.columns[name].frozen() for name in targets}
        if places.min() < 0:
            raise RuntimeError(f"row {rows[at[places.argmin()]]} of a snapshot is read for the second time")
        for name, target in targets.items():
            kept[name].lay_over(places, at, target)
        self._opened()  # raises if closed meanwhile, because another snapshot may reuse the memory of the log

    @property
    def is_on_cpu(self) -> bool:
        columns, _ = self._opened()
        return all(column.is_on_cpu for column in columns.values())

    def memory(self, name: str, begin: int, end: int) -> Iterator[Tensor]:
        """Yield views of the live bytes of rows, which change as the table changes."""
        columns, _ = self._opened()
        columns[name].memory.check_unmoved()
        columns[name].wait_for_writes()
        for piece in columns[name].pieces(begin, end):
            yield piece.reshape(-1).view(torch.uint8)

    def kept_among(self, begin: int, end: int) -> Int64s:
        """Return which of the rows [begin, end) were copied aside. No row may have been read for the last time."""
        with self._lock:
            columns, log = self._opened()
            for column in columns.values():  # checks the memory that the caller has read
                column.memory.check_unmoved()
            if not len(log.places):
                return np.empty(0, np.int64)
            kept: Int64s = begin + pick_marked(np.arange(begin, end), self._marks, self._needed, False)
            return kept

    def narrow(self, bits: Bytes) -> None:
        """From now on protect, and allow to read, only rows whose bit is 1. The caller must not change the bits."""
        with self._lock:
            self._needed = bits

    def close(self) -> bool:
        """Release all memory; return whether this object was still open."""
        with self._lock:
            was_open, self._open = self._open is not None, None
        return was_open

    def gather_into(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        self.read(rows, dict.fromkeys(self._opened()[0], target), is_last=False)

    def _opened(self) -> tuple[dict[str, Column], Log]:
        """Return columns and log. Raises the error passed to :meth:`fail`, or RuntimeError if this is closed."""
        if self._failure is not None:
            raise self._failure
        if self._open is None:
            raise RuntimeError("the snapshot is closed: it cannot be read any more")
        return self._open


class RowIds(Protocol):
    """The ids of rows: a :class:`PreImages`, or ids that never change."""

    def gather_into(self, rows: npt.NDArray[Any], target: Bytes) -> None: ...


class Snapshot:
    """Rows 0 to ``n_rows - 1`` of a table at the time this snapshot is made.

    Reading is thread-safe, also while one other thread changes the table, if it calls :meth:`keep` before it writes.
    ``on_close`` is called once, when the log can be reused.

    Attributes:
        in_place: the live slots; None if rows are stored in another order than they are read.
    """

    def __init__(
        self,
        name: str,
        n_rows: int,
        ids: RowIds,
        columns: Mapping[str, Column],
        *,
        log: Log,
        on_close: Callable[[], object],
    ) -> None:
        self.name, self.n_rows = name, n_rows
        self.slots: tuple[SlotSpec, ...] = tuple(column.spec for column in columns.values())
        self._slots, self._ids = PreImages(n_rows, columns, log), ids
        self._images = (self._slots, ids) if isinstance(ids, PreImages) else (self._slots,)
        self.in_place: PreImages | None = self._slots
        self._on_close = on_close

    @property
    def ids(self) -> SnapshotIds:
        return SnapshotIds(self.read_ids)

    @property
    def n_all(self) -> int:
        return self.n_rows

    @property
    def n_kept(self) -> int:
        return self._slots.n_kept

    def deletes(self) -> Int64s:
        return np.empty(0, np.int64)

    def keep(self, rows: Int64s, *, with_ids: bool) -> None:
        """Copy aside distinct ``rows`` before they change or, ``with_ids``, before they get other ids."""
        for images in self._images if with_ids else self._images[:1]:
            images.keep(rows)

    def read_ids(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        self._ids.gather_into(rows, target)

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy some slots of rows to one target each. After ``is_last`` these rows must not be read again."""
        self._slots.read(rows, targets, is_last=is_last)

    def narrow(self, bits: Bytes) -> None:
        for images in self._images:
            images.narrow(bits)

    def fail(self, error: Exception) -> None:
        for images in self._images:
            images.fail(error)

    def check(self) -> None:
        """Raise the error passed to :meth:`fail`, if any: rows that were read may have been changed before."""
        self._slots._opened()

    def close(self) -> None:
        was_open = self._slots.close()
        for images in self._images[1:]:
            images.close()
        if was_open:
            self._on_close()


class SnapshotOver(Snapshot):
    """A snapshot that reads through another one, ``rows``, and shares its memory; subclasses change how."""

    def __init__(self, rows: Snapshot) -> None:
        self.name, self.n_rows, self.slots, self._rows = rows.name, rows.n_rows, rows.slots, rows
        self._slots, self._ids, self._images, self._on_close = rows._slots, rows._ids, rows._images, rows._on_close
        self.in_place = rows.in_place


class SnapshotIds:
    def __init__(self, read_ids: Callable[[npt.NDArray[Any], Bytes], None]) -> None:
        self.gather_into = read_ids

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        for first in range(begin, end, _PIECE_ROWS):
            yield self.gather(np.arange(first, min(end, first + _PIECE_ROWS)))

    def gather(self, rows: Int64s) -> Tensor:
        ids = np.empty(len(rows), np.int64)
        self.gather_into(rows, ids.view(np.uint8))
        return torch.from_numpy(ids)

    def to_tensor(self, n_rows: int) -> Tensor:
        return self.gather(np.arange(n_rows))
