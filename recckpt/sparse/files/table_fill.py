"""One table filled from batches by several threads at once: in place, or aside until all rows are there."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import Slice
from recckpt.format.catalog import Batch
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ID, column_buffer
from recckpt.sparse.files.row_filter import RowFilter
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.table import HashTable
from recckpt.types import EMBEDDING, SlotSpec
from recckpt.types import HashTable as AnyTable

Int64s = npt.NDArray[np.int64]


class LoadTarget:
    """One table during a load.

    A table of ours that is empty, or to be emptied, gets all its rows at once when the load is over: they are gathered
    in a store of their own, which is not seen yet. Other tables change batch by batch.
    """

    def __init__(self, table: AnyTable) -> None:
        self.table = table
        self.was_empty = len(table) == 0
        self.lock = threading.RLock()
        self._aside: RowStore | None = None
        if self.was_empty and isinstance(table, HashTable):
            self._aside = table.store.emptied()

    @property
    def store(self) -> RowStore:
        """The store to fill, of a table of ours."""
        assert isinstance(self.table, HashTable)
        return self.table.store if self._aside is None else self._aside

    @property
    def is_aside(self) -> bool:
        """Whether the store is not seen by others yet."""
        return self._aside is not None

    def __len__(self) -> int:
        return len(self.store) if isinstance(self.table, HashTable) else len(self.table)

    def clear(self) -> None:
        """Drop all rows; those of a table that has some at once, since there is never memory for both."""
        if len(self.table):
            self.table.clear()
        if isinstance(self.table, HashTable):
            self._aside = self.table.store.emptied()

    def finish(self) -> None:
        """Let the table have what was gathered aside."""
        if isinstance(self.table, HashTable) and self._aside is not None:
            self.table.store.adopt(self._aside)

    def undo(self, *, is_cleared: bool) -> None:
        """Empty a table that was empty before, or that was to be emptied anyway; others keep what they have taken."""
        if len(self.table) and (self.was_empty or is_cleared):
            self.table.clear()


@dataclass(frozen=True)
class TableLoad:
    """One table to fill from the table ``entry`` of a checkpoint."""

    table: AnyTable
    entry: TableEntry
    slots: Mapping[str, str]  # here -> there; slots left out start at their initial values in new rows
    with_rows: bool  # whether ids are taken; otherwise only the slots of ids that the table has
    clear: bool  # whether the table is emptied first; otherwise rows are merged in, and the loaded ones win
    where: RowFilter

    def wants(self, batch: Batch) -> bool:
        """Say whether the table may own rows of a batch."""
        owned: Slice | None = getattr(self.table, "slice", None)
        return owned is None or owned.meets(*batch.buckets)

    @property
    def columns(self) -> frozenset[str]:
        """The slots in the checkpoint that have to be read."""
        return frozenset(self.slots.values()) | self.where.slots

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the columns that are read, the id included."""
        return 8 + sum(slot.row_bytes for slot in self.entry.slots if slot.name in self.columns)

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows in those columns."""
        return self.entry.rows * self.row_bytes


class Filler:
    """Fills one table. ``fill`` may be called from several threads, after ``start``."""

    def __init__(self, load: TableLoad, target: LoadTarget) -> None:
        self.load = load
        self._target, self._lock = target, target.lock
        self.n_rows = self.n_filtered = 0
        self._where = load.where.of([spec.name for spec in load.entry.slots])
        self._slice: Slice | None = getattr(load.table, "slice", None)
        self._specs = {spec.name: spec for spec in load.entry.slots if spec.name in load.columns}
        self._seen = IdIndex()  # ids so far, where the table itself cannot tell whether one comes twice
        self._touched = False

    def start(self, n_rows: int) -> None:
        """Empty the table if it is to be, and make room for ``n_rows`` more: nothing moves while threads write."""
        self._seen = IdIndex()
        if self.load.with_rows:
            if self.load.clear:
                self._touched = True
                self._target.clear()
            if isinstance(self.load.table, HashTable) and self._where == RowFilter():
                self._target.store.reserve(len(self._target) + n_rows)

    def undo(self) -> None:
        """Empty a table that was empty before, or that was to be emptied anyway; others keep what they have taken."""
        if self.load.with_rows:
            self._target.undo(is_cleared=self.load.clear and self._touched)

    @property
    def is_changed(self) -> bool:
        """Whether the table has lost rows or values."""
        return self._touched and not self._target.was_empty

    def check(self, columns: Mapping[str, pa.Array], path: str) -> None:
        """Refuse a batch as ``fill`` would, before ``start``, and change nothing."""
        self._check_new(np.frombuffer(column_buffer(columns[ID]), np.int64), path)

    def fill(self, columns: Mapping[str, pa.Array], path: str) -> None:
        """Take the rows of one batch that the table owns and the filter keeps; refuse it where an id comes twice."""
        ids = np.frombuffer(column_buffer(columns[ID]), np.int64)
        found = {name: _as_tensor(columns[name], spec, len(ids)) for name, spec in self._specs.items()}
        ids, found = self._chosen(ids, found)
        self._touched = True
        values = {slot: found[there] for slot, there in self.load.slots.items()}
        if not self.load.with_rows:
            self._fill_present(ids, values)
        elif isinstance(self.load.table, HashTable):
            if not self.load.clear:
                self._check_new(ids, path)
            if self._target.is_aside:
                # Nobody knows how many rows a filter keeps: columns grow, and rows move, while no one else writes them.
                with nullcontext() if self._where == RowFilter() else self._lock:
                    self._fill_aside(self.load.table, ids, values, path)
            else:
                self._merge(self.load.table, ids, values)
        else:
            self._fill_foreign(self.load.table, ids, values, path)

    def _chosen(self, ids: Int64s, found: dict[str, Tensor]) -> tuple[Int64s, dict[str, Tensor]]:
        """Return the rows that the table owns and the filter keeps."""
        if self._slice is not None and not self._slice.is_everything:
            ids, found = _rows_of(ids, found, np.flatnonzero(self._slice.owns(ids)))
        if self._where != RowFilter():
            looked_at = {slot: found[slot].to(torch.float64).view(-1).numpy() for slot in self._where.slots}
            kept = np.flatnonzero(self._where.keeps(ids, looked_at))
            with self._lock:
                self.n_filtered += len(ids) - len(kept)
            ids, found = _rows_of(ids, found, kept)
        return ids, found

    def _fill_aside(self, table: HashTable, ids: Int64s, values: dict[str, Tensor], path: str) -> None:
        """Add rows to the store aside: the ids one thread at a time, then their values."""
        rows = self._target.store.rows
        with self._lock:
            first = len(rows)
            at, new_ids = rows.claim(ids)
            rows.ids.write(first, torch.from_numpy(new_ids))
            rows.publish()
            self.n_rows += len(at)
        if self.load.clear and len(new_ids) < len(ids):
            raise self._twice(path, ids[_first_repeat(at)])
        whole = self._whole(values)
        rows.initialize(first, first + len(new_ids), without=whole | {EMBEDDING})
        if EMBEDDING not in whole and len(new_ids):
            rows.columns[EMBEDDING].write(first, table.first_embeddings(new_ids))
        rows.put(at, self._fitted(at, values))

    def _merge(self, table: HashTable, ids: Int64s, values: dict[str, Tensor]) -> None:
        """Add rows to a table that others may use meanwhile."""
        store = self._target.store
        with store.lock:
            rows = store.add(ids, table.first_embeddings)
            store.write(rows, self._fitted(rows, values))
            self.n_rows += len(rows)

    def _fill_foreign(self, table: AnyTable, ids: Int64s, values: dict[str, Tensor], path: str) -> None:
        slots = {name: tensor.clone() for name, tensor in values.items()}
        embeddings = slots.pop(EMBEDDING)
        self._check_new(ids, path)
        with self._lock:
            table.insert(torch.from_numpy(ids.copy()), embeddings, slots)
            self.n_rows += len(ids)

    def _fill_present(self, ids: Int64s, values: dict[str, Tensor]) -> None:
        table = self.load.table
        if not isinstance(table, HashTable):
            raise TypeError(f"table {table.name!r} is not a recckpt HashTable: its slots load with its rows only")
        store = self._target.store
        with store.lock:
            rows = store.find(ids)
            present = np.flatnonzero(rows >= 0)
            _, values = _rows_of(ids, values, present)
            store.write(rows[present], self._fitted(rows[present], values))
            self.n_rows += len(present)

    def _whole(self, values: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the slots that the values cover in full."""
        columns = self._target.store.columns
        return frozenset(name for name, value in values.items() if value.shape[1:] == columns[name].spec.shape)

    def _fitted(self, rows: Int64s, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bring values to the last dimension of their slots, cut or padded with what the rows hold."""
        fitted = dict(values)
        for name in values.keys() - self._whole(values):
            column, value = self._target.store.columns[name], values[name]
            fitted[name] = column.gather(rows)
            width = min(value.shape[-1], column.spec.shape[-1])
            fitted[name][..., :width] = value[..., :width]
        return fitted

    def _check_new(self, ids: Int64s, path: str) -> None:
        with self._lock:
            rows, new_ids = self._seen.find_or_add(ids)
        if len(new_ids) < len(ids):
            raise self._twice(path, ids[_first_repeat(rows)])

    def _twice(self, path: str, id_: int) -> CorruptCheckpointError:
        where = f"table {self.load.entry.name!r}"
        return CorruptCheckpointError(path, where, found=f"id {id_} twice", expected="every id once")


def _rows_of(ids: Int64s, values: dict[str, Tensor], rows: Int64s) -> tuple[Int64s, dict[str, Tensor]]:
    if len(rows) == len(ids):
        return ids, values
    at = torch.from_numpy(rows)
    return ids[rows], {name: tensor[at] for name, tensor in values.items()}


def _as_tensor(array: pa.Array, spec: SlotSpec, n_rows: int) -> Tensor:
    """Wrap the bytes of a column as a tensor that lives as long as the array; read only."""
    buffer = column_buffer(array)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * buffer.size).from_address(buffer.address))
    return torch.from_numpy(memory).view(getattr(torch, spec.dtype)).view(n_rows, *spec.shape)


def _first_repeat(rows: Int64s) -> Any:
    """Return the position of a row that was there before, or earlier in the batch."""
    _, first = np.unique(rows, return_index=True)
    repeats = np.setdiff1d(np.arange(len(rows)), first)
    return repeats[0] if len(repeats) else np.argmin(rows)
