"""The rows of a live table by the ids that they belong to at the moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.live.keyed_types import KeyedLiveTable
from recckpt.live.store import LiveStore
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.mark_set import HasMarkSets
from recckpt.sparse.table.placed_rows import IdPlaces, PlacedRows, PlacedStore
from recckpt.sparse.table.store import in_order
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
_ID = SlotSpec("id", "int64", ())


class KeyedStore(PlacedStore):
    """What is saved of a keyed live table: the rows of its ids, and what else is known of these.

    Args:
        live: the table.
        rows: its rows by their numbers.
    """

    def __init__(self, live: KeyedLiveTable, rows: LiveStore) -> None:
        self._live, self._rows = live, rows
        self.lock, self.says_what_changes, self.audit = rows.lock, rows.says_what_changes, rows.audit

    @property
    def memory(self) -> LiveStore:
        """The rows by their numbers."""
        return self._rows

    def placed(self) -> IdPlaces:
        """Return which id has which row now.

        Raises:
            LiveTableError: the map is not one, or has rows that are not on this rank.
        """
        id_map = self._live.id_map()
        ids, rows = (tensor.cpu().numpy() for tensor in (id_map.ids, id_map.rows))
        is_map = len(ids) == len(rows) and bool((ids[1:] > ids[:-1]).all())
        if not is_map or not _are_distinct(rows, self._n):
            raise LiveTableError(
                f"table {self._live.name!r}: its ids or their rows are not all different and among {self._n} rows, as "
                "once something else has written its map: load a checkpoint, which writes it anew"
            )
        return IdPlaces(ids, rows, {name: values.cpu().numpy() for name, values in id_map.meta.items()})

    def __len__(self) -> int:
        return len(self._live.id_map().ids)

    @property
    def ids(self) -> Column:
        """The ids, in ascending order."""
        return Column.over(_ID, torch.from_numpy(self.placed().ids))

    @property
    def columns(self) -> Mapping[str, Column]:
        """A copy of the rows of the ids, in their order."""
        return {slot.name: Column.over(slot, values) for slot, values in zip(self.slots, self._values(), strict=True)}

    @property
    def saved_columns(self) -> Mapping[str, Column]:
        """The same: all of it is saved."""
        return self.columns

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots, in the order of a file."""
        specs = (column.spec for column in self._rows.saved_columns.values())
        return in_order((*specs, *(SlotSpec(name, "int64", ()) for name in self._live.id_map().meta)))

    def snapshot(self, name: str, slots: Collection[str] | None = None) -> PlacedRows:
        """Return the rows and ids as they are now, which stay so."""
        with self.lock:
            placed = self.placed()
            of_ids = tuple(slot for slot in placed.slots if slots is None or slot.name in slots)
            snapshot = PlacedRows(self._rows.snapshot(name, slots), placed, of_ids)
            snapshot.keep_places(placed.places)
            return snapshot

    def track(self, marks: HasMarkSets) -> None:
        """Note in these marks which rows change, by their numbers."""
        self._rows.track(marks)

    @property
    def _n(self) -> int:
        return len(self._rows)

    def _values(self) -> list[Tensor]:
        placed = self.placed()
        memory = {name: column.gather(placed.places) for name, column in self._rows.saved_columns.items()}
        memory |= {name: torch.from_numpy(values) for name, values in placed.meta.items()}
        return [memory[slot.name] for slot in self.slots]


def _are_distinct(rows: Int64s, n_rows: int) -> bool:
    """Say whether rows are all different, and among so many: training waits for this, so nothing is sorted."""
    if len(rows) and not 0 <= rows.min() <= rows.max() < n_rows:
        return False
    is_taken = np.zeros(n_rows, np.bool_)
    is_taken[rows] = True
    return int(np.count_nonzero(is_taken)) == len(rows)
