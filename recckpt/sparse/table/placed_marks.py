"""What has changed in rows whose ids come and go: rows that were written, ids that have other places, and ids gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.marks import DeltaSource, Frozen, FrozenRows, SaverMarks
from recckpt.sparse.table.placed_rows import Bits, IdPlaces, PlacedRows, PlacedStore
from recckpt.sparse.table.store import Store

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


class _MapBase(NamedTuple):
    """A checkpoint, and which ids it has where: 16 bytes an id, and 8 for each value of its meta."""

    save_id: str
    placed: IdPlaces


class PlacedMarks(SaverMarks):
    """The marks of the places of one store for one saver, and the map of its base, with which that of now is compared.

    Args:
        store: the rows by id.
        marks: of its memory.
    """

    def __init__(self, store: PlacedStore, marks: SaverMarks) -> None:
        self.store, self._store, self._marks = weakref.ref(store), weakref.ref(store), marks
        self._base: _MapBase | None = None

    def begin(self, base: str) -> None:
        """Count from now on."""
        store = self._store()
        if store is not None:
            self._marks.begin(base)
            self._base = _MapBase(base, store.placed())

    def is_unchanged(self, base: str) -> bool:
        """Say whether neither rows nor ids have changed since this base."""
        store, then = self._store(), self._base
        if store is None or then is None or then.save_id != base:
            return False
        return self._marks.is_unchanged(base) and store.placed().is_same(then.placed)

    def freeze(self, store: Store, name: str, slots: Collection[str] | None) -> FrozenRows:
        """Return the rows and the ids as they are now, and what has changed until now."""
        assert isinstance(store, PlacedStore)
        with store.lock:
            placed, frozen = store.placed(), self._marks.freeze(store.memory, name, slots)
        return PlacedFrozen(frozen, placed, self._base, slots, self._committed)

    def peek(self, store: Store, name: str, slots: Collection[str] | None) -> FrozenRows:
        """Return the same, which keeps the map of the base."""
        assert isinstance(store, PlacedStore)
        with store.lock:
            placed, frozen = store.placed(), self._marks.peek(store.memory, name, slots)
        return PlacedFrozen(frozen, placed, self._base, slots, lambda base: None)

    def _committed(self, base: _MapBase) -> None:
        self._base = base


class PlacedFrozen(FrozenRows):
    """Rows by id at the moment of a save, and the map that it is compared with."""

    def __init__(
        self,
        frozen: FrozenRows,
        placed: IdPlaces,
        base: _MapBase | None,
        slots: Collection[str] | None,
        committed: Callable[[_MapBase], None],
    ) -> None:
        self._frozen, self._placed, self._base, self._committed = frozen, placed, base, committed
        read = tuple(slot for slot in placed.slots if slots is None or slot.name in slots)
        self.snapshot: PlacedRows = PlacedRows(frozen.snapshot, placed, read)
        if isinstance(frozen, Frozen):  # others look at all places before any is released
            self.snapshot.keep_places(placed.places)

    def is_replaced(self, base: str) -> bool:
        """Say whether a delta on this checkpoint has to hold all rows."""
        return self._base is None or self._base.save_id != base or self._frozen.is_replaced(base)

    @property
    def n_changed(self) -> int:
        """About how many rows and deleted ids a delta would hold: what was written has mostly moved, too."""
        if self._base is None:
            return self.snapshot.n_rows
        return min(max(self._frozen.n_changed, int(self._moved.sum())), self.snapshot.n_rows) + len(self._gone)

    def delta(self, base: str) -> DeltaSource:
        """Return what has changed since this base; the other rows are released once it is known which those are."""
        return self._source(base, is_narrowed=True)

    def changes(self, base: str) -> DeltaSource:
        """Return the same, of a snapshot whose other rows can be read until :meth:`DeltaSource.narrow` is called."""
        return self._source(base, is_narrowed=False)

    def changed_since(self, base: str) -> Bytes:
        """Return a bit an id, 1 for those whose row was written, or that have another place or other meta."""
        self._check_base(base)
        bits = self._frozen.changed_since(base)
        is_written = np.unpackbits(bits, count=self._frozen.snapshot.n_rows, bitorder="little").astype(np.bool_)
        packed = np.packbits(self._moved | is_written[self._placed.places], bitorder="little")
        return np.concatenate([packed, np.zeros(-len(packed) % 8, np.uint8)])

    def committed(self, save_id: str) -> None:
        """Make this checkpoint the base."""
        self._frozen.committed(save_id)
        self._committed(_MapBase(save_id, self._placed))

    def failed(self) -> None:
        """Keep the base, and all that has changed since."""
        self._frozen.failed()

    @cached_property
    def _moved(self) -> Bits:
        assert self._base is not None
        return self._placed.moved(self._base.placed)

    @cached_property
    def _gone(self) -> Int64s:
        assert self._base is not None
        return self._placed.gone(self._base.placed)

    def _check_base(self, base: str) -> None:
        if self.is_replaced(base):
            raise RuntimeError(f"table {self.snapshot.name!r}: no marks since {base!r}")

    def _source(self, base: str, *, is_narrowed: bool) -> DeltaSource:
        self._check_base(base)

        def bits() -> Bytes:
            words = self.changed_since(base)
            if is_narrowed:
                self.snapshot.narrow(words)
            return words

        return DeltaSource(self.snapshot, bits, (self._gone,))
