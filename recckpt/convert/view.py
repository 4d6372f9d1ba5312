"""A checkpoint as an export reads it: selected slots and rows of tables, in another dtype, or only changed rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from recckpt.convert.source import Array, Int64s, LeftOut, SourceRows
from recckpt.dense.tensors import DenseTensors, StoredTensor
from recckpt.errors import ConversionError
from recckpt.format.tensor_index import NUMPY_DTYPES, widened
from recckpt.policies.row_filter import RowFilter
from recckpt.sparse.files.arrow_format import column_buffer, ids_in
from recckpt.text import Progress
from recckpt.types import EMBEDDING, SlotSpec

DTYPES = ("float16", "bfloat16", "int8")
SCALE = "_scale"  # suffix of an int8 slot's name: the slot with the scale of each row; part of the format
_PIECE = 1 << 20  # values to convert at once
_HALVES = frozenset({"float16", "bfloat16"})
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
Batches = Callable[[Sequence[str]], Iterator[pa.RecordBatch]]  # names of slots -> batches


@dataclass(frozen=True)
class TableView:
    name: str  # name of the table
    stored: tuple[SlotSpec, ...]  # exported slots, as they are in the checkpoint
    n_stored: int | None  # rows of the table before filtering; None if unknown
    batches: Batches  # reads slots of the table
    where: RowFilter  # filter of rows
    dtype: str | None  # dtype of exported vectors; None keeps the stored dtype
    filtered: Mapping[str, SlotSpec]  # slots that the filter reads
    replaced: bool = False  # for an increment: whether these rows replace all older rows
    # for an increment: yields the deleted ids; else None
    deletes: Callable[[], Iterator[Int64s]] | None = None

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return tuple(each for slot in self.stored for each in self._exported(slot))

    def rows(self, progress: Progress | None = None) -> Iterator[SourceRows]:
        """Yield the rows, in bucket order within each shard; progress counts the rows that pass the filter."""
        for rows, _ in self._measured():
            yield rows
            if progress is not None:
                progress.advance(rows.ids.nbytes + sum(column.nbytes for column in rows.columns))
                progress.add_rows(len(rows.ids))

    def ids(self) -> Iterator[Int64s]:
        yield from (rows.ids for rows in replace(self, stored=()).rows())

    def column(self, name: str) -> Iterator[tuple[Int64s, Array]]:
        """Yield ids and one exported column, without reading other slots."""
        stored = tuple(slot for slot in self.stored if name in (each.name for each in self._exported(slot)))
        one = replace(self, stored=stored)
        at = [slot.name for slot in one.slots].index(name)
        yield from ((rows.ids, rows.columns[at]) for rows in one.rows())

    @cached_property
    def n_rows(self) -> int:
        """The number of exported rows; with a filter, determined by reading the filter's slots."""
        if self.n_stored is not None and self.where == RowFilter():
            return self.n_stored
        return sum(map(len, self.ids()))

    @cached_property
    def _largest_error(self) -> float:
        """The largest error of narrowed values, determined by reading all of them."""
        narrow = tuple(slot for slot in self.stored if self._exported(slot) != (slot,))
        return max((error for _, error in replace(self, stored=narrow)._measured()), default=0.0)

    def description(self) -> dict[str, Any]:
        """Return the table's entry in the metadata of an export."""
        slots = {slot.name: {"dtype": slot.dtype, "shape": list(slot.shape)} for slot in self.slots}
        values: dict[str, Any] = {"rows": self.n_rows, "slots": slots}
        if self.slots != self.stored:
            values["largest_error"] = self._largest_error
        if self.deletes is not None:
            values["replaced"] = self.replaced
        return values

    def _exported(self, slot: SlotSpec) -> tuple[SlotSpec, ...]:
        """Return the slots that a slot becomes: for int8, its values and a slot of scales."""
        if self.dtype is None or slot.name != EMBEDDING or slot.dtype == self.dtype or slot.dtype not in _FLOATS:
            return (slot,)
        narrow = SlotSpec(slot.name, self.dtype, slot.shape)
        return (narrow, SlotSpec(slot.name + SCALE, "float32", ())) if self.dtype == "int8" else (narrow,)

    def _measured(self) -> Iterator[tuple[SourceRows, float]]:  # rows, and their largest error
        names = dict.fromkeys([*(slot.name for slot in self.stored), *self.filtered])
        for batch in self.batches(list(names)):
            ids = ids_in(batch)
            values = {name: numbers(raw(batch.column(name), s), s).reshape(-1) for name, s in self.filtered.items()}
            values = {name: v.astype(np.float64 if v.dtype.kind == "f" else np.int64) for name, v in values.items()}
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
                narrow, error = narrowed(stored, slot, self.dtype or "", f"table {self.name!r}", ids)
                columns, worst = columns + narrow, max(worst, error)
            yield SourceRows(ids, columns), worst


@dataclass(frozen=True)
class DenseView:
    name: str
    dtype: str
    shape: tuple[int, ...]
    same: Hashable  # equal for tied tensors
    read: Callable[[], Array]  # checked values; bfloat16 as bit patterns


@dataclass(frozen=True)
class Export:
    tables: Sequence[TableView]  # in the order of the checkpoint
    tensors: DenseTensors  # dense tensors, as they are in the checkpoint
    dtype: str | None  # dtype of vectors and float tensors (int8: only vectors); None keeps the stored dtype
    checkpoint: Mapping[str, Any]  # id, step and URL, for the metadata
    n_shards: int  # number of shards of the checkpoint
    # reads a ``.pt`` file by torch into a new dict; {} if the checkpoint has no such file
    state: Callable[[str], dict[str, Any]]

    def metadata(self) -> dict[str, Any]:
        return {**self.checkpoint, "tables": {table.name: table.description() for table in self.tables}}

    def dense(self) -> Iterator[DenseView]:
        """Yield the dense tensors; reading one raises ConversionError if the dtype cannot hold one of its values."""
        half = self.dtype if self.dtype in _HALVES else None
        for name, tensor in self.tensors.model.items():
            dtype = half if half is not None and tensor.dtype in _FLOATS else tensor.dtype
            yield DenseView(name, dtype, tensor.shape, tensor.place, partial(self._read, tensor, dtype))

    def _read(self, tensor: StoredTensor, dtype: str) -> Array:
        values: Array = self.tensors.read(tensor)
        if dtype == tensor.dtype:
            return values
        flat, result = values.reshape(-1), np.empty(values.size, NUMPY_DTYPES[dtype])
        for begin in range(0, flat.size, _PIECE):  # narrowing needs several times the memory of its input
            piece = flat[begin : begin + _PIECE][None]
            spec = SlotSpec(tensor.name, tensor.dtype, piece.shape[1:])
            result[begin : begin + _PIECE] = narrowed(piece, spec, dtype, f"tensor {tensor.name!r}")[0][0][0]
        return result.reshape(tensor.shape)

    def no_dense(self, what: str) -> list[LeftOut]:
        """List the dense tensors, for a format that cannot hold them."""
        return [LeftOut(f"dense {name}", what) for name in self.tensors.model]


def raw(column: pa.Array, slot: SlotSpec) -> Array:
    """Return a column as stored; bfloat16 as bit patterns."""
    values: Array = np.frombuffer(column_buffer(column), NUMPY_DTYPES[slot.dtype])
    return values.reshape(len(column), *slot.shape)


def numbers(column: Array, slot: SlotSpec) -> Array:
    """Return a column with bfloat16 widened to float32, which is exact."""
    return widened(column) if slot.dtype == "bfloat16" else column


def in_float32(slot: SlotSpec) -> SlotSpec:
    """Return a slot with float32 in place of bfloat16, as :func:`numbers` gives its columns."""
    return replace(slot, dtype="float32") if slot.dtype == "bfloat16" else slot


def narrowed(
    values: Array, slot: SlotSpec, dtype: str, path: str, ids: Int64s | None = None
) -> tuple[list[Array], float]:
    """Return a slot of floats in another dtype (int8 with one scale per row), and the largest finite error.

    ConversionError if a value is beyond the dtype's range; in int8 also if it is not finite.
    """
    exact = numbers(values, slot)
    exact = exact.astype(np.float64 if slot.dtype == "float64" else np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "int8":
            flat = exact.reshape(len(exact), -1)
            scales = (np.abs(flat).max(axis=1, initial=0.0) / 127).astype(np.float32)
            divisors = np.where(scales > 0, scales, 1).astype(np.float32)
            steps = np.clip(np.rint(flat / divisors[:, None]), -127, 127).astype(np.int8)
            back = (steps.astype(np.float64) * scales[:, None].astype(np.float64)).reshape(exact.shape)
            columns = [steps.reshape(exact.shape), scales]
        elif dtype == "float16":
            back = exact.astype(np.float16)
            columns = [back]
        else:
            columns = [_bfloat16(exact)]
            back = widened(columns[0])
        is_finite = np.isfinite(exact)
        lost = ~np.isfinite(back) if dtype == "int8" else is_finite & ~np.isfinite(back)
        if lost.any():
            row = int(np.argwhere(lost)[0][0])
            lost_values = exact[row][lost[row]]
            found, where = f"{lost_values[np.argmax(np.abs(lost_values))]}", ""
            if ids is not None:
                found, where = f"{found} in id {ids[row]}", f"slot {slot.name!r}"
            raise ConversionError(path, where, found=found, expected=f"what {dtype} holds", remedy="keep the dtype")
        off = np.abs(back.astype(np.float64) - exact)[is_finite]
    return columns, float(off.max(initial=0.0))


def _bfloat16(exact: Array) -> Array:
    """Return the bit patterns of the nearest bfloat16 values."""
    bits = np.ascontiguousarray(exact, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # a NaN stays one
    patterns: Array = np.where(np.isnan(exact), quiet, rounded).astype(np.uint16)
    return patterns
