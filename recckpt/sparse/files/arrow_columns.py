"""Columns to Arrow and back (docs/format.md, section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.types import SlotSpec

TABLE, ID = "table", "id"  # part of the format
DTYPE_KEY = b"recckpt.dtype"  # part of the format
_ARROW = {
    "float16": pa.float16(),
    "bfloat16": pa.uint16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "int8": pa.int8(),
    "uint8": pa.uint8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
}
_TABLE_TYPE = pa.dictionary(pa.int16(), pa.utf8())
ID_SPEC = SlotSpec(ID, "int64", ())


def slot_field(slot: SlotSpec) -> pa.Field:
    """Return the Arrow field of a slot."""
    metadata = {DTYPE_KEY: b"bfloat16"} if slot.dtype == "bfloat16" else None
    return pa.field(slot.name, _column_type(slot), nullable=False, metadata=metadata)


def _column_type(slot: SlotSpec) -> pa.DataType:
    item = _ARROW[slot.dtype]
    if not slot.shape:
        return item
    return pa.list_(item, slot.shape[0]) if len(slot.shape) == 1 else pa.fixed_shape_tensor(item, slot.shape)


def part_schema(slots: Sequence[SlotSpec]) -> pa.Schema:
    """Return the schema of a part whose tables have these slots."""
    head = [pa.field(TABLE, _TABLE_TYPE, nullable=False), pa.field(ID, pa.int64(), nullable=False)]
    return pa.schema(head + [slot_field(slot) for slot in slots])


def column_array(spec: SlotSpec, buffer: pa.Buffer, n_rows: int) -> pa.Array:
    """Wrap the bytes of a column as an Arrow array, without a copy."""
    values = pa.Array.from_buffers(_ARROW[spec.dtype], n_rows * math.prod(spec.shape), [None, buffer])
    if not spec.shape:
        return values
    rows = pa.FixedSizeListArray.from_arrays(values, math.prod(spec.shape))
    return rows if len(spec.shape) == 1 else pa.ExtensionArray.from_storage(_column_type(spec), rows)


def column_buffer(array: pa.Array) -> pa.Buffer:
    """Return the bytes of the values of a column, without a copy."""
    values = column_items(array)
    item = values.type.bit_width // 8
    return values.buffers()[1].slice(values.offset * item, len(values) * item)


def column_values(array: pa.Array, slot: SlotSpec) -> npt.NDArray[Any]:
    """Return a column as a numpy array of shape (rows, *slot_shape), without a copy; bfloat16 as float32, with one."""
    dtype = np.dtype("uint16" if slot.dtype == "bfloat16" else slot.dtype)
    values: npt.NDArray[Any] = np.frombuffer(column_buffer(array), dtype)
    if slot.dtype == "bfloat16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.reshape(len(array), *slot.shape)


def column_items(array: pa.Array) -> pa.Array:
    """Return the primitive array in a column."""
    rows = array.storage if isinstance(array, pa.ExtensionArray) else array
    if isinstance(rows, pa.FixedSizeListArray):
        width = rows.type.list_size
        return rows.values.slice(rows.offset * width, len(rows) * width)  # flatten() imports pyarrow.compute
    return rows.indices if isinstance(rows, pa.DictionaryArray) else rows
