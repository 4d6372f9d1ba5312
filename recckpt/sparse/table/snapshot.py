"""The rows of a table as they were at one moment, while training goes on changing them.

Before a row changes that a writer still needs, its old values are copied aside, once; writers lay them over what they
have read. So taking a snapshot costs nothing, and only the rows that training changes meanwhile are copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.pre_images import Log, PreImages
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_PIECE_ROWS = 1 << 17  # ids read at a time: 1 MiB


@dataclass(frozen=True)
class Logs:
    """Where a snapshot copies rows to; ids apart, since they seldom change, or never: None."""

    ids: Log | None
    slots: Log


class RowIds(Protocol):
    """The ids of the rows of a snapshot."""

    def gather_into(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        """Copy the ids of rows, as they were at the moment of the snapshot; as often as one likes."""

    def keep(self, rows: Int64s) -> None:
        """Copy aside the ids of ``rows``, which are about to change."""

    def narrow(self, bits: Bytes) -> None:
        """Protect from now on, and let be read, only rows whose bit is 1."""

    def close(self) -> None:
        """Release all memory."""

    def fail(self, error: Exception) -> None:
        """Let whoever reads from now on get this error."""


class IdImages(PreImages):
    """Ids that lie in a column, and change where a row is erased."""

    def __init__(self, n_rows: int, ids: Column, log: Log) -> None:
        super().__init__(n_rows, {ids.spec.name: ids}, log)
        self._name = ids.spec.name

    def gather_into(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        """Copy the ids of rows."""
        self.read(rows, {self._name: target}, is_last=False)


class Snapshot:
    """Rows 0 to ``n_rows - 1`` of a table at the moment this is made.

    Reading is thread-safe, also beside the one thread that changes the table; that one calls :meth:`keep_rows` and
    :meth:`keep_ids` before it writes. Columns are read in their order. When the log serves no longer ``on_close`` is
    called once, maybe from another thread; it must not refer to this.

    Attributes:
        is_in_place: whether rows are read where they lie, as :meth:`memory` shows them.
    """

    is_in_place = True

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
        self._on_close = weakref.finalize(self, on_close)
        self._on_close.atexit = False

    @property
    def ids(self) -> SnapshotIds:
        """The ids, for the order in which the rows are written."""
        return SnapshotIds(self.read_ids)

    @property
    def n_all(self) -> int:
        """Rows of the table: those of the snapshot."""
        return self.n_rows

    @property
    def n_kept(self) -> int:
        """Rows that were copied aside so far."""
        return self._slots.n_kept

    def deletes(self) -> Int64s:
        """Return nothing: who has all rows knows what is not there."""
        return np.empty(0, np.int64)

    def keep_rows(self, rows: Int64s) -> None:
        """Copy aside the slots of ``rows``, all different, which are about to change."""
        self._slots.keep(rows)

    def keep_ids(self, rows: Int64s) -> None:
        """Copy aside the ids of ``rows``, all different, which are about to belong to others."""
        self._ids.keep(rows)

    def read(self, column: int, rows: npt.NDArray[Any], target: Bytes, *, is_last: bool) -> None:
        """Copy rows of the id, column 0, or of a slot; after ``is_last`` they are not read again, in any slot."""
        if column == 0:
            self.read_ids(rows, target)
        else:
            self.read_slots(rows, {self.slots[column - 1].name: target}, is_last=is_last)

    def read_ids(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        """Copy the ids of rows; as often as one likes."""
        self._ids.gather_into(rows, target)

    def peek(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes]) -> None:
        """Copy rows of some slots into a target each; as often as one likes, before they are read for the last time."""
        self.read_slots(rows, targets, is_last=False)

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy rows of some slots into a target each; after ``is_last`` they are not read again."""
        self._slots.read(rows, targets, is_last=is_last)

    @property
    def is_on_cpu(self) -> bool:
        """Whether the slots lie on the CPU."""
        return self._slots.is_on_cpu

    def memory(self, slot: str, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the bytes of rows of a slot where they lie, as they are now: not those :meth:`kept_among`."""
        return self._slots.memory(slot, begin, end)

    def kept_among(self, begin: int, end: int) -> Int64s:
        """Return which of the rows [begin, end), none of which was read for the last time, were copied aside."""
        return self._slots.kept_among(begin, end)

    def narrow(self, bits: Bytes) -> None:
        """Protect from now on, and let be read, only rows whose bit is 1; ``bits`` do not change any more."""
        self._slots.narrow(bits)
        self._ids.narrow(bits)

    def fail(self, error: Exception) -> None:
        """Let whoever reads from now on get this error: rows changed before they were copied aside."""
        self._slots.fail(error)
        self._ids.fail(error)

    def check(self) -> None:
        """Raise what :meth:`fail` was given: some of what was read may be of another moment."""
        self._slots.check()

    def close(self) -> None:
        """Let the table go: nothing is copied aside any more, and nothing may be read."""
        self._slots.close()
        self._ids.close()
        self._on_close()


class SnapshotOver(Snapshot):
    """A snapshot that is read through another one, to which it leaves all that a subclass does not do itself."""

    def __init__(self, rows: Snapshot) -> None:
        self.name, self.n_rows, self.slots, self._rows = rows.name, rows.n_rows, rows.slots, rows

    @property
    def n_kept(self) -> int:
        """Rows that were copied aside so far."""
        return self._rows.n_kept

    def read_ids(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        """Copy the ids of rows."""
        self._rows.read_ids(rows, target)

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy rows of some slots into a target each; after ``is_last`` they are not read again."""
        self._rows.read_slots(rows, targets, is_last=is_last)

    def narrow(self, bits: Bytes) -> None:
        """Protect from now on, and let be read, only rows whose bit is 1."""
        self._rows.narrow(bits)

    def check(self) -> None:
        """Raise what it failed by."""
        self._rows.check()

    def fail(self, error: Exception) -> None:
        """Let whoever reads from now on get this error."""
        self._rows.fail(error)

    def close(self) -> None:
        """Let the table go."""
        self._rows.close()


class SnapshotIds:
    """Ids that ``read_ids`` copies into bytes, read like a column."""

    def __init__(self, read_ids: Callable[[npt.NDArray[Any], Bytes], None]) -> None:
        self._read_ids = read_ids

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield copies that cover the rows [begin, end)."""
        for first in range(begin, end, _PIECE_ROWS):
            yield self.gather(np.arange(first, min(end, first + _PIECE_ROWS)))

    def gather(self, rows: Int64s) -> Tensor:
        """Return the ids of ``rows``."""
        ids = np.empty(len(rows), np.int64)
        self._read_ids(rows, ids.view(np.uint8))
        return torch.from_numpy(ids)

    def to_tensor(self, n_rows: int) -> Tensor:
        """Return the ids of the first rows."""
        return self.gather(np.arange(n_rows))
