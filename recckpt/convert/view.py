"""What an export takes of a checkpoint: tables, with some slots and rows, in another dtype, or what has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from recckpt.convert.narrowed import narrowed, narrowed_slots
from recckpt.convert.source import Array, Int64s, LeftOut, SourceRows
from recckpt.dense.tensors import DenseTensors
from recckpt.format.dtypes import NUMPY_DTYPES, widened
from recckpt.sparse.files.arrow_format import column_buffer, ids_in
from recckpt.sparse.files.row_filter import RowFilter
from recckpt.types import EMBEDDING, SlotSpec

Batches = Callable[[Sequence[str]], Iterator[pa.RecordBatch]]  # of these slots


@dataclass(frozen=True)
class TableView:
    """The rows of a table that are exported, in the form they are exported in.

    Attributes:
        name: of the table.
        stored: the slots that are exported, as they are in the checkpoint.
        n_stored: rows of the table, before they are filtered.
        batches: reads slots of it.
        where: which rows.
        dtype: of the vectors; None as they are.
        replaced: of an increment: whether these are all rows of the table, and nothing older counts.
        deletes: of an increment: yields the ids that were deleted; None of what is no increment.
    """

    name: str
    stored: tuple[SlotSpec, ...]
    n_stored: int | None
    batches: Batches
    where: RowFilter
    dtype: str | None
    filtered: Mapping[str, SlotSpec]  # slots that the filter looks at
    replaced: bool = False
    deletes: Callable[[], Iterator[Int64s]] | None = None

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots as they are exported."""
        return tuple(each for slot in self.stored for each in self._exported(slot))

    def only(self, name: str) -> TableView:
        """Return the same with the one slot that is needed for an exported column."""
        kept = next(slot for slot in self.stored if any(each.name == name for each in self._exported(slot)))
        return replace(self, stored=(kept,))

    def without_slots(self) -> TableView:
        """Return the ids alone."""
        return replace(self, stored=())

    def rows(self) -> Iterator[SourceRows]:
        """Yield the rows, in bucket order within each shard."""
        for rows, _ in self._measured():
            yield rows

    @cached_property
    def n_rows(self) -> int:
        """How many rows are exported; where they are chosen, by reading the slots that choose."""
        if self.n_stored is not None and self.where == RowFilter():
            return self.n_stored
        return sum(len(rows.ids) for rows in self.without_slots().rows())

    @cached_property
    def largest_error(self) -> float:
        """How far the worst value is from what the checkpoint has, by reading all that are narrowed."""
        narrow = tuple(slot for slot in self.stored if self._exported(slot) != (slot,))
        return max((error for _, error in replace(self, stored=narrow)._measured()), default=0.0) if narrow else 0.0

    def description(self) -> dict[str, Any]:
        """Return the entry of the table in the metadata of an export."""
        slots = {slot.name: {"dtype": slot.dtype, "shape": list(slot.shape)} for slot in self.slots}
        values: dict[str, Any] = {"rows": self.n_rows, "slots": slots}
        if self.slots != self.stored:
            values["largest_error"] = self.largest_error
        if self.deletes is not None:
            values["replaced"] = self.replaced
        return values

    def _exported(self, slot: SlotSpec) -> tuple[SlotSpec, ...]:
        if self.dtype is None or slot.name != EMBEDDING or slot.dtype == self.dtype:
            return (slot,)
        return narrowed_slots(slot, self.dtype)

    def _measured(self) -> Iterator[tuple[SourceRows, float]]:
        """Yield rows, and the largest error in them."""
        names = dict.fromkeys([*(slot.name for slot in self.stored), *self.filtered])
        for batch in self.batches(list(names)):
            ids = ids_in(batch)
            values = {name: _numbers(batch.column(name), slot) for name, slot in self.filtered.items()}
            kept = None if self.where == RowFilter() else self.where.keeps(ids, values)
            if kept is not None:
                ids = ids[kept]
            if not len(ids):
                continue
            columns: list[Array] = []
            worst = 0.0
            for slot in self.stored:
                stored = raw(batch.column(slot.name), slot)
                stored = stored if kept is None else stored[kept]
                if self._exported(slot) == (slot,):
                    columns.append(stored)
                    continue
                narrow, error = narrowed(stored, ids, slot, self.dtype or "", f"table {self.name!r}")
                columns, worst = columns + narrow, max(worst, error)
            yield SourceRows(ids, columns), worst


@dataclass(frozen=True)
class Export:
    """All that a target is given.

    Attributes:
        tables: in the order of the checkpoint.
        tensors: the dense ones.
        checkpoint: its id, step and url, for the metadata.
        n_shards: of the checkpoint.
        load: returns the dict in a ``.pt`` file, by torch; empty where the checkpoint has no such file.
    """

    tables: Sequence[TableView]
    tensors: DenseTensors
    checkpoint: Mapping[str, Any]
    n_shards: int
    load: Callable[[str], dict[str, Any]]

    def metadata(self) -> dict[str, Any]:
        """Return what is written beside the values."""
        return {**self.checkpoint, "tables": {table.name: table.description() for table in self.tables}}

    def state(self, name: str) -> dict[str, Any]:
        """Return a copy of the dict in a ``.pt`` file."""
        return dict(self.load(name))

    def no_dense(self, what: str) -> list[LeftOut]:
        """List the dense tensors, for a target that has no place for them."""
        return [LeftOut(f"dense {name}", what) for name in self.tensors.model]


def raw(column: pa.Array, slot: SlotSpec) -> Array:
    """Return a column as it lies in the checkpoint, bfloat16 as bit patterns."""
    values: Array = np.frombuffer(column_buffer(column), NUMPY_DTYPES[slot.dtype])
    return values.reshape(len(column), *slot.shape)


def _numbers(column: pa.Array, slot: SlotSpec) -> Array:
    """Return a column of one number a row as float64 or int64, which hold each of them exactly."""
    values = raw(column, slot).reshape(-1)
    values = widened(values) if slot.dtype == "bfloat16" else values
    exact: Array = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
    return exact
