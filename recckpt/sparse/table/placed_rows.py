"""Rows whose ids come and go without the rows being written: a store of places, and which id has which of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.mark_set import marked_rows
from recckpt.sparse.table.snapshot import Snapshot, SnapshotOver
from recckpt.sparse.table.store import Store, in_order
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class IdPlaces:
    """Which id has which place, at one moment; these arrays are written no more.

    Attributes:
        ids: all different, in ascending order.
        places: of each id, all different.
        meta: what else is known of each id, by the names of slots.
    """

    ids: Int64s
    places: Int64s
    meta: Mapping[str, Int64s]

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots that are not in the memory of the rows."""
        return tuple(SlotSpec(name, "int64", ()) for name in self.meta)

    def moved(self, before: IdPlaces) -> Bits:
        """Return which ids were not there before, or elsewhere, or with other meta."""
        if np.array_equal(self.ids, before.ids):
            return _differ(self, before, slice(None), slice(None))
        at = np.searchsorted(before.ids, self.ids)
        at[at == len(before.ids)] = 0
        known = np.flatnonzero(before.ids[at] == self.ids) if len(before.ids) else np.empty(0, np.int64)
        is_moved = np.ones(len(self.ids), np.bool_)
        is_moved[known] = _differ(self, before, known, at[known])
        return is_moved

    def gone(self, before: IdPlaces) -> Int64s:
        """Return the ids that were there before and are not now."""
        return before.ids[~np.isin(before.ids, self.ids, assume_unique=True)]

    def is_same(self, other: IdPlaces) -> bool:
        """Say whether nothing is different."""
        return len(self.ids) == len(other.ids) and not self.moved(other).any()


def _differ(one: IdPlaces, other: IdPlaces, here: Any, there: Any) -> Bits:
    """Return where places or meta of some ids differ from those of the same ids in another map."""
    if one.meta.keys() != other.meta.keys():
        return np.ones(len(one.places[here]), np.bool_)
    differ: Bits = one.places[here] != other.places[there]
    for name, values in one.meta.items():
        differ |= values[here] != other.meta[name][there]
    return differ


class PlacedStore(Store):
    """Rows of ids that have places in a memory of rows, of which snapshots and marks are taken."""

    @property
    @abstractmethod
    def memory(self) -> Store:
        """The rows by their places, those without an id included."""

    @abstractmethod
    def placed(self) -> IdPlaces:
        """Return which id has which place now."""


class PlacedRows(SnapshotOver):
    """A snapshot of places as one of the ids that had them. Thread-safe, as that one is."""

    is_in_place = False  # rows do not lie as they are read

    def __init__(self, rows: Snapshot, placed: IdPlaces, slots: tuple[SlotSpec, ...]) -> None:
        super().__init__(rows)
        self.n_rows, self.slots, self._placed = len(placed.ids), in_order((*rows.slots, *slots)), placed

    def read_ids(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        """Copy the ids of rows."""
        np.take(self._placed.ids, rows, out=target.view(np.int64))

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy rows of some slots into a target each; after ``is_last`` they are not read again."""
        meta = self._placed.meta
        for name in targets.keys() & meta.keys():
            np.take(meta[name], rows, out=targets[name].view(np.int64))
        of_places = {name: target for name, target in targets.items() if name not in meta}
        if of_places or is_last:
            super().read_slots(self._placed.places[rows], of_places, is_last=is_last)

    def narrow(self, bits: Bytes) -> None:
        """Protect from now on, and let be read, only rows whose bit is 1."""
        self.keep_places(self._placed.places[marked_rows(bits, self.n_rows)])

    def keep_places(self, places: Int64s) -> None:
        """Protect from now on, and let be read, only what is in these places."""
        is_kept = np.zeros(64 * max(1, -(-self._rows.n_rows // 64)), np.bool_)  # in whole words
        is_kept[places] = True
        super().narrow(np.packbits(is_kept, bitorder="little"))
