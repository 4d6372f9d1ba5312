"""Marks that are compared with fingerprints now and then: a row that changed without a mark fails the save."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.errors import MissedRowsError
from recckpt.sparse.table.fingerprints import Prints, fingerprints
from recckpt.sparse.table.marks import DeltaSource, Frozen, FrozenRows, Marks, SaverMarks
from recckpt.sparse.table.print_marks import PrintedRows, PrintMarks
from recckpt.sparse.table.store import Store
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]  # a value a row
log = logging.getLogger("recckpt")
_NAMED = 5  # ids in a message


class _Then(NamedTuple):
    """The prints of the rows at a commit, and which rows were marked in the commits since."""

    slots: tuple[SlotSpec, ...]
    prints: Prints
    marked: Bits


class AuditedMarks(SaverMarks):
    """Marks of one store for one saver, of which every ``every``-th save looks at all rows.

    Once they have missed a row they are trusted no more: that save fails, and fingerprints find what changes from then
    on. The save after it holds all rows.
    """

    def __init__(self, store: Store, every: int) -> None:
        self.store = weakref.ref(store)
        self._marks: SaverMarks = Marks(store)
        self._every, self._n_saves = every, 0
        self._then: _Then | None = None

    def begin(self, base: str) -> None:
        """Count from now on: looks at all rows."""
        self._marks.begin(base)
        store = self.store()
        if store is not None and self.is_trusted:
            with store.lock:
                rows = store.snapshot("")
            self._then = _Then(rows.slots, fingerprints(rows), np.zeros(rows.n_rows, np.bool_))
            rows.close()

    @property
    def is_trusted(self) -> bool:
        """Whether the marks have missed no row yet."""
        return isinstance(self._marks, Marks)

    def is_unchanged(self, base: str) -> bool:
        """Say whether nothing has changed since this base."""
        return self._marks.is_unchanged(base)

    def freeze(self, store: Store, name: str, slots: Collection[str] | None) -> FrozenRows:
        """Return the rows as they are now, and what has changed until now."""
        frozen = self._marks.freeze(store, name, slots)
        if not isinstance(frozen, Frozen):
            return frozen
        self._n_saves += 1
        is_due = self._then is None or self._n_saves % self._every == 0
        return AuditedFrozen(frozen, self._then, self._committed, self._distrust, is_due=is_due)

    def peek(self, store: Store, name: str, slots: Collection[str] | None) -> FrozenRows:
        """Return the same, without a comparison: the marks are those that the next save compares."""
        return self._marks.peek(store, name, slots)

    def resume(self, base: str, changed: Int64s, deleted: Int64s) -> bool:
        """Count from a base: the next save looks at all rows."""
        self._then = None
        return self._marks.resume(base, changed, deleted)

    def _committed(self, then: _Then | None) -> None:
        self._then = then

    def _distrust(self, error: MissedRowsError) -> None:
        store = self.store()
        if store is not None and self.is_trusted:
            log.error("%s", error)
            self._marks, self._then = PrintMarks(store), None


class AuditedFrozen(FrozenRows):
    """Rows at the moment of a save, whose marks are compared with their prints where ``is_due``, as they are read."""

    def __init__(
        self,
        frozen: Frozen,
        then: _Then | None,
        committed: Callable[[_Then | None], None],
        distrust: Callable[[MissedRowsError], None],
        *,
        is_due: bool,
    ) -> None:
        self._frozen, self._committed, self._distrust = frozen, committed, distrust
        self._then = then if then is not None and then.slots == frozen.snapshot.slots else None
        self._rows = PrintedRows(frozen.snapshot, self._check) if is_due else None
        self.snapshot = frozen.snapshot if self._rows is None else self._rows

    def is_replaced(self, base: str) -> bool:
        """Say whether there are no marks since this base."""
        return self._frozen.is_replaced(base)

    @property
    def n_changed(self) -> int:
        """Rows that a delta would hold."""
        return self._frozen.n_changed

    def delta(self, base: str) -> DeltaSource:
        """Return what has changed since this base."""
        return self._frozen.delta(base) if self._rows is None else self._looked_at(base, self._rows, is_narrowed=True)

    def changes(self, base: str) -> DeltaSource:
        """Return the same, of a snapshot whose other rows can be read until :meth:`DeltaSource.narrow` is called."""
        return self._frozen.changes(base) if self._rows is None else self._looked_at(base, self._rows)

    def _looked_at(self, base: str, rows: PrintedRows, *, is_narrowed: bool = False) -> DeltaSource:
        self._frozen.changes(base)  # which refuses another base

        def bits() -> npt.NDArray[np.uint8]:
            bits = self.changed_since(base)  # which looks at all rows before others are released
            if is_narrowed:
                rows.narrow(bits)
            return bits

        return DeltaSource(rows, bits, ())

    def changed_since(self, base: str) -> npt.NDArray[np.uint8]:
        """Return a bit a row, 1 for those that are marked; compares them where that is due."""
        if self._rows is not None:
            _ = self._rows.prints  # of all rows, before others than those that changed are released
        return self._frozen.changed_since(base)

    def committed(self, save_id: str) -> None:
        """Make this checkpoint the base."""
        self._frozen.committed(save_id)
        prints = None if self._rows is None else self._rows.known_prints
        if prints is not None:
            self._committed(_Then(self.snapshot.slots, prints, np.zeros(len(prints), np.bool_)))
        elif self._then is not None and not self._frozen.is_all:
            self._committed(self._then._replace(marked=self._then.marked | self._marked()))
        else:
            self._committed(None)

    def failed(self) -> None:
        """Keep the base, and all that has changed since."""
        self._frozen.failed()

    def _marked(self) -> Bits:
        """Return which rows are marked since the base."""
        n_rows = self.snapshot.n_rows
        return np.unpackbits(self._frozen.bits, count=n_rows, bitorder="little").view(np.bool_)

    def _check(self, prints: Prints) -> None:
        """Refuse prints of rows that have changed since ``then`` and were marked neither then nor now."""
        then = self._then
        if then is None or self._frozen.is_all:
            return
        missed = np.flatnonzero((prints != then.prints) & ~then.marked & ~self._marked())
        if len(missed):
            ids = self.snapshot.ids.gather(missed[:_NAMED]).tolist()
            error = MissedRowsError(self.snapshot.name, len(missed), ids)
            self._distrust(error)
            raise error
