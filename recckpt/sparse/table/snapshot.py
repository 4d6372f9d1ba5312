"""The rows of a table as they were at one moment, while training goes on changing them.

Before a row changes that a writer still needs, its old values are copied aside, once. Writers lay these copies over
what they have read. So a snapshot costs nothing when it is taken, and only rows that change meanwhile are copied.
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
_PIECE_ROWS = 1 << 17  # ids read at a time: 1 MiB
_ALL = np.zeros(0, np.uint8)  # bits, where all rows are needed


class Log:
    """Copies of rows on the CPU, in the order in which they were made; the memory serves one snapshot after another."""

    def __init__(self, specs: Sequence[SlotSpec]) -> None:
        self.specs = tuple(specs)  # what is copied of a row
        self.columns = {spec.name: Column(spec, torch.device("cpu")) for spec in specs}
        self.places = IdIndex()  # row -> place

    def copy(self, rows: Int64s, columns: Mapping[str, Column], n_rows: int) -> None:
        begin = len(self.places)
        for name, column in self.columns.items():
            # The first block as large as it can get: growing would copy it, and what is not touched costs nothing.
            column.reserve(max(begin + len(rows), min(n_rows, 1 << column.shift)))
            columns[name].copy_rows(rows, column, begin)

    def forget(self, keep_bytes: int) -> None:
        n_rows = keep_bytes // max(1, sum(spec.row_bytes for spec in self.specs))
        for column in self.columns.values():
            column.shrink(-(-n_rows >> column.shift))
        self.places.clear(n_rows)


class PreImages:
    """Columns at one moment: training copies rows aside before it writes; readers lay the copies over what they read.

    A reader takes the live values first and only then looks which of its rows were copied aside, so values that changed
    while they were read are overwritten. Thread-safe. The log must be empty and have the same columns.
    """

    def __init__(self, n_rows: int, columns: Mapping[str, Column], log: Log) -> None:
        self.n_kept = 0
        self._n_rows = n_rows
        self._open: tuple[dict[str, Column], Log] | None = {n: c.frozen() for n, c in columns.items()}, log
        self._marks = np.zeros(-(-n_rows // 8), np.uint8)  # a bit a row: copied aside, or read for the last time
        self._needed = _ALL  # a bit a row, once not all are
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def keep(self, rows: Int64s) -> None:
        """Copy aside those of the distinct ``rows`` that are still needed; they are about to change."""
        with self._lock:
            if self._open is None:
                return
            columns, log = self._open
            rows = unmarked_rows(rows, self._n_rows, self._marks, self._needed)
            try:
                log.places.settle()  # what was claimed here before an interrupt
                log.copy(rows, columns, self._n_rows)
                log.places.claim(rows)
                keep_rows(log.places.counts, rows, self._marks)
            except MemoryError as error:  # the snapshot is lost, but training goes on
                self._failure, self._open = error, None
            self.n_kept = len(log.places)

    def fail(self, error: Exception) -> None:
        with self._lock:
            if self._open is not None:
                self._failure, self._open = error, None

    def read(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy rows of columns into one target each. After ``is_last`` they may change, and must not be read again.

        RuntimeError if they were, or this is closed; MemoryError if copying aside failed; or what :meth:`fail` was
        given.
        """
        columns, _ = self._opened()
        for name, target in targets.items():
            columns[name].gather_into(rows, target)
        with self._lock:  # what is not copied aside by now has not been written either
            _, log = self._opened()
            if not (is_last or len(log.places)):
                return
            at = pick_marked(rows, self._marks, self._needed, is_last)
            if len(at) == 0:  # as nearly always, where few rows change meanwhile
                return
            places = log.places.find(rows[at].astype(np.int64))
            kept = {name: log.columns[name].frozen() for name in targets}
        if places.min() < 0:
            raise RuntimeError(f"row {rows[at[places.argmin()]]} of a snapshot is read for the second time")
        for name, target in targets.items():
            kept[name].lay_over(places, at, target)
        self._opened()  # once this is closed, the memory of the log is another's

    @property
    def is_on_cpu(self) -> bool:
        columns, _ = self._opened()
        return all(column.is_on_cpu for column in columns.values())

    def memory(self, name: str, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the bytes of rows in place, which change as the table does."""
        columns, _ = self._opened()
        columns[name].memory.check_unmoved()
        columns[name].wait_for_writes()
        for piece in columns[name].pieces(begin, end):
            yield piece.reshape(-1).view(torch.uint8)

    def kept_among(self, begin: int, end: int) -> Int64s:
        """Return which of the rows [begin, end) were copied aside; none may have been read for the last time."""
        with self._lock:
            columns, log = self._opened()
            for column in columns.values():  # what was read of them before
                column.memory.check_unmoved()
            if not len(log.places):
                return np.empty(0, np.int64)
            kept: Int64s = begin + pick_marked(np.arange(begin, end), self._marks, self._needed, False)
            return kept

    def narrow(self, bits: Bytes) -> None:
        """From now on protect, and allow to read, only rows whose bit is 1. The bits must not change."""
        with self._lock:
            self._needed = bits

    def close(self) -> bool:
        """Release all memory, and say whether there was any."""
        with self._lock:
            was_open, self._open = self._open is not None, None
        return was_open

    def gather_into(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        self.read(rows, dict.fromkeys(self._opened()[0], target), is_last=False)

    def _opened(self) -> tuple[dict[str, Column], Log]:
        """Raise what :meth:`fail` was given, or RuntimeError if this is closed."""
        if self._failure is not None:
            raise self._failure
        if self._open is None:
            raise RuntimeError("the snapshot is closed: it cannot be read any more")
        return self._open


class RowIds(Protocol):
    """The ids of rows: :class:`PreImages` of them, or ids that never change."""

    def gather_into(self, rows: npt.NDArray[Any], target: Bytes) -> None: ...


class Snapshot:
    """Rows 0 to ``n_rows - 1`` of a table at the moment this is made.

    Reading is thread-safe, also beside the one thread that changes the table and calls :meth:`keep` before it writes.
    ``on_close`` is called once, when the log is free again.

    Attributes:
        in_place: the live slots; None if rows do not lie as they are read.
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
        """Copy aside distinct ``rows``, which are about to change or, ``with_ids``, to get other ids."""
        for images in self._images if with_ids else self._images[:1]:
            images.keep(rows)

    def read_ids(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        self._ids.gather_into(rows, target)

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy rows of some slots into one target each. After ``is_last`` they must not be read again, in any slot."""
        self._slots.read(rows, targets, is_last=is_last)

    def narrow(self, bits: Bytes) -> None:
        for images in self._images:
            images.narrow(bits)

    def fail(self, error: Exception) -> None:
        for images in self._images:
            images.fail(error)

    def check(self) -> None:
        """Raise what :meth:`fail` was given: some of what was read may be of another moment."""
        self._slots._opened()

    def close(self) -> None:
        was_open = self._slots.close()
        for images in self._images[1:]:
            images.close()
        if was_open:
            self._on_close()


class SnapshotOver(Snapshot):
    """A snapshot read through another one, ``rows``, whose memory it shares; subclasses say what differs."""

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
