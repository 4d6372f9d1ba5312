"""The tables that a load fills: ours, in place or aside until all rows are there, and others, batch by batch."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import N_BUCKETS, Slice
from recckpt.format.manifest import Manifest
from recckpt.format.tables import ClockDates
from recckpt.sparse.files.ages import Ages, ages_of
from recckpt.sparse.files.owners import OwnedIds
from recckpt.sparse.files.rows_aside import RowsAside, Values, chosen, fitted_to
from recckpt.sparse.table.first_values import first_embeddings
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.table import HashTable
from recckpt.types import EMBEDDING, SavableTable

Int64s = npt.NDArray[np.int64]


class LoadTarget:
    """One table during a load, from :meth:`begin` on; several threads may put rows into it.

    This one is for tables that are not a recckpt HashTable: they take whole rows by ``insert``, batch by batch.

    Attributes:
        table: the table.
        slice: the buckets of the ids that it owns, by which files are opened; None for all.
        was_empty: whether it had no rows when the load began.
        aside: where rows are gathered that the table gets when the load is over; None where it gets them at once.
        takes_slots: whether it takes single slots, and converts what it takes.
        lock: for what threads share.
    """

    aside: RowsAside | None = None
    takes_slots = False

    def __init__(self, table: SavableTable) -> None:
        self.table, self.lock, self.was_empty = table, threading.RLock(), len(table) == 0
        self.slice: Slice | None = getattr(table, "slice", None)

    def begin(self) -> None:
        """Note what the table has before the load."""
        self.was_empty = len(self.table) == 0

    def __len__(self) -> int:
        return len(self.table)

    @property
    def owned_ids(self) -> OwnedIds:
        """The ids that it owns."""
        return self.slice or Slice(0, N_BUCKETS)

    @property
    def finishes_last(self) -> bool:
        """Whether it takes what other tables leave."""
        return False

    @property
    def has_limited_room(self) -> bool:
        """Whether it may not have room for all ids that it owns, which are known once all rows are there."""
        return False

    @property
    def owns_all(self) -> bool:
        """Whether it owns every id."""
        return self.owned_ids.is_everything

    def ages(self, manifest: Manifest, taken_step: int | None, clock: ClockDates | None) -> Ages:
        """Return what becomes of the dates of rows of a checkpoint; arguments as of :func:`ages_of`."""
        return Ages()

    def owned(self, ids: Int64s) -> Int64s | None:
        """Return at which places there are ids that the table owns; None for all."""
        return None if self.owns_all else np.flatnonzero(self.owned_ids.owns(ids))

    def placed(self, ids: Int64s) -> Int64s | None:
        """Return at which places there are ids that the table can have a row of; None for all."""
        return None

    def check_ids(self, least: int, greatest: int) -> None:
        """Refuse a checkpoint with ids in this range if the table cannot have a row of the first or the last."""

    def clear(self) -> None:
        """Drop all rows."""
        if len(self.table):
            self.table.clear()

    def begin_anew(self, slots: Collection[str]) -> None:
        """Give slots their first values in all rows, which a table without rows gives them anyway."""

    def start(self, initial: Mapping[str, float], n_rows: int | None) -> Mapping[str, float]:
        """Prepare for rows, of which new ones start slots at ``initial`` values; return the values before.

        ``n_rows`` is how many there may be in all; None where that is not known.
        """
        return {}

    def end(self, initial: Mapping[str, float]) -> None:
        """Let new rows start slots at these values from now on."""

    def merge(self, ids: Int64s, values: Values, dtypes: Mapping[str, str]) -> int:
        """Set rows, adding those that are new, and return how many.

        ``dtypes`` are those of slots that the checkpoint has narrowed, as the table had them.
        """
        slots = {name: _own_copy(tensor, dtypes.get(name)) for name, tensor in values.items()}
        embeddings = slots.pop(EMBEDDING)
        with self.lock:
            self.table.insert(torch.from_numpy(ids.copy()), embeddings, slots)
        return len(ids)

    def write_present(self, ids: Int64s, values: Values) -> int:
        """Set slots of the ids that have rows, and return how many have."""
        raise TypeError(f"table {self.table.name!r} is not a recckpt HashTable: its slots load with its rows only")

    def erase(self, ids: Int64s) -> None:
        """Drop the rows of ids."""
        raise TypeError(f"table {self.table.name!r} is not a recckpt HashTable: it is loaded as a whole")

    def check_room(self, *, drops: bool) -> None:
        """Refuse what was gathered aside if the table has no room for it, and none of it is to be dropped."""

    def finish(self, *, drops: bool = False) -> int:
        """Give the table what was gathered aside; return how many rows had no place in it, which ``drops`` allows."""
        return 0

    def take_eviction(self, evicted_to: int | None) -> None:
        """Let the table evict what that of the checkpoint would have evicted next."""

    def take_clock(self, clock: ClockDates | None) -> None:
        """Let the table know which dates of its rows are those of a clock."""

    def forget_admitted(self, sources: Mapping[str, set[int]], whole: set[int]) -> None:
        """Drop the counts of ids that have rows now, unless rows and counts are those of one checkpoint.

        Args:
            sources: name of a table -> numbers of the checkpoints that its rows come from.
            whole: those of which all rows were taken.
        """

    def undo(self, *, is_cleared: bool) -> None:
        """Empty a table that was empty before, or that was to be emptied anyway; others keep what they have taken."""
        if len(self.table) and (self.was_empty or is_cleared):
            self.table.clear()


class OwnTarget(LoadTarget):
    """A table of ours. One that is empty, or to be emptied, gets all its rows at once when the load is over."""

    takes_slots = True

    def __init__(self, table: HashTable) -> None:
        super().__init__(table)
        self._table = table

    def begin(self) -> None:
        """Gather rows aside where the table has none."""
        super().begin()
        self._table.store.wait()  # a load writes in streams of its own threads
        self.aside = RowsAside(self._table) if self.was_empty else None

    def __len__(self) -> int:
        return len(self._store)

    @property
    def _store(self) -> RowStore:
        return self._table.store if self.aside is None else self.aside.store

    def ages(self, manifest: Manifest, taken_step: int | None, clock: ClockDates | None) -> Ages:
        """Return what becomes of the dates of rows of a checkpoint."""
        return ages_of(self._table, manifest, taken_step, clock)

    def clear(self) -> None:
        """Drop all rows; those of a table that has some at once, since there is never memory for both."""
        super().clear()
        self.aside = RowsAside(self._table)

    def start(self, initial: Mapping[str, float], n_rows: int | None) -> Mapping[str, float]:
        """Set what new rows start with, and make room: nothing moves while threads write."""
        before = {slot: self._store.initial(slot) for slot in initial}
        for slot, value in initial.items():
            self._store.set_initial(slot, value)
        if n_rows is not None:
            self._store.reserve(n_rows)
        return before

    def end(self, initial: Mapping[str, float]) -> None:
        """Let new rows start slots at these values from now on."""
        for slot, value in initial.items():
            self._table.store.set_initial(slot, value)

    def merge(self, ids: Int64s, values: Values, dtypes: Mapping[str, str]) -> int:
        """Set rows of a table that others may use meanwhile."""
        store = self._store
        with store.lock:
            rows = store.add(ids, partial(first_embeddings, self._table))
            store.write(rows, fitted_to(store.columns, rows, values))
        return len(rows)

    def write_present(self, ids: Int64s, values: Values) -> int:
        """Set slots of the ids that have rows, and return how many have."""
        store = self._store
        with store.lock:
            rows = store.find(ids)
            present = np.flatnonzero(rows >= 0)
            store.write(rows[present], fitted_to(store.columns, rows[present], chosen(values, present, len(ids))))
        return len(present)

    def erase(self, ids: Int64s) -> None:
        """Drop the rows of ids."""
        self._store.erase(ids)

    def finish(self, *, drops: bool = False) -> int:
        """Give the table what was gathered aside."""
        self._table.store.wait()
        if self.aside is not None:
            self._table.store.adopt(self.aside.store)
            self.aside = None
        return 0

    def take_eviction(self, evicted_to: int | None) -> None:
        """Let the table evict what that of the checkpoint would have evicted next."""
        self._table.eviction.set_evicted_to(self._table.store, evicted_to)

    def take_clock(self, clock: ClockDates | None) -> None:
        """Let the table know which dates of its rows are those of a clock."""
        self._table.tracking.note_clock(self._table.store, clock)

    def forget_admitted(self, sources: Mapping[str, set[int]], whole: set[int]) -> None:
        """Drop the counts of ids that have rows now, unless rows and counts are those of one checkpoint."""
        admission = self._table.admission
        if admission is not None and self._table.candidates is not None:
            rows, counts = (sources.get(name, set()) for name in (self._table.name, self._table.candidates.name))
            if rows != counts or not rows <= whole:
                admission.forget_present(self._table.store)


def target_of(table: SavableTable) -> LoadTarget:
    """Return what a load fills a table by."""
    return OwnTarget(table) if isinstance(table, HashTable) else LoadTarget(table)


def _own_copy(values: Tensor, dtype: str | None) -> Tensor:
    """Return values that do not lie in a file, in another dtype if one is given."""
    return values.clone() if dtype is None else values.to(getattr(torch, dtype))
