"""What savers take of a table whose rows change through one door: snapshots, and marks of what has changed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.mark_set import HasMarkSets
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.types import EMBEDDING, SlotSpec


class Ids(Protocol):
    """Ids in row order, on the CPU."""

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the ids of the rows [begin, end), piece by piece."""

    def gather(self, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the ids of ``rows``."""

    def to_tensor(self, n_rows: int) -> Tensor:
        """Return the ids of the first rows."""


class StoredIds(Ids, Protocol):
    """The ids of the rows of a store."""

    def gather_into(self, rows: npt.NDArray[Any], target: npt.NDArray[np.uint8]) -> None:
        """Copy the bytes of the ids of ``rows`` into ``target``."""


class Store(ABC):
    """Rows that change through one door, where snapshots copy and marks mark them before they do.

    Attributes:
        lock: is taken by whoever changes rows, and by whoever takes a snapshot.
        says_what_changes: whether marks get to know which rows change; otherwise fingerprints find them.
        audit: at every how manyth save marks are compared with fingerprints; 0 for never.
    """

    lock: threading.RLock
    says_what_changes = True
    audit = 0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    @abstractmethod
    def ids(self) -> StoredIds:
        """The ids in row order, on the CPU."""

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, Column]:
        """The slots by name."""

    @property
    @abstractmethod
    def saved_columns(self) -> Mapping[str, Column]:
        """The columns that a checkpoint has of these rows, by the names of slots."""

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots of :attr:`saved_columns`, in the order of a file: ``embedding`` first, the others by name."""
        return in_order(column.spec for column in self.saved_columns.values())

    def find(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row of each id, -1 where it is absent."""
        here = self.ids.to_tensor(len(self)).numpy()
        order = np.argsort(here)
        at = np.searchsorted(here, ids, sorter=order).clip(max=max(0, len(here) - 1))
        rows = order[at] if len(here) else np.full(len(ids), -1)
        return np.where(here[rows] == ids, rows, -1) if len(here) else rows

    def mark_noted(self) -> None:
        """Mark the rows that were said to change and are not marked yet: called before marks are read or dropped."""
        return

    @abstractmethod
    def snapshot(self, name: str, slots: Collection[str] | None = None) -> Snapshot:
        """Return the rows of the table ``name`` as they are now, which stay so, with all slots or some of them."""

    @abstractmethod
    def track(self, marks: HasMarkSets) -> None:
        """Note in these marks, for as long as they are held, all that changes."""


def in_order(slots: Iterable[SlotSpec]) -> tuple[SlotSpec, ...]:
    """Return slots in the order of a file."""
    return tuple(sorted(slots, key=lambda slot: (slot.name != EMBEDDING, slot.name)))


class StoredTable(Protocol):
    """A table whose rows are in a :class:`Store`."""

    name: str

    @property
    def store(self) -> Store:
        """The rows."""


def is_stored(table: object) -> TypeGuard[StoredTable]:
    """Say whether the rows of a table are in a :class:`Store`: of our own tables, and of live ones."""
    return isinstance(getattr(table, "store", None), Store)
