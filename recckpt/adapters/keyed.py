"""Live tables whose ids are added and evicted: reads and loads their rows, and tracks their changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.live.attached import AttachedTable
from recckpt.live.store import LiveStore
from recckpt.sparse.files.owners import OwnedIds
from recckpt.sparse.files.table_target import OwnTarget, Values
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.placed import IdPlaces, PlacedRows, PlacedStore
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.store import HasMarkSets, in_order
from recckpt.sparse.table.table import HashTable
from recckpt.types import EMBEDDING, LiveTable, SlotSpec

Int64s = npt.NDArray[np.int64]
_ID = SlotSpec("id", "int64", ())


@dataclass(frozen=True)
class IdMap:
    """A map from ids to rows of a box: ascending int64 ``ids``, their ``rows``, and int64 slots stored per id."""

    ids: Tensor
    rows: Tensor
    meta: Mapping[str, Tensor]


@runtime_checkable
class KeyedLiveTable(LiveTable, Protocol):
    """A live table whose ids are added and evicted; saved by id, with evicted ids as deletes.

    ``n_ids`` is how many ids fit on all ranks; None if ids without room are dropped.
    """

    n_ids: int | None

    def id_map(self) -> IdMap:
        """Return the present ids, in tensors that never change; called at every save."""

    @property
    def owned_ids(self) -> OwnedIds:
        """The ids whose rows this rank loads."""

    def place(self, ids: Tensor, meta: Mapping[str, Tensor], *, drops: bool) -> Tensor:
        """Return the row of each id, -1 for none; LiveTableError if an id has no row and ``drops`` is False."""

    def take_ids(self, id_map: IdMap) -> None:
        """Set the table's ids to those of ``id_map``, after a load wrote their rows."""


class KeyedStore(PlacedStore):
    """The saved part of a keyed live table: the rows of its ids, and slots stored per id."""

    def __init__(self, live: KeyedLiveTable, rows: LiveStore) -> None:
        self._live, self._rows = live, rows
        self.lock, self.says_what_changes, self.audit = rows.lock, rows.says_what_changes, rows.audit

    @property
    def memory(self) -> LiveStore:
        return self._rows

    def placed(self) -> IdPlaces:
        """Return the present map from ids to rows; LiveTableError if the map is invalid."""
        id_map = self._live.id_map()
        ids, rows = (tensor.cpu().numpy() for tensor in (id_map.ids, id_map.rows))
        is_map = len(ids) == len(rows) and bool((ids[1:] > ids[:-1]).all())
        n_rows = len(self._rows)
        if not is_map or not _are_distinct(rows, n_rows):
            raise LiveTableError(
                f"table {self._live.name!r}: its id-to-row map has repeated ids or rows, or rows outside 0 to "
                f"{n_rows - 1}: other code may have overwritten the map; load a checkpoint to rewrite it"
            )
        return IdPlaces(ids, rows, {name: values.cpu().numpy() for name, values in id_map.meta.items()})

    def __len__(self) -> int:
        return len(self._live.id_map().ids)

    @property
    def ids(self) -> Column:
        return Column.over(_ID, torch.from_numpy(self.placed().ids))

    @property
    def columns(self) -> Mapping[str, Column]:  # a copy, in the order of the ids
        placed = self.placed()
        values = {name: column.gather(placed.places) for name, column in self._rows.saved_columns.items()}
        values |= {name: torch.from_numpy(meta) for name, meta in placed.meta.items()}
        return {slot.name: Column.over(slot, values[slot.name]) for slot in self.slots}

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        specs = (column.spec for column in self._rows.saved_columns.values())
        return in_order((*specs, *(SlotSpec(name, "int64", ()) for name in self._live.id_map().meta)))

    def snapshot(self, name: str, slots: Collection[str] | None = None) -> PlacedRows:
        with self.lock:
            placed = self.placed()
            of_ids = tuple(slot for slot in placed.slots if slots is None or slot.name in slots)
            snapshot = PlacedRows(self._rows.snapshot(name, slots), placed, of_ids)
            snapshot.keep_places(placed.places)
            return snapshot

    def track(self, marks: HasMarkSets) -> None:
        self._rows.track(marks)


def _are_distinct(rows: Int64s, n_rows: int) -> bool:
    """Return whether rows are distinct and in range; does not sort, because training waits for the result."""
    if len(rows) and not 0 <= rows.min() <= rows.max() < n_rows:
        return False
    is_taken = np.zeros(n_rows, np.bool_)
    is_taken[rows] = True
    return int(np.count_nonzero(is_taken)) == len(rows)


class KeyedTarget(OwnTarget):
    """Collects loaded rows in a separate table, and moves them to the live table when all have been read.

    Until then the live table is unchanged, so damaged or mismatching rows do no harm. A load needs memory for two
    copies of this rank's rows.
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
        self._attached.prepare()
        self._attached.rows.wait()
        super().begin()
        self._is_begun = False
        # Without a limit, finish after the tables with one; with a limit, a rank may get more ids than it has rows.
        self.finishes_last = self._attached.live.n_ids is None
        self.has_limited_room = not self.finishes_last and not self.owned_ids.is_everything

    @property
    def owned_ids(self) -> OwnedIds:
        return self._attached.live.owned_ids

    def clear(self, fresh: Collection[str]) -> None:
        """Drop all rows; optimizer slots of new rows start at their initial values."""
        self._is_begun = True
        super().clear(fresh)
        first = float(self._attached.live.settings().get("initial_accumulator_value", 0.0))
        for name in sorted((self._attached.rows.columns.keys() & fresh) - {EMBEDDING}):
            self._store.rows.initial[name] = first

    def start(self, initial: Mapping[str, float], n_rows: int | None) -> Mapping[str, float]:
        """Prepare for loaded rows, which are merged with the present rows unless the table was cleared."""
        self._begin_with_own()
        return super().start(initial, n_rows)

    def write_present(self, ids: Int64s, values: Values) -> int:
        with self.lock:
            self._begin_with_own()
        return super().write_present(ids, values)

    def _begin_with_own(self) -> None:
        if not self._is_begun:
            store = self._attached.store
            ids = store.placed().ids
            self._gathered.store.insert(ids, {name: column.blocks[0] for name, column in store.columns.items()})
            self._is_begun, self.aside, self.was_empty = True, None, len(ids) == 0

    def check_room(self, *, drops: bool) -> None:
        """Raise LiveTableError if this rank has more ids than rows, unless ``drops``."""
        if self._is_begun and self.has_limited_room:
            self._attached.place(*_rows_of(self._store), drops=drops)

    def finish(self, *, drops: bool = False) -> int:
        """Move ids and rows to the live table; return how many ids had no room; LiveTableError unless ``drops``."""
        super().finish()
        if not self._is_begun:
            return 0
        n_dropped = self._attached.replace(*_rows_of(self._gathered.store), drops=drops)
        self._attached.rows.wait()
        self._attached.live.finish({}, {})
        self._attached.look()
        return n_dropped


def _rows_of(store: RowStore) -> tuple[Int64s, dict[str, Tensor]]:
    values = {name: column.to_tensor(len(store)) for name, column in store.columns.items()}
    return store.ids.to_tensor(len(store)).numpy(), values


class AttachedKeyedTable(AttachedTable):
    is_by_id, target_type = True, KeyedTarget
    live: KeyedLiveTable

    def __init__(
        self, live: KeyedLiveTable, *, is_announced: bool = True, says_what_changes: bool = True, audit: int = 0
    ) -> None:
        super().__init__(live, is_announced=is_announced, says_what_changes=says_what_changes, audit=audit)
        self.most_ids, self._keyed = live.n_ids, KeyedStore(live, self.rows)
        self._is_as_loaded = False

    @property
    def store(self) -> KeyedStore:
        return self._keyed

    @property
    def specs(self) -> tuple[SlotSpec, ...]:
        return self.store.slots

    @property
    def n_saved(self) -> int:
        return len(self.store)

    def has_all_of(self, n_rows: int) -> bool:
        """Return whether the table has all ids and rows of the last loaded checkpoint."""
        return self._is_as_loaded

    def write(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write slots of the rows of ids; LiveTableError if an id has no row, or if a slot is stored per id."""
        placed = self.store.placed()
        at = np.searchsorted(placed.ids, ids.numpy())
        at[at == len(placed.ids)] = 0
        n_unknown = int((placed.ids[at] != ids.numpy()).sum()) if len(placed.ids) else len(ids)
        if n_unknown or values.keys() & placed.meta.keys():
            raise LiveTableError(
                f"table {self.name!r}: found {n_unknown} ids without a row, and the slots {sorted(values)}, expected "
                f"ids with rows, and none of the slots {sorted(placed.meta)}: load a checkpoint to give ids rows"
            )
        self.rows.write(placed.places[at], values)

    def place(
        self, ids: Int64s, values: Mapping[str, Tensor], *, drops: bool
    ) -> tuple[IdPlaces, dict[str, Tensor], Tensor]:
        """Return the sorted ids with their per-id slots, the per-row slots, and the row of each id, -1 for no row.

        LiveTableError if there are more ids than rows and ``drops`` is False.
        """
        order = np.argsort(ids)
        values = {name: tensor[torch.from_numpy(order)] for name, tensor in values.items()}
        names = self.live.id_map().meta.keys()
        asked = IdPlaces(ids[order], order, {name: values.pop(name).numpy() for name in names})
        meta = {name: torch.from_numpy(column) for name, column in asked.meta.items()}
        return asked, values, self.live.place(torch.from_numpy(asked.ids), meta, drops=drops)

    def replace(self, ids: Int64s, values: Mapping[str, Tensor], *, drops: bool) -> int:
        """Replace the table's ids by these distinct ids, with their rows; return how many ids got no row.

        LiveTableError if an id would get no row and ``drops`` is False; nothing has changed then.
        """
        asked, values, rows = self.place(ids, values, drops=drops)
        meta = {name: torch.from_numpy(column) for name, column in asked.meta.items()}
        taken = rows >= 0
        at = rows[taken]
        self.rows.write(at.numpy(), {name: tensor[taken] for name, tensor in values.items()})
        of_taken = {name: column[taken] for name, column in meta.items()}
        self.live.take_ids(IdMap(torch.from_numpy(asked.ids)[taken], at, of_taken))
        now = self.store.placed()
        kept = taken.numpy()
        saved = IdPlaces(asked.ids[kept], at.numpy(), {name: column[kept] for name, column in asked.meta.items()})
        n_dropped = len(ids) - len(at)
        self._is_as_loaded = now.is_same(saved) and (n_dropped == 0 or self.live.n_ids is None)
        return n_dropped
