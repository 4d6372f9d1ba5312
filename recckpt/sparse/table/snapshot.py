"""The rows of a table as they were at one moment, while training goes on changing them.

A pre-image log: before a row changes that a writer still needs, its old values are copied aside, once; writers lay
them over what they have read. So a snapshot costs nothing when it is taken, and the rows that are touched meanwhile
while it lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """Where a snapshot copies rows to; ids apart, since they seldom change."""

    ids: Log
    slots: Log


class Snapshot:
    """Rows 0 to ``n_rows - 1`` of a table at the moment this is made.

    Reading is thread-safe, also beside the one thread that changes the table; that one calls :meth:`keep_rows` and
    :meth:`keep_ids` before it writes.

    Args:
        name: the table.
        n_rows: rows of this moment.
        ids: their ids.
        columns: slot name -> column, in the order in which they are read.
        logs: where values are copied to, for the ids and for these columns; empty.
        on_close: called once when the logs serve no longer, maybe from another thread; must not refer to this.
    """

    def __init__(
        self,
        name: str,
        n_rows: int,
        ids: Column,
        columns: Mapping[str, Column],
        *,
        logs: Logs,
        on_close: Callable[[], object],
    ) -> None:
        self.name, self.n_rows = name, n_rows
        self.slots: tuple[SlotSpec, ...] = tuple(column.spec for column in columns.values())
        self._slots = PreImages(n_rows, columns, logs.slots)
        self._ids = PreImages(n_rows, {ids.spec.name: ids}, logs.ids)
        self._on_close = weakref.finalize(self, on_close)
        self._on_close.atexit = False

    @property
    def ids(self) -> SnapshotIds:
        """The ids, for the order in which the rows are written."""
        return SnapshotIds(self)

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
        """Copy rows, each of which is read once in the life of a snapshot, into a target each for id and slots.

        Raises:
            RuntimeError: a row is read for the second time, or the snapshot is closed.
            MemoryError: there was none to copy rows to that changed.
        """
        self.read_ids(rows, targets[0])
        self._slots.read(rows, targets[1:], for_good=True)

    def read_ids(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        """Copy the ids of rows; as often as one likes."""
        self._ids.read(rows, [target], for_good=False)

    def close(self) -> None:
        """Let the table go: nothing is copied aside any more, and nothing may be read."""
        self._slots.close()
        self._ids.close()
        self._on_close()


class SnapshotIds:
    """The ids of a snapshot, read like a column."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield copies that cover the rows [begin, end)."""
        for first in range(begin, end, _PIECE_ROWS):
            yield self.gather(np.arange(first, min(end, first + _PIECE_ROWS)))

    def gather(self, rows: Int64s) -> Tensor:
        """Return the ids of ``rows``."""
        ids = np.empty(len(rows), np.int64)
        self._snapshot.read_ids(rows, ids.view(np.uint8))
        return torch.from_numpy(ids)

    def to_tensor(self, n_rows: int) -> Tensor:
        """Return the ids of the first rows."""
        return self.gather(np.arange(n_rows))
