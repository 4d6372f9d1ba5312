"""Batches of Arrow to rows of a table: ids, vectors and slots, of the types that Arrow files have them in."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from recckpt.convert.row_checks import int64_ids
from recckpt.convert.source import Array, ImportOptions, SourceRows, SourceTable
from recckpt.errors import ConversionError
from recckpt.sparse.files.arrow_format import DTYPE_KEY
from recckpt.text import nearest
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec

_RESERVED = frozenset({"table", "op"})


class Columns:
    """How the columns of files of rows become ids and slots, by the first of their batches.

    Raises:
        ConversionError: a column is missing, or has a type that no slot has.
    """

    def __init__(self, first: pa.RecordBatch | pa.Schema, options: ImportOptions, path: str) -> None:
        schema = first if isinstance(first, pa.Schema) else first.schema
        self._ids, self._path, self.schema = options.ids, path, schema
        for column, what in ((options.ids, "ids"), (options.embedding, "vectors")):
            if schema.names.count(column) != 1:
                found = f"{schema.names.count(column)} columns {column!r}, which are to be the {what}; {schema.names}"
                remedy = f"name the column{nearest(column, schema.names)}"
                raise ConversionError(path, "", found=found, expected="one column", remedy=remedy)
        others = [name for name in schema.names if name not in (options.ids, options.embedding)]
        unknown = [name for name in options.slots or () if name not in others]
        if unknown:
            remedy = f"name other columns{nearest(unknown[0], others)}"
            raise ConversionError(path, "", found=f"slots {unknown}", expected=f"some of {others}", remedy=remedy)
        self.unasked = [name for name in others if options.slots is not None and name not in options.slots]
        names = [name for name in others if name not in self.unasked and name not in _RESERVED]
        self._names = [options.embedding, *names]
        slots = [EMBEDDING, *names]
        self.left_out = [name for name in schema.names if name in _RESERVED and name not in self.unasked]
        batch = None if isinstance(first, pa.Schema) else first
        if len(set(slots)) < len(slots):
            raise ConversionError(path, "", found=f"columns {schema.names}", expected="different names of slots")
        self.slots = tuple(
            self._slot(slot, schema.field(name), batch) for slot, name in zip(slots, self._names, strict=True)
        )

    def rows(self, batch: pa.RecordBatch) -> SourceRows:
        """Return the rows of a batch; ConversionError for nulls, and for what is not as in the first one."""
        for column in (self._ids, *self._names):
            if batch.column(column).null_count:
                raise ConversionError(self._path, f"column {column!r}", found="nulls", expected="a value in each row")
        ids = batch.column(self._ids)
        if not pa.types.is_integer(ids.type):
            found = f"ids of {ids.type}"
            remedy = "nothing was written; ids are int64: hash or number them first"
            raise ConversionError(self._path, f"column {self._ids!r}", found=found, expected="integers", remedy=remedy)
        columns = [self._values(batch.column(n), slot) for n, slot in zip(self._names, self.slots, strict=True)]
        return SourceRows(int64_ids(ids.to_numpy(zero_copy_only=False), self._path, f"column {self._ids!r}"), columns)

    def table(self, name: str, n_rows: int, *, is_exact: bool = True) -> SourceTable:
        """Return what a source says of it."""
        return SourceTable(name, n_rows, self.slots, is_exact)

    def _slot(self, slot: str, field: pa.Field, first: pa.RecordBatch | None) -> SlotSpec:
        kind: pa.DataType = field.type
        shape: tuple[int, ...] = ()
        if isinstance(kind, pa.FixedShapeTensorType):
            kind, shape = kind.value_type, tuple(kind.shape)
            if field.type.permutation not in (None, list(range(len(shape)))):
                raise self._wrong(field, "a tensor in row-major order")
        elif pa.types.is_fixed_size_list(kind):
            kind, shape = kind.value_type, (kind.list_size,)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            kind, shape = kind.value_type, (self._width(field, first),)
        dtype = "bfloat16" if (field.metadata or {}).get(DTYPE_KEY) == b"bfloat16" else _dtype(kind)
        if dtype not in ITEM_BYTES or 0 in shape:
            raise self._wrong(field, f"numbers of {', '.join(ITEM_BYTES)}, or lists of them of one length")
        spec = SlotSpec(slot, dtype, shape)
        if spec.row_bytes >= 2**31:
            raise self._wrong(field, "rows below 2 GiB")
        return spec

    def _width(self, field: pa.Field, first: pa.RecordBatch | None) -> int:
        """Return the length of the lists of a column, which its type does not say."""
        if first is None or not first.num_rows or not first.column(field.name)[0].is_valid:
            raise self._wrong(field, "a first row that says how long its lists are")
        return len(first.column(field.name)[0])

    def _wrong(self, field: pa.Field, expected: str) -> ConversionError:
        where, remedy = f"column {field.name!r}", "nothing was written; choose other columns by slots"
        return ConversionError(self._path, where, found=f"{field.type}", expected=expected, remedy=remedy)

    def _values(self, column: pa.Array, slot: SlotSpec) -> Array:
        flat, n_rows = column, len(column)
        if isinstance(flat, pa.ExtensionArray):
            flat = flat.storage
        if pa.types.is_list(flat.type) or pa.types.is_large_list(flat.type):
            lengths = np.diff(flat.offsets.to_numpy())
            if (lengths != slot.shape[0]).any():
                odd = int(lengths[lengths != slot.shape[0]][0])
                where = f"column {slot.name!r}"
                raise ConversionError(self._path, where, found=f"a list of {odd}", expected=f"{slot.shape[0]} in each")
        if flat.type.num_fields:
            flat = flat.flatten()
        if flat.null_count:
            raise ConversionError(self._path, f"column {slot.name!r}", found="nulls", expected="a value in each place")
        values: Array = flat.to_numpy(zero_copy_only=False)
        if slot.dtype == "bfloat16" and values.dtype == np.float32:  # as an export widens it
            values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return values.reshape(n_rows, *slot.shape)


def _dtype(kind: pa.DataType) -> str:
    return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
