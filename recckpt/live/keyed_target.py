"""A keyed live table during a load: rows are gathered by id, and find their places once all are there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.live.attached import AttachedTable
from recckpt.live.keyed_table import AttachedKeyedTable
from recckpt.live.target import LiveTarget
from recckpt.sparse.files.owners import OwnedIds
from recckpt.sparse.files.rows_aside import Values
from recckpt.sparse.files.table_target import LoadTarget, OwnTarget
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.table import HashTable
from recckpt.types import EMBEDDING

Int64s = npt.NDArray[np.int64]


class KeyedTarget(OwnTarget):
    """A table of ours with the rows of a keyed live one, which takes them over when all are there.

    Until then the live table is as it was: what is damaged, or does not fit, has changed nothing of it. The load needs
    memory for the rows of this rank a second time.
    """

    def __init__(self, table: AttachedKeyedTable) -> None:
        slots = {slot.name: slot for slot in table.store.slots}
        embedding = slots.pop(EMBEDDING)
        gathered = HashTable(embedding.shape, name=table.name, dtype=getattr(torch, embedding.dtype))
        for slot in slots.values():
            gathered.store.add_column(slot)
        super().__init__(gathered)
        self.slice, self._gathered, self._attached, self._is_begun = None, gathered, table, False

    def begin(self) -> None:
        """Bring the memory up to date."""
        self._attached.prepare()
        self._attached.rows.wait()
        super().begin()
        self._is_begun = False

    @property
    def finishes_last(self) -> bool:
        """Whether it waits for the tables that have as many ids as they can: it takes what they leave."""
        return self._attached.live.n_ids is None

    @property
    def has_limited_room(self) -> bool:
        """Whether each rank may have too many ids for its rows, whatever all of them have."""
        return self._attached.live.n_ids is not None and not self.owns_all

    @property
    def owned_ids(self) -> OwnedIds:
        """The ids that are looked up on this rank."""
        return self._attached.live.owned_ids

    def clear(self) -> None:
        """Begin with no ids."""
        self._is_begun = True
        super().clear()

    def begin_anew(self, slots: Collection[str]) -> None:
        """Let slots of the optimizer have the values of its first step in the rows that come."""
        first = float(self._attached.live.settings().get("initial_accumulator_value", 0.0))
        for name in sorted((self._attached.rows.columns.keys() & slots) - {EMBEDDING}):
            self._store.set_initial(name, first)

    def start(self, initial: Mapping[str, float], n_rows: int | None) -> Mapping[str, float]:
        """Prepare for rows, which go among those of now, unless these were cleared."""
        self._begin_with_own()
        return super().start(initial, n_rows)

    def write_present(self, ids: Int64s, values: Values) -> int:
        """Set slots of the ids that have rows, and return how many have."""
        with self.lock:
            self._begin_with_own()
        return super().write_present(ids, values)

    def _begin_with_own(self) -> None:
        """Gather the rows of now, unless that is done, or they were cleared."""
        if not self._is_begun:
            store = self._attached.store
            ids = store.placed().ids
            self._gathered.store.insert(ids, {name: column.blocks[0] for name, column in store.columns.items()})
            self._is_begun, self.aside, self.was_empty = True, None, len(ids) == 0

    def check_room(self, *, drops: bool) -> None:
        """Refuse more ids than there are rows on this rank.

        Raises:
            LiveTableError: there are, and it is not asked for that some are dropped.
        """
        if self._is_begun and self.has_limited_room:
            self._attached.place(*_rows_of(self._store), drops=drops)

    def finish(self, *, drops: bool = False) -> int:
        """Give the live table its ids and rows; return how many have no place in it.

        Raises:
            LiveTableError: there are more than it can take, and it is not asked for that some are dropped.
        """
        super().finish()
        if not self._is_begun:
            return 0
        n_dropped = self._attached.replace(*_rows_of(self._gathered.store), drops=drops)
        self._attached.rows.wait()
        self._attached.live.finish({}, {})
        self._attached.look()
        return n_dropped


def live_target(table: AttachedTable) -> LoadTarget:
    """Return what a load fills a live table by."""
    return KeyedTarget(table) if isinstance(table, AttachedKeyedTable) else LiveTarget(table)


def _rows_of(store: RowStore) -> tuple[Int64s, dict[str, Tensor]]:
    """Return all ids of a store, and their slots."""
    values = {name: column.to_tensor(len(store)) for name, column in store.columns.items()}
    return store.ids.to_tensor(len(store)).numpy(), values
