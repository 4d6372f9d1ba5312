"""Which rows have changed since the checkpoint from which a saver counts: its base.

A saver that wants to write deltas keeps one ``Tracker``, and on each rank, at each save::

    frozen = [tracker.freeze(table) for table in tables]     # the moment of the save; training may go on
    replaced = [some.is_replaced(base) for some in frozen]   # then all ranks agree: replaced on one is on all;
                                                             # some.n_changed is for the choice of a delta
    sources = [some.snapshot or some.delta(base) ...]        # all rows, or what has changed; to be closed as ever
    frozen[i].committed(save_id)                             # the checkpoint is the base now; or, however else it ends,
    frozen[i].failed()                                       # also with an ephemeral commit: the base stays

After a whole restore ``tracker.begin(table, save_id)``. Nothing is ever forgotten: a save that never ends has failed,
and whatever the base of a table is not known to be, the table is replaced. A table without a tracker marks nothing.
Thread-safe; but not to be called in the middle of a change by the same thread, as a signal handler might.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.audited_marks import AuditedMarks
from recckpt.sparse.table.exported_marks import ExportedMarks
from recckpt.sparse.table.exported_rows import ExportedStore
from recckpt.sparse.table.marks import FrozenRows, Marks, SaverMarks
from recckpt.sparse.table.placed_marks import PlacedMarks
from recckpt.sparse.table.placed_rows import PlacedStore
from recckpt.sparse.table.print_marks import PrintMarks
from recckpt.sparse.table.store import Store, StoredTable

Int64s = npt.NDArray[np.int64]


class Freezing(Protocol):
    """What staging takes tables from."""

    def freeze(self, table: StoredTable, slots: Collection[str] | None = None) -> FrozenRows:
        """Return the rows as they are now, and which of them have changed; of some slots, or of all."""


class Tracker:
    """The marks of the tables of one saver; those of two savers know nothing of each other."""

    def __init__(self) -> None:
        self._marks: dict[str, SaverMarks] = {}

    def begin(self, table: StoredTable, base: str) -> None:
        """Count from now on what changes: the rows are exactly those of the checkpoint with this save id."""
        self._of(table).begin(base)

    def freeze(self, table: StoredTable, slots: Collection[str] | None = None) -> FrozenRows:
        """Return the rows as they are now, and which of them have changed; of some slots, or of all."""
        return self._of(table).freeze(table.store, table.name, slots)

    def peek(self, table: StoredTable, slots: Collection[str] | None = None) -> FrozenRows:
        """Return the same as :meth:`freeze`, of marks that stay as they are, however the save ends."""
        return self._of(table).peek(table.store, table.name, slots)

    @property
    def peeking(self) -> Peeking:
        """The same marks for near saves, which read them."""
        return Peeking(self)

    def resume(self, table: StoredTable, base: str, changed: Int64s, deleted: Int64s) -> None:
        """Count from the checkpoint with this save id, of which the rows of some ids are others by now.

        Args:
            table: all other rows are exactly those of the checkpoint.
            base: its save id.
            changed: ids whose rows are others, or new.
            deleted: ids of the checkpoint that are gone.
        """
        if not self._of(table).resume(base, changed, deleted):
            self.forget(table)

    def forget(self, table: StoredTable) -> None:
        """Count from nothing: the next save holds all rows of the table."""
        self._marks.pop(table.name, None)

    def is_unchanged(self, table: StoredTable, base: str) -> bool:
        """Say whether the rows are still those of the checkpoint with this save id; never wrongly so."""
        return self._of(table).is_unchanged(base)

    def _of(self, table: StoredTable) -> SaverMarks:
        marks = self._marks.get(table.name)
        if marks is None or marks.store() is not table.store:  # copied, moved to a device, or another table
            marks = self._marks[table.name] = _marks_of(table.store)
        return marks


class Peeking:
    """The marks of a tracker, to read."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def freeze(self, table: StoredTable, slots: Collection[str] | None = None) -> FrozenRows:
        """Return the rows as they are now, and which of them have changed; committing them changes nothing."""
        return self._tracker.peek(table, slots)


def _marks_of(store: Store) -> SaverMarks:
    if isinstance(store, ExportedStore):
        return ExportedMarks(store)
    if isinstance(store, PlacedStore):
        return PlacedMarks(store, _marks_of(store.memory))
    if not store.says_what_changes:
        return PrintMarks(store)
    return AuditedMarks(store, store.audit) if store.audit else Marks(store)
