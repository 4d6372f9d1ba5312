"""The tables that a load fills: HashTables, in place or in a store aside until complete; others, batch by batch."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import N_BUCKETS, Slice
from recckpt.format.manifest import Manifest
from recckpt.format.tables import ClockDates, TableEntry
from recckpt.policies.evict import COUNT, EVENT_TIME, LAST_STEP, LAST_TIME, least_count
from recckpt.sparse.files.owners import OwnedIds
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.nn_module import first_embeddings
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.table import HashTable
from recckpt.types import EMBEDDING, SavableTable

Int64s = npt.NDArray[np.int64]
Values = Mapping[str, Tensor]  # slot -> its values, one per row


@dataclass(frozen=True)
class Ages:
    """How a load converts dates of rows. Steps of another run keep their distance to that run's last step.

    Attributes:
        added_steps: added to each ``last_step``.
        missing: tracked slot -> value, for slots that the checkpoint lacks: the age of the checkpoint, and the lowest
            count that avoids eviction.
        is_resumed: whether the run continues at the step of the checkpoint.
        clock: when the clock dated rows of the checkpoint.
        event_time: replaces dates that the clock gave; None to keep them.
    """

    added_steps: int = 0
    missing: Mapping[str, float] = field(default_factory=dict)
    is_resumed: bool = False
    clock: ClockDates | None = None
    event_time: float | None = None

    def of_rows(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.added_steps and LAST_STEP in values:
            values = {**values, LAST_STEP: values[LAST_STEP].to(torch.int64) + self.added_steps}
        if self.clock is not None and self.event_time is not None and LAST_TIME in values:
            times = values[LAST_TIME]
            is_of_clock = (times >= self.clock.first) & (times <= self.clock.last)
            values = {**values, LAST_TIME: times.masked_fill(is_of_clock, self.event_time)}
        return values


class RowsAside:
    def __init__(self, table: HashTable) -> None:
        self.store, self._first_embeddings = table.store.emptied(), partial(first_embeddings, table)

    def claim(self, ids: Int64s) -> tuple[Int64s, tuple[int, Int64s]]:
        """Return the row of each id, the first new row and the new ids; slots are undefined. One thread at a time."""
        rows = self.store.rows
        first = len(rows)
        of_batch, new_ids = rows.claim(ids)
        rows.ids.write(first, torch.from_numpy(new_ids))
        rows.index.publish()
        return of_batch, (first, new_ids)

    def put(self, new: tuple[int, Int64s], rows: Int64s, values: Values, taken: Int64s | None) -> None:
        """Set slots of rows after :meth:`claim`; ``taken`` are their positions in the batch, None for all."""
        all_rows, columns, (first, new_ids) = self.store.rows, self.store.columns, new
        whole = _whole(columns, values)
        all_rows.initialize(first, first + len(new_ids), without=whole | {EMBEDDING})
        if EMBEDDING not in whole and len(new_ids):
            columns[EMBEDDING].write(first, self._first_embeddings(new_ids))
        if taken is not None:
            for name in whole:  # writes chosen rows without a temporary copy of the values
                columns[name].write_some(first, values[name], taken)
            at = torch.from_numpy(taken)
            values = {name: value[at] for name, value in values.items() if name not in whole}
        all_rows.put(rows, fitted_to(columns, rows, values))


def chosen(values: Values, rows: Int64s, n_rows: int) -> dict[str, Tensor]:
    if len(rows) == n_rows:
        return dict(values)
    at = torch.from_numpy(rows)
    return {name: tensor[at] for name, tensor in values.items()}


def _whole(columns: Mapping[str, Column], values: Values) -> frozenset[str]:
    return frozenset(name for name, value in values.items() if value.shape[1:] == columns[name].spec.shape)


def fitted_to(columns: Mapping[str, Column], rows: Int64s, values: Values) -> dict[str, Tensor]:
    """Cut values to the last dimension of their slots, or pad them with the rows' present values."""
    fitted = dict(values)
    for name in values.keys() - _whole(columns, values):
        value = values[name]
        fitted[name] = columns[name].gather(rows)
        width = min(value.shape[-1], columns[name].spec.shape[-1])
        fitted[name][..., :width] = value[..., :width]
    return fitted


class LoadTarget:
    """A table during a load, from :meth:`begin` on; several threads may write rows to it.

    This class serves tables other than HashTable, which receive whole rows through ``insert``, batch by batch.

    Attributes:
        slice: the buckets of the table's ids, which select the files to open; None for all.
        was_empty: whether the table had no rows when the load began.
        aside: rows that the table gets at the end of the load; None if it gets rows at once.
        takes_slots: whether the table can load single slots, and converts dtypes.
        is_read_only: whether rows cannot be written, only compared.
        finishes_last: whether the table receives rows that other tables have no room for.
        has_limited_room: whether the table may lack room for its ids, which is known only when all rows are there.
        lock: protects state that threads share.
    """

    aside: RowsAside | None = None
    takes_slots = False
    is_read_only = finishes_last = has_limited_room = False

    def __init__(self, table: SavableTable) -> None:
        self.table, self.lock, self.was_empty = table, threading.RLock(), len(table) == 0
        self.slice: Slice | None = getattr(table, "slice", None)

    def begin(self) -> None:
        self.was_empty = len(self.table) == 0

    def __len__(self) -> int:
        return len(self.table)

    @property
    def owned_ids(self) -> OwnedIds:
        return self.slice or Slice(0, N_BUCKETS)

    def ages(self, manifest: Manifest, taken_step: int | None, clock: ClockDates | None) -> Ages:
        """Return how dates are converted; only HashTables convert steps of their checkpoints to their own.

        ``taken_step`` is the step at which the run continues; None if it stays at its own step. ``clock`` dated rows of
        the checkpoint.
        """
        return Ages()

    def placed(self, ids: Int64s) -> Int64s | None:
        """Return the positions of ids for which the table can have a row; None for all."""
        return None

    def check_ids(self, least: int, greatest: int) -> None:
        """Refuse a checkpoint whose ids span [least, greatest] if the table cannot have a row of either bound."""

    def clear(self, fresh: Collection[str]) -> None:
        """Drop all rows; if rows stay in place, reset ``fresh`` slots to their initial values."""
        if len(self.table):
            self.table.clear()

    def start(self, initial: Mapping[str, float], n_rows: int | None) -> Mapping[str, float]:
        """Prepare for rows. New rows get ``initial`` values; return the initial values that these replace.

        ``n_rows`` is an upper bound on the rows, or None.
        """
        return {}

    def end(self, initial: Mapping[str, float]) -> None: ...

    def merge(self, ids: Int64s, values: Values, dtypes: Mapping[str, str]) -> int:
        """Write rows, adding those of new ids, and return their number.

        ``dtypes`` has the table's dtypes of slots that the checkpoint stores in a narrower dtype.
        """
        to = {name: getattr(torch, dtype) for name, dtype in dtypes.items()}  # other slots are cloned: files back them
        slots = {name: each.to(to[name]) if name in to else each.clone() for name, each in values.items()}
        embeddings = slots.pop(EMBEDDING)
        with self.lock:
            self.table.insert(torch.from_numpy(ids.copy()), embeddings, slots)
        return len(ids)

    def check_same(self, ids: Int64s, values: Values) -> None:
        """Refuse rows that differ from those of a read-only table."""

    def write_present(self, ids: Int64s, values: Values) -> int:
        raise TypeError(
            f"table {self.table.name!r} is not a recckpt HashTable: its slots cannot be loaded without its rows"
        )

    def erase(self, ids: Int64s) -> None:
        raise TypeError(f"table {self.table.name!r} is not a recckpt HashTable: it is loaded as a whole")

    def check_room(self, *, drops: bool) -> None:
        """Refuse rows gathered aside for which there is no room, unless they may be dropped."""

    def finish(self, *, drops: bool = False) -> int:
        """Give the table the rows gathered aside. Return how many rows were dropped for lack of room, if ``drops``."""
        return 0

    def take_history(self, entry: TableEntry, *, evicts_next: bool, has_dates: bool) -> None:
        """Continue the checkpoint's evictions if ``evicts_next``; take over the clock's dates if ``has_dates``."""

    def forget_admitted(self, sources: Mapping[str, set[int]], whole: set[int]) -> None:
        """Drop admission counts of ids that now have rows, unless rows and counts come from one checkpoint.

        ``sources`` maps a table to the numbers of its rows' checkpoints; all rows of those in ``whole`` were loaded.
        """

    def undo(self, *, is_cleared: bool) -> None:
        """Empty a table that was empty before, or if ``is_cleared``; other tables keep the rows they have received."""
        if len(self.table) and (self.was_empty or is_cleared):
            self.table.clear()


class OwnTarget(LoadTarget):
    """A HashTable during a load. If it is empty or emptied first, it gets all rows at once at the end of the load."""

    takes_slots = True

    def __init__(self, table: HashTable) -> None:
        super().__init__(table)
        table._refuse_shown("a load")
        self._table = table

    def begin(self) -> None:
        super().begin()
        self._table.store.wait()  # the load's threads write in CUDA streams of their own
        self.aside = RowsAside(self._table) if self.was_empty else None

    def __len__(self) -> int:
        return len(self._store)

    @property
    def _store(self) -> RowStore:
        return self._table.store if self.aside is None else self.aside.store

    def ages(self, manifest: Manifest, taken_step: int | None, clock: ClockDates | None) -> Ages:
        table, is_resumed = self._table, taken_step is not None and taken_step == manifest.step
        if taken_step is None:
            taken_step = table.time.step
        missing: dict[str, float] = {}
        if "step" in table.track:
            missing[LAST_STEP] = (taken_step if taken_step is not None else manifest.step) or 0
        if "count" in table.track:
            missing[COUNT] = least_count(table.evicts)
        event_time = manifest.state.get(EVENT_TIME)
        if "time" in table.track and isinstance(event_time, int | float):
            missing[LAST_TIME] = float(event_time)
        added_steps = 0
        if "step" in table.track and taken_step is not None and manifest.step is not None:
            added_steps = taken_step - manifest.step
        return Ages(added_steps, missing, is_resumed, clock, table.event_time)

    def clear(self, fresh: Collection[str]) -> None:
        """Drop all rows at once, before new ones are read, because memory may not suffice for both."""
        super().clear(fresh)
        if self.aside is None or len(self.aside.store):
            self.aside = RowsAside(self._table)

    def start(self, initial: Mapping[str, float], n_rows: int | None) -> Mapping[str, float]:
        before = {slot: self._store.rows.initial[slot] for slot in initial}
        self._store.rows.initial.update(initial)
        if n_rows is not None:
            self._store.reserve(n_rows)
        return before

    def end(self, initial: Mapping[str, float]) -> None:
        self._table.store.rows.initial.update(initial)

    def merge(self, ids: Int64s, values: Values, dtypes: Mapping[str, str]) -> int:
        store = self._store
        with store.lock:
            rows = store.insert(ids, {}, partial(first_embeddings, self._table))
            store.write(rows, fitted_to(store.columns, rows, values))
        return len(rows)

    def write_present(self, ids: Int64s, values: Values) -> int:
        store = self._store
        with store.lock:
            rows = store.find(ids)
            present = np.flatnonzero(rows >= 0)
            store.write(rows[present], fitted_to(store.columns, rows[present], chosen(values, present, len(ids))))
        return len(present)

    def erase(self, ids: Int64s) -> None:
        self._store.erase(ids)

    def finish(self, *, drops: bool = False) -> int:
        self._table.store.wait()
        if self.aside is not None:
            self._table.store.adopt(self.aside.store)
            self.aside = None
        return 0

    def take_history(self, entry: TableEntry, *, evicts_next: bool, has_dates: bool) -> None:
        if evicts_next:
            self._table.eviction.set_evicted_to(self._table.store, entry.evicted_to)
        if has_dates:
            self._table.tracking.note_clock(self._table.store, entry.clock)

    def forget_admitted(self, sources: Mapping[str, set[int]], whole: set[int]) -> None:
        admission = self._table.admission
        if admission is not None and self._table.candidates is not None:
            rows, counts = (sources.get(name, set()) for name in (self._table.name, self._table.candidates.name))
            if rows != counts or not rows <= whole:
                admission.forget_present(self._table.store)


def target_of(table: SavableTable) -> LoadTarget:
    return OwnTarget(table) if isinstance(table, HashTable) else LoadTarget(table)
