"""Stores whose ids move between places (row positions) although the rows there are not written."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.marks import Frozen, FrozenRows, SaverMarks
from recckpt.sparse.table.snapshot import Snapshot, SnapshotOver
from recckpt.sparse.table.store import Store, in_order, marked_rows
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class IdPlaces:
    """Maps ids (ascending) to their places at one time, and slot names to meta values. The arrays do not change."""

    ids: Int64s
    places: Int64s
    meta: Mapping[str, Int64s]

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return tuple(SlotSpec(name, "int64", ()) for name in self.meta)

    def moved(self, before: IdPlaces) -> Bits:
        """Return a mask of the ids that are new, or whose place or meta values changed."""
        if np.array_equal(self.ids, before.ids):
            return _differ(self, before, slice(None), slice(None))
        at = np.searchsorted(before.ids, self.ids)
        at[at == len(before.ids)] = 0
        known = np.flatnonzero(before.ids[at] == self.ids) if len(before.ids) else np.empty(0, np.int64)
        is_moved = np.ones(len(self.ids), np.bool_)
        is_moved[known] = _differ(self, before, known, at[known])
        return is_moved

    def gone(self, before: IdPlaces) -> Int64s:
        return before.ids[~np.isin(before.ids, self.ids, assume_unique=True)]

    def is_same(self, other: IdPlaces) -> bool:
        return len(self.ids) == len(other.ids) and not self.moved(other).any()


def _differ(one: IdPlaces, other: IdPlaces, here: Any, there: Any) -> Bits:
    if one.meta.keys() != other.meta.keys():
        return np.ones(len(one.places[here]), np.bool_)
    differ: Bits = one.places[here] != other.places[there]
    for name, values in one.meta.items():
        differ |= values[here] != other.meta[name][there]
    return differ


class PlacedStore(Store):
    """A store whose ids have places in a ``memory`` of rows; snapshots and marks are those of the memory."""

    @property
    @abstractmethod
    def memory(self) -> Store:
        """The rows by place, including rows without an id."""

    @abstractmethod
    def placed(self) -> IdPlaces: ...


class PlacedRows(SnapshotOver):
    """A snapshot of rows by place that is read by id. Thread-safe, like the snapshot it reads."""

    def __init__(self, rows: Snapshot, placed: IdPlaces, slots: tuple[SlotSpec, ...]) -> None:
        super().__init__(rows)
        self.in_place = None
        self.n_rows, self.slots, self._placed = len(placed.ids), in_order((*rows.slots, *slots)), placed

    def read_ids(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        np.take(self._placed.ids, rows, out=target.view(np.int64))

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        meta = self._placed.meta
        for name in targets.keys() & meta.keys():
            np.take(meta[name], rows, out=targets[name].view(np.int64))
        of_places = {name: target for name, target in targets.items() if name not in meta}
        if of_places or is_last:
            self._rows.read_slots(self._placed.places[rows], of_places, is_last=is_last)

    def narrow(self, bits: Bytes) -> None:
        self.keep_places(self._placed.places[marked_rows(bits, self.n_rows)])

    def keep_places(self, places: Int64s) -> None:
        """Release all rows except those at these places: the others are not protected and cannot be read."""
        is_kept = np.zeros(64 * max(1, -(-self._rows.n_rows // 64)), np.bool_)  # padded to whole words
        is_kept[places] = True
        self._rows.narrow(np.packbits(is_kept, bitorder="little"))


_MapBase = tuple[str, IdPlaces]  # a checkpoint and its id map: 16 bytes per id, and 8 for each meta value


class PlacedMarks(SaverMarks):
    """Marks of the places of one store, and the id map at the base, to compare with the current id map."""

    def __init__(self, store: PlacedStore, marks: SaverMarks) -> None:
        self.store, self._store, self._marks = weakref.ref(store), weakref.ref(store), marks
        self._base: _MapBase | None = None

    def begin(self, base: str) -> None:
        store = self._store()
        if store is not None:
            self._marks.begin(base)
            self._base = base, store.placed()

    def is_unchanged(self, base: str) -> bool:
        store, then = self._store(), self._base
        if store is None or then is None or then[0] != base:
            return False
        return self._marks.is_unchanged(base) and store.placed().is_same(then[1])

    def freeze(
        self, store: Store, name: str, slots: Collection[str] | None, *, keeps_marks: bool = False
    ) -> FrozenRows:
        assert isinstance(store, PlacedStore)
        with store.lock:
            placed, frozen = store.placed(), self._marks.freeze(store.memory, name, slots, keeps_marks=keeps_marks)
        committed = (lambda base: None) if keeps_marks else self._committed
        return PlacedFrozen(frozen, placed, self._base, slots, committed)

    def _committed(self, base: _MapBase) -> None:
        self._base = base


class PlacedFrozen(FrozenRows):
    def __init__(
        self,
        frozen: FrozenRows,
        placed: IdPlaces,
        then: _MapBase | None,
        slots: Collection[str] | None,
        committed: Callable[[_MapBase], None],
    ) -> None:
        self._then: IdPlaces | None
        save_id, self._then = then or (None, None)
        self._frozen, self._placed, self._committed = frozen, placed, committed
        self.base = None if save_id is None or frozen.is_replaced(save_id) else save_id
        read = tuple(slot for slot in placed.slots if slots is None or slot.name in slots)
        self.snapshot: PlacedRows = PlacedRows(frozen.snapshot, placed, read)
        if isinstance(frozen, Frozen):  # other kinds read all places before any row is released
            self.snapshot.keep_places(placed.places)

    @property
    def n_changed(self) -> int:
        """About how many rows and deletes a delta would hold, assuming that most ids with a new place were written."""
        if self._then is None:
            return self.snapshot.n_rows
        n_moved = int(self._moved.sum())
        return min(max(self._frozen.n_changed, n_moved), self.snapshot.n_rows) + sum(map(len, self.erased))

    def changed_since(self, base: str) -> Bytes:
        """Return one bit per id, 1 if its row was written or its place or meta values changed."""
        self.check_base(base)
        bits = self._frozen.changed_since(base)
        is_written = np.unpackbits(bits, count=self._frozen.snapshot.n_rows, bitorder="little").astype(np.bool_)
        packed = np.packbits(self._moved | is_written[self._placed.places], bitorder="little")
        return np.concatenate([packed, np.zeros(-len(packed) % 8, np.uint8)])

    def committed(self, save_id: str) -> None:
        self._frozen.committed(save_id)
        self._committed((save_id, self._placed))

    def failed(self) -> None:
        self._frozen.failed()

    @cached_property
    def _moved(self) -> Bits:
        assert self._then is not None
        return self._placed.moved(self._then)

    @cached_property
    def erased(self) -> Sequence[Int64s]:  # type: ignore[override]  # computed at the first access
        assert self._then is not None
        return (self._placed.gone(self._then),)
