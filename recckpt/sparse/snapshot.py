"""The rows of a table as they were at one moment, while training goes on changing them.

A pre-image log: before a row changes that a writer still needs, its old values are copied aside, once; writers lay
them over what they have read. So a snapshot costs nothing when it is taken, and the rows that are touched meanwhile
while it lives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.column import Column
from recckpt.sparse.kernels import first_changes, pick_kept
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_PIECE_ROWS = 1 << 17  # ids read at a time: 1 MiB
_ID = "id"


class Snapshot:
    """Rows 0 to ``n_rows - 1`` of a table at the moment this is made.

    Reading is thread-safe, also beside the one thread that changes the table; that one calls :meth:`keep_rows` and
    :meth:`keep_ids` before it writes.

    Args:
        name: the table.
        n_rows: rows of this moment.
        ids: their ids.
        columns: slot name -> column, in the order in which they are read.
        log: where values are copied to, made by :func:`new_log`; memory that an earlier snapshot has used.
    """

    def __init__(
        self, name: str, n_rows: int, ids: Column, columns: Mapping[str, Column], log: Mapping[str, Column]
    ) -> None:
        self.name, self.n_rows = name, n_rows
        self.slots: tuple[SlotSpec, ...] = tuple(column.spec for column in columns.values())
        self._slots = _PreImages(n_rows, columns, log)
        self._ids = _PreImages(n_rows, {_ID: ids}, log)

    @property
    def ids(self) -> SnapshotIds:
        """The ids, for the order in which the rows are written."""
        return SnapshotIds(self._ids, self.n_rows)

    @property
    def n_kept(self) -> int:
        """Rows that were copied aside so far."""
        return self._slots.n_kept

    def keep_rows(self, rows: Int64s) -> None:
        """Copy aside the slots of ``rows``, all different, which are about to change."""
        self._slots.keep(rows)

    def keep_ids(self, rows: Int64s) -> None:
        """Copy aside the ids of ``rows``, all different, which are about to belong to others."""
        self._ids.keep(rows)

    def read(self, rows: npt.NDArray[Any], targets: Sequence[Bytes]) -> None:
        """Copy rows, each of which is read once in the life of a snapshot, into a target each for id and slots."""
        self._ids.read(rows, targets[:1], for_good=False)  # the order may be looked up again
        self._slots.read(rows, targets[1:], for_good=True)

    def close(self) -> None:
        """Let the table go: nothing is copied aside any more, and nothing may be read."""
        self._slots.close()
        self._ids.close()


def new_log(ids: Column, columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return empty columns to copy values aside to, on the CPU."""
    cpu = torch.device("cpu")
    return {_ID: Column(ids.spec, cpu), **{name: Column(column.spec, cpu) for name, column in columns.items()}}


class SnapshotIds:
    """The ids of a snapshot, read like a column."""

    def __init__(self, images: _PreImages, n_rows: int) -> None:
        self._images, self._n_rows = images, n_rows

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield copies that cover the rows [begin, end)."""
        for first in range(begin, end, _PIECE_ROWS):
            yield self.gather(np.arange(first, min(end, first + _PIECE_ROWS)))

    def gather(self, rows: Int64s) -> Tensor:
        """Return the ids of ``rows``."""
        ids = np.empty(len(rows), np.int64)
        self._images.read(rows, [ids.view(np.uint8)], for_good=False)
        return torch.from_numpy(ids)

    def to_tensor(self, n_rows: int) -> Tensor:
        """Return the ids of the first rows."""
        return self.gather(np.arange(n_rows))


class _PreImages:
    """Columns as they were, put together from the live ones and the values copied aside.

    Training copies aside before it writes; a reader reads the live values, and only then looks what was copied
    aside meanwhile: whatever it may have read of a row that was changing is laid over.
    """

    def __init__(self, n_rows: int, columns: Mapping[str, Column], log: Mapping[str, Column]) -> None:
        self._columns = [column.frozen() for column in columns.values()]
        self._log = [log[name] for name in columns]
        # 0: as it was; n + 1: copied aside, n-th of the log; -1: read for good. Pages come as they are touched.
        self._state = np.zeros(n_rows, np.int32 if n_rows < 1 << 31 else np.int64)
        self.n_kept = 0
        self._closed = False
        self._lock = threading.Lock()

    def keep(self, rows: Int64s) -> None:
        with self._lock:
            if self._closed:
                return
            rows = first_changes(rows, self._state)
            for column, log in zip(self._columns, self._log, strict=True):
                log.reserve(self.n_kept + len(rows))
                column.copy_rows(rows, log, self.n_kept)
            self._state[rows] = np.arange(self.n_kept + 1, self.n_kept + len(rows) + 1)
            self.n_kept += len(rows)

    def read(self, rows: npt.NDArray[Any], targets: Sequence[Bytes], *, for_good: bool) -> None:
        for column, target in zip(self._columns, targets, strict=True):
            column.gather_into(rows, target)
        at, kept = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        with self._lock:  # what is not copied aside yet has not been written either, up to here
            n_kept = pick_kept(rows, self._state, for_good, at, kept)
            for log, target in zip(self._log, targets, strict=True):
                log.lay_over(kept[:n_kept], at[:n_kept], target)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._columns, self._log = [], []
