"""Tracks which rows have changed since the base of a saver: the checkpoint that its next delta builds on.

A saver that writes deltas keeps one ``Tracker``. On each rank, at each save::

    frozen = [tracker.freeze(table) for table in tables]     # the rows at this time; training may continue
    replaced = [some.is_replaced(base) for some in frozen]   # the ranks agree: replaced on one is replaced on all;
                                                             # some.n_changed helps to choose delta or full
    sources = [some.snapshot or some.delta(base) ...]        # all rows, or the changed ones; close them as usual
    frozen[i].committed(save_id)                             # the checkpoint becomes the base; or, if the save failed
    frozen[i].failed()                                       # or is ephemeral: the base stays

After a full restore call ``tracker.begin(table, save_id)``. A save that never ends counts as failed; a table without a
known base counts as replaced. A table without a tracker marks nothing. Thread-safe, except for a signal handler
that interrupts a change of a table in its own thread.

If other code writes rows, marks are compared with fingerprints: those of some rows at each save, and of all rows at
intervals. So a write that was not marked is found after a bounded number of saves.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.errors import MissedRowsError
from recckpt.sparse.table.marks import Frozen, FrozenRows, Marks, SaverMarks
from recckpt.sparse.table.placed import PlacedMarks, PlacedStore
from recckpt.sparse.table.prints import PrintedRows, PrintMarks, fingerprints
from recckpt.sparse.table.store import Store, StoredTable
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
log = logging.getLogger("recckpt")
_NAMED = 5  # number of ids that a message lists
_WARNING = (
    "table %r: found %s rows that changed and were not marked, such as %s: code writes these rows where no hook sees "
    "it, such as weight.data[i] = x. Deltas before this save may lack these changes. This save and the next hold all "
    "rows; later saves find changes by fingerprints, and training waits until the rows are copied. Write to the weight "
    "itself, under torch.no_grad(), or give live_tables the optimizer that does, or marks='fingerprints'"
)
# Each save checks this share of a table's rows, but at most this many bytes, plus this many rows for each row that it
# writes: about 3 % of the processor time of a delta.
_PART, _FIRST_BYTES, _ROWS_A_CHANGE = 1 / 64, 1 << 20, 1 / 4
_N_REPLACED = 2  # after this many full saves in a row without marks, nothing is compared until there are marks
Freeze = Callable[[StoredTable, Collection[str] | None], FrozenRows]


class _Then(NamedTuple):
    """The last computed fingerprint of each row, and which rows were marked since.

    Four bytes per fingerprint suffice, because the check need only detect that some rows changed without a mark.
    """

    slots: tuple[SlotSpec, ...]
    prints: npt.NDArray[np.uint32]
    marked: Bytes  # one bit per row, padded to words of 8 bytes
    next_row: int  # the next row to check

    def share(self, n_changed: int) -> tuple[int, int]:
        n_rows, row_bytes = len(self.prints), sum(spec.row_bytes for spec in self.slots)
        n_first = _FIRST_BYTES / max(1, row_bytes)
        n = max(n_first, min(n_rows * _PART, n_first + n_changed * _ROWS_A_CHANGE))
        return self.next_row, min(n_rows, self.next_row + 64 * (1 + int(n) // 64))  # whole words of bits


class AuditedMarks(SaverMarks):
    """Marks of one store for one saver; each save compares some of them with fingerprints.

    If a row changed without a mark, fingerprints replace the marks from then on. The save that finds such a row holds
    all rows. The next save does too, because the unknown writer may have written while the rows were read. If ``every``
    is not 0, the save that finds such a row fails instead, and every ``every``-th save checks all rows.
    """

    def __init__(self, store: Store, every: int) -> None:
        self.store = weakref.ref(store)
        self._marks: SaverMarks = Marks(store)  # replaced by PrintMarks once they have missed a row
        self._every, self._n_saves, self._n_replaced = every, 0, 0
        self._then: _Then | None = None

    def begin(self, base: str) -> None:
        """Start marking: read all rows and compute their fingerprints."""
        self._marks.begin(base)
        store = self.store()
        if store is not None and isinstance(self._marks, Marks):
            with store.lock:
                rows = store.snapshot("")
            self._then = _then(rows.slots, fingerprints(rows))
            rows.close()

    def is_unchanged(self, base: str) -> bool:
        return self._marks.is_unchanged(base)

    def freeze(
        self, store: Store, name: str, slots: Collection[str] | None, *, keeps_marks: bool = False
    ) -> FrozenRows:
        """Return the current rows. A near save (``keeps_marks``) compares no fingerprints and changes no marks."""
        frozen = self._marks.freeze(store, name, slots, keeps_marks=keeps_marks)
        if keeps_marks or not isinstance(frozen, Frozen):
            return frozen
        self._n_saves += 1
        self._n_replaced = self._n_replaced + 1 if frozen.base is None else 0
        is_audit = self._every > 0 and self._n_saves % self._every == 0
        if self._n_replaced > _N_REPLACED and not is_audit:
            self._then = None
            return frozen
        return AuditedFrozen(
            frozen, self._then, self._committed, self._distrust, is_whole=is_audit, is_strict=self._every > 0
        )

    def resume(self, base: str, changed: Int64s, deleted: Int64s) -> bool:
        """Start from a base; the next save checks all rows."""
        self._then = None
        return self._marks.resume(base, changed, deleted)

    def _committed(self, before: _Then | None, then: _Then | None) -> None:
        if self._then is before:  # false if a restore has replaced it meanwhile
            self._then = then

    def _distrust(self) -> None:
        store = self.store()
        if store is not None and isinstance(self._marks, Marks):
            store.distrust()
            self._marks, self._then = PrintMarks(store), None


class AuditedFrozen(FrozenRows):
    """Frozen rows with marks; while the rows are read, some marks are compared with fingerprints.

    ``then`` has the fingerprints of the previous commit, if known. ``committed`` is called with the fingerprints before
    and after this save, ``distrust`` if a row changed without a mark. ``is_whole`` checks all rows; ``is_strict`` makes
    the save fail if a row changed without a mark.
    """

    def __init__(
        self,
        frozen: Frozen,
        then: _Then | None,
        committed: Callable[[_Then | None, _Then | None], None],
        distrust: Callable[[], None],
        *,
        is_whole: bool,
        is_strict: bool,
    ) -> None:
        self.base, self._frozen, self._before = frozen.base, frozen, then
        self._committed, self._distrust = committed, distrust
        self._is_strict, self._has_missed = is_strict, False
        is_comparable = then is not None and then.slots == frozen.snapshot.slots and frozen.base is not None
        self._then = then if is_comparable else None
        known = None if is_whole else self._then
        some = (0, frozen.snapshot.n_rows) if known is None else known.share(frozen.n_changed)
        self._begin, self._end = some
        self.snapshot: PrintedRows = PrintedRows(frozen.snapshot, self._check, some)

    @property
    def n_changed(self) -> int:
        return self._frozen.n_changed

    def changed_since(self, base: str) -> Bytes:
        """Return one bit per row, 1 if the row is marked; all bits are 1 if a row changed without a mark."""
        self.check_base(base)
        _ = self.snapshot.prints  # checks fingerprints before unchanged rows are released
        bits = self._frozen.bits
        return np.full_like(bits, 255) if self._has_missed else bits

    def committed(self, save_id: str) -> None:
        self._frozen.committed(save_id)
        then, prints = self._then, self.snapshot.known_prints
        if then is None:
            now = None if prints is None else _then(self.snapshot.slots, prints)
        else:
            now = then
            np.bitwise_or(then.marked, self._frozen.bits, out=then.marked)
            if prints is not None:
                then.prints[self._begin : self._end] = prints.astype(np.uint32)
                then.marked[self._begin >> 3 : -(-self._end // 8)] = 0
                now = then._replace(next_row=self._end if self._end < len(then.prints) else 0)
        self._committed(self._before, now)

    def failed(self) -> None:
        self._frozen.failed()

    def _check(self, prints: npt.NDArray[np.uint64]) -> None:
        then, begin, end = self._then, self._begin, self._end
        if then is None:
            return
        bits = then.marked[begin >> 3 : -(-end // 8)] | self._frozen.bits[begin >> 3 : -(-end // 8)]
        is_marked = np.unpackbits(bits, count=end - begin, bitorder="little").view(np.bool_)
        missed = begin + np.flatnonzero((prints.astype(np.uint32) != then.prints[begin:end]) & ~is_marked)
        if len(missed) == 0:
            return
        ids = self.snapshot.ids.gather(missed[:_NAMED]).tolist()
        self._distrust()
        if self._is_strict:
            error = MissedRowsError(self.snapshot.name, len(missed), ids)
            log.error("%s", error)
            raise error
        self._has_missed = True
        log.warning(_WARNING, self.snapshot.name, len(missed), ids)


def _then(slots: tuple[SlotSpec, ...], prints: npt.NDArray[np.uint64]) -> _Then:
    return _Then(slots, prints.astype(np.uint32), np.zeros(8 * -(-len(prints) // 64), np.uint8), 0)


class Tracker:
    """Tracks changes of all tables for one saver; trackers of different savers are independent."""

    def __init__(self) -> None:
        self._marks: dict[str, SaverMarks] = {}

    def begin(self, table: StoredTable, base: str) -> None:
        self._of(table).begin(base)

    def freeze(
        self, table: StoredTable, slots: Collection[str] | None = None, *, keeps_marks: bool = False
    ) -> FrozenRows:
        """Return the current rows, with all or some slots, and which of them have changed since the base.

        With ``keeps_marks``, for near saves, neither base nor marks change, whether the save commits or fails.
        """
        return self._of(table).freeze(table.store, table.name, slots, keeps_marks=keeps_marks)

    def resume(self, table: StoredTable, base: str, changed: Int64s, deleted: Int64s) -> None:
        """Start marking from a checkpoint that equals the table except for these changed, new and deleted ids."""
        if not self._of(table).resume(base, changed, deleted):
            self.forget(table)

    def forget(self, table: StoredTable) -> None:
        """Drop the base, so that the next save holds all rows of the table."""
        self._marks.pop(table.name, None)

    def is_unchanged(self, table: StoredTable, base: str) -> bool:
        return self._of(table).is_unchanged(base)

    def _of(self, table: StoredTable) -> SaverMarks:
        marks = self._marks.get(table.name)
        if marks is None or marks.store() is not table.store:  # the table was copied, moved or replaced
            marks = self._marks[table.name] = _marks_of(table.store)
        return marks


def _marks_of(store: Store) -> SaverMarks:
    if isinstance(store, PlacedStore):
        return PlacedMarks(store, _marks_of(store.memory))
    if not store.says_what_changes:
        return PrintMarks(store)
    return Marks(store) if store.audit is None else AuditedMarks(store, store.audit)
