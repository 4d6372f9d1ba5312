"""What has changed in a table of another library since the base of a saver, as the library says by epochs.

The library is asked for what was written since the epoch of the base. What it says of ids that went it says once, so
that is kept in marks, as what changes in our own tables: a save that fails loses nothing of it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.format.distinct import is_among
from recckpt.sparse.table.exported_rows import ExportedDelta, ExportedRows, ExportedStore, RowsOfMoment
from recckpt.sparse.table.marks import DeltaSource, Frozen, FrozenRows, Marks, SaverMarks
from recckpt.sparse.table.store import Store

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
log = logging.getLogger("recckpt")


class _EpochBase(NamedTuple):
    """A checkpoint, the epoch that began with it, and its ids in ascending order: 8 bytes each."""

    save_id: str
    epoch: int
    ids: Int64s

    def after(self, changed: Int64s, gone: Int64s) -> Int64s:
        """Return the ids once some have changed or come, and others are gone."""
        left = np.delete(self.ids, np.searchsorted(self.ids, gone[is_among(gone, self.ids)]))
        new = np.sort(changed[~is_among(changed, left)])
        return np.insert(left, np.searchsorted(left, new), new)


class ExportedMarks(SaverMarks):
    """The marks of one table of a library for one saver, and the epoch of its base."""

    def __init__(self, store: ExportedStore) -> None:
        self.store, self._store, self._marks = weakref.ref(store), weakref.ref(store), Marks(store)
        self._base: _EpochBase | None = None

    def begin(self, base: str) -> None:
        """Count from now on: asks for all ids."""
        store = self._store()
        if store is not None:
            with store.lock:
                rows = store.export(None, ())
                self._marks.begin(base)
            self._base = _EpochBase(base, rows.epoch, np.sort(rows.ids))

    def is_unchanged(self, base: str) -> bool:
        """Say that rows may have changed."""
        return False

    def freeze(self, store: Store, name: str, slots: Collection[str] | None) -> FrozenRows:
        """Return what has changed until now, which is exported, and all rows, which can be."""
        return self._frozen(store, name, slots, self._marks.freeze, self._committed)

    def peek(self, store: Store, name: str, slots: Collection[str] | None) -> FrozenRows:
        """Return the same, which keeps the epoch of the base."""
        return self._frozen(store, name, slots, self._marks.peek, lambda base: None)

    def _frozen(
        self,
        store: Store,
        name: str,
        slots: Collection[str] | None,
        freeze: Callable[[Store, str, Collection[str] | None], Frozen],
        committed: Callable[[_EpochBase], None],
    ) -> FrozenRows:
        assert isinstance(store, ExportedStore)
        with store.lock:
            base = None if self._marks.sets[0].is_replaced else self._base
            exported = store.export(None if base is None else base.epoch, slots)
            frozen = freeze(store, name, slots)  # with the ids that this export has named as gone
        return FrozenExport(frozen, base, exported, committed)

    def _committed(self, base: _EpochBase) -> None:
        self._base = base


class FrozenExport(FrozenRows):
    """A table of a library at the moment of a save: what has changed since the base is there, the rest on demand."""

    def __init__(
        self, frozen: Frozen, base: _EpochBase | None, exported: RowsOfMoment, committed: Callable[[_EpochBase], None]
    ) -> None:
        assert isinstance(frozen.snapshot, ExportedRows)
        self.snapshot: ExportedRows = frozen.snapshot
        self._frozen, self._base, self._exported, self._committed = frozen, base, exported, committed
        if base is None:
            self.snapshot.take(exported)

    def is_replaced(self, base: str) -> bool:
        """Say whether a delta on this checkpoint has to hold all rows, as where what the library says is not all."""
        return self._base is None or self._base.save_id != base or self._frozen.is_replaced(base) or not self._adds_up

    @property
    def n_changed(self) -> int:
        """How many rows and ids that went a delta would hold."""
        return self.snapshot.n_rows if self._frozen.is_all else len(self._exported.ids) + len(self._frozen.erased)

    def delta(self, base: str) -> DeltaSource:
        """Return what has changed since this base."""
        self._check_base(base)
        rows = ExportedRows(self.snapshot.name, len(self._exported.ids), self.snapshot.slots, lambda: self._exported)
        rows.export()
        return ExportedDelta(rows, self._frozen.erased, self.snapshot.n_rows)

    def changes(self, base: str) -> DeltaSource:
        """Return the same, of all rows, which are exported for it."""
        bits = self.changed_since(base)
        return DeltaSource(self.snapshot, lambda: bits, (self._frozen.erased,))

    def changed_since(self, base: str) -> Bytes:
        """Return a bit a row, 1 for those that have changed since this base; exports all rows."""
        self._check_base(base)
        self.snapshot.export()
        ids = self.snapshot.exported_ids
        assert ids is not None
        packed = np.packbits(is_among(ids, np.sort(self._exported.ids)), bitorder="little")
        return np.concatenate([packed, np.zeros(-len(packed) % 8, np.uint8)])

    def committed(self, save_id: str) -> None:
        """Make this checkpoint the base; what is written after the first export of this save is in the next."""
        self._frozen.committed(save_id)
        ids = self.snapshot.exported_ids
        if ids is None:
            assert self._base is not None
            ids = self._base.after(self._exported.ids, self._frozen.erased)
        self._committed(_EpochBase(save_id, self._exported.epoch, np.sort(ids)))

    def failed(self) -> None:
        """Keep the base, and all that has changed since."""
        self._frozen.failed()

    @cached_property
    def _adds_up(self) -> bool:
        """Whether the base and what the library says has changed make up as many rows as it has."""
        assert self._base is not None
        before, changed, gone = self._base.ids, np.sort(self._exported.ids), self._frozen.erased
        n_new = int((~is_among(changed, before)).sum())
        n_gone = int((is_among(gone, before) & ~is_among(gone, changed)).sum())
        n_expected = len(before) + n_new - n_gone
        if n_expected == self.snapshot.n_rows:
            return True
        log.warning(
            "table %r: found %d rows, expected %d by what its library says has come and gone, so all are saved: does "
            "export() give each id that was evicted or erased?",
            self.snapshot.name,
            self.snapshot.n_rows,
            n_expected,
        )
        return False

    def _check_base(self, base: str) -> None:
        if self.is_replaced(base):
            raise RuntimeError(f"table {self.snapshot.name!r}: it is not known what has changed since {base!r}")
