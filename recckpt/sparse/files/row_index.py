"""Where the rows of a table lie in one link of a chain, by id, for look-ups that come again (no torch here)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.format.catalog import Catalog, Part
from recckpt.sparse.files.arrow_format import column_buffer, ids_in
from recckpt.sparse.files.once import Int64s, LinkIds, check_once
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_reader import TableReader, table_damage
from recckpt.types import SlotSpec


@dataclass
class _StoredBatch:
    """One batch of rows, and the columns of it that have been checked, as far as they can be kept."""

    part: Part
    number: int
    checked: dict[str, npt.NDArray[Any]] = field(default_factory=dict)


class RowIndex:
    """The ids that one link has of a table, in order; keeps 16 bytes a row. Thread-safe.

    All ids are read and checked when it is made, values when they are first asked for: where the storage has maps, a
    batch is checked once, and on others whenever it is read.

    Raises:
        CorruptCheckpointError: a file is damaged, or an id is there twice.
    """

    def __init__(self, table: TableReader) -> None:
        self._table, self._lock = table, threading.Lock()
        self._readers: dict[tuple[str, str], PartReader] = {}
        self._batches: list[_StoredBatch] = []
        shards = [self._ids_of(catalog) for catalog in table.catalogs]
        check_once(shards, partial(table_damage, table), between=table.may_repeat)
        self._firsts = np.cumsum([0, *(batch.part.batches[batch.number].rows for batch in self._batches)])
        ids = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in shards)])
        self._places = np.argsort(ids)
        self._named = LinkIds(ids[self._places], (deletes for _, deletes in shards))

    def find(self, ids: Int64s) -> Int64s:
        """Return the row of each id; ABSENT where the link says nothing of it, DELETED where it deletes it."""
        rows = self._named.find(ids)
        has_row = rows >= 0
        rows[has_row] = self._places[rows[has_row]]
        return rows

    def values(self, rows: Int64s, slot: SlotSpec) -> npt.NDArray[Any]:
        """Return a slot of some rows, shape (n, *slot_shape); bfloat16 as its bits, in uint16.

        Raises:
            CorruptCheckpointError: a file is damaged.
            CheckpointRemovedError: its writer removed it, and the storage has no maps.
        """
        out = np.empty((len(rows), *slot.shape), _dtype(slot))
        order = np.argsort(rows)
        ordered = rows[order]
        bounds = np.searchsorted(ordered, self._firsts)
        for number in np.flatnonzero(bounds[1:] > bounds[:-1]):
            some = slice(bounds[number], bounds[number + 1])
            out[order[some]] = self._column(self._batches[number], slot)[ordered[some] - self._firsts[number]]
        return out

    def _ids_of(self, catalog: Catalog) -> tuple[Int64s, Int64s]:
        """Return the ids of the rows of one shard, in the order of its batches, and those that it deletes."""
        shard = replace(self._table, catalogs=[catalog], slots=())
        rows, deletes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for part, number, batch in shard.batches(catalog, "rows", None):
            self._batches.append(_StoredBatch(part, number))
            rows.append(ids_in(batch))
        deletes += [ids_in(batch) for _, _, batch in shard.batches(catalog, "deletes", None)]
        return np.concatenate(rows), np.concatenate(deletes)

    def _column(self, batch: _StoredBatch, slot: SlotSpec) -> npt.NDArray[Any]:
        values = batch.checked.get(slot.name)
        if values is None:
            with self._lock:  # a reader of a part is for one thread
                reader = self._reader(batch.part, slot.name)
                array = reader.read(batch.number)[slot.name]
                values = np.frombuffer(column_buffer(array), _dtype(slot)).reshape(-1, *slot.shape)
                if reader.mapped is not None:
                    batch.checked[slot.name] = values
        return values

    def _reader(self, part: Part, slot: str) -> PartReader:
        key = part.file, slot
        if key not in self._readers:
            self._readers[key] = self._table.part(part, [slot])
        return self._readers[key]


def _dtype(slot: SlotSpec) -> np.dtype[Any]:
    return np.dtype("uint16" if slot.dtype == "bfloat16" else slot.dtype)
