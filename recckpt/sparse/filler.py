"""One table being filled from batches, by several threads at once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from recckpt.errors import CorruptCheckpointError
from recckpt.manifest import TableEntry
from recckpt.sparse.buckets import Slice
from recckpt.sparse.catalog import Batch
from recckpt.sparse.codec import ID, column_buffer
from recckpt.sparse.index import IdIndex
from recckpt.sparse.table import HashTable
from recckpt.types import EMBEDDING, SlotSpec
from recckpt.types import HashTable as AnyTable

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TableLoad:
    """One table to fill.

    Attributes:
        table: where the rows go.
        entry: the table in the checkpoint.
        slots: names of the slots to take; those left out start at their initial values.
        with_rows: whether the checkpoint's rows replace those of the table; otherwise only the slots of ids
            that the table has are taken.
    """

    table: AnyTable
    entry: TableEntry
    slots: frozenset[str]
    with_rows: bool


class Filler:
    """Fills one table. ``fill`` may be called from several threads, after ``start``."""

    def __init__(self, load: TableLoad) -> None:
        self.load = load
        self.n_rows = 0
        self._slice: Slice | None = getattr(load.table, "slice", None)
        self._specs = {spec.name: spec for spec in load.entry.slots if spec.name in load.slots}
        self._lock = threading.Lock()
        self._seen = IdIndex()  # the ids that were checked

    def wants(self, batch: Batch) -> bool:
        """Say whether the table may own rows of a batch."""
        return self._slice is None or self._slice.meets(*batch.buckets)

    def start(self, n_rows: int) -> None:
        """Empty the table and make room for ``n_rows``, so that nothing moves while threads write to it."""
        self._seen = IdIndex()
        if self.load.with_rows:
            self.load.table.clear()
            if isinstance(self.load.table, HashTable):
                self.load.table.reserve(n_rows)

    def undo(self) -> None:
        """Empty a table whose rows turned out to be damaged; it was empty before."""
        if self.load.with_rows:
            self.load.table.clear()

    def check(self, columns: Mapping[str, pa.Array], path: str) -> None:
        """Look at a batch as ``fill`` would, and change nothing; before ``start``.

        Raises:
            CorruptCheckpointError: an id occurs twice.
        """
        ids = np.frombuffer(column_buffer(columns[ID]), np.int64)
        with self._lock:
            rows, new_ids = self._seen.find_or_add(ids)
        if len(new_ids) < len(ids):
            raise self._twice(path, f"id {ids[_first_repeat(rows)]}")

    def fill(self, columns: Mapping[str, pa.Array], path: str) -> None:
        """Take the rows of one batch that the table owns.

        Raises:
            CorruptCheckpointError: an id occurs twice.
        """
        ids = np.frombuffer(column_buffer(columns[ID]), np.int64)
        values = {name: _as_tensor(columns[name], spec, len(ids)) for name, spec in self._specs.items()}
        if self._slice is not None and not self._slice.is_everything:
            ids, values = _rows_of(ids, values, np.flatnonzero(self._slice.owns(ids)))
        if not self.load.with_rows:
            self._fill_present(ids, values)
        elif isinstance(self.load.table, HashTable):
            self._fill_ours(self.load.table, ids, values, path)
        else:
            self._fill_foreign(self.load.table, ids, values, path)

    def _fill_ours(self, table: HashTable, ids: Int64s, values: dict[str, Tensor], path: str) -> None:
        with self._lock:
            rows, new_ids = table.store.add(ids)
            self.n_rows += len(new_ids)
        if len(new_ids) < len(ids):
            raise self._twice(path, f"id {ids[_first_repeat(rows)]}")
        if len(rows):  # all new, so one after another
            table.store.initialize(int(rows[0]), int(rows[-1]) + 1, without=frozenset(values))
            table.store.write(rows, values)

    def _fill_foreign(self, table: AnyTable, ids: Int64s, values: dict[str, Tensor], path: str) -> None:
        slots = {name: tensor.clone() for name, tensor in values.items()}
        embeddings = slots.pop(EMBEDDING)
        with self._lock:
            before = len(table)
            table.insert(torch.from_numpy(ids.copy()), embeddings, slots)
            if len(table) - before < len(ids):
                raise self._twice(path, "an id of this batch")
            self.n_rows += len(ids)

    def _fill_present(self, ids: Int64s, values: dict[str, Tensor]) -> None:
        table = self.load.table
        if not isinstance(table, HashTable):
            raise TypeError(f"table {table.name!r} is not a recckpt HashTable: its slots load with its rows only")
        rows = table.store.find(ids)
        present = np.flatnonzero(rows >= 0)
        _, values = _rows_of(ids, values, present)
        table.store.write(rows[present], values)
        with self._lock:
            self.n_rows += len(present)

    def _twice(self, path: str, found: str) -> CorruptCheckpointError:
        where = f"table {self.load.entry.name!r}"
        return CorruptCheckpointError(path, where, found=f"{found} twice", expected="every id once")


def _rows_of(ids: Int64s, values: dict[str, Tensor], rows: Int64s) -> tuple[Int64s, dict[str, Tensor]]:
    if len(rows) == len(ids):
        return ids, values
    at = torch.from_numpy(rows)
    return ids[rows], {name: tensor[at] for name, tensor in values.items()}


def _as_tensor(array: pa.Array, spec: SlotSpec, n_rows: int) -> Tensor:
    """Wrap the bytes of a column as a tensor that lives as long as the array; nobody writes to it."""
    buffer = column_buffer(array)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * buffer.size).from_address(buffer.address))
    return torch.from_numpy(memory).view(getattr(torch, spec.dtype)).view(n_rows, *spec.shape)


def _first_repeat(rows: Int64s) -> Any:
    """Return the position of a row that was there before, or earlier in the batch."""
    _, first = np.unique(rows, return_index=True)
    repeats = np.setdiff1d(np.arange(len(rows)), first)
    return repeats[0] if len(repeats) else np.argmin(rows)
