"""The Arrow form of a part (docs/format.md, section 5): columns to Arrow and back, and the writer of the file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from recckpt.format.catalog import Batch, Part
from recckpt.storage import Sink, SinkFile
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


@dataclass(frozen=True)
class ColumnBytes:
    """Values of one column of a batch, in memory that the caller may reuse after the write."""

    spec: SlotSpec
    values: npt.NDArray[np.uint8]


class PartWriter:
    """Writes one part into a sink; :meth:`finish` returns its catalog entry. Not thread-safe."""

    def __init__(self, sink: Sink, file: str, tables: Sequence[str], slots: Sequence[SlotSpec]) -> None:
        self._file, self._tables = file, tuple(tables)
        self._numbers = {name: number for number, name in enumerate(tables)}
        self._dictionary = pa.array(self._tables, pa.utf8())
        self._schema = part_schema(slots)
        self._framed = _FrameSink(sink)
        self._batches: list[Batch] = []
        self._arrow = pa.ipc.new_file(pa.PythonFile(self._framed, "w"), self._schema)

    def write(self, table: str, buckets: tuple[int, int], columns: Sequence[ColumnBytes]) -> None:
        """Write rows of one table; the first column is the ids, the others are in the order of the slots."""
        n_rows = len(columns[0].values) // 8
        numbers = np.full(n_rows, self._numbers[table], np.int16)
        buffers = {TABLE: pa.py_buffer(numbers), **{c.spec.name: pa.py_buffer(c.values) for c in columns}}
        xxh3 = {name: xxhash.xxh3_64_intdigest(buffer) for name, buffer in buffers.items()}
        indices = pa.Array.from_buffers(pa.int16(), n_rows, [None, buffers[TABLE]])
        arrays = [pa.DictionaryArray.from_arrays(indices, self._dictionary)]
        arrays += [column_array(column.spec, buffers[column.spec.name], n_rows) for column in columns]
        self._framed.values = {buffer.address for buffer in buffers.values()}
        self._arrow.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._framed.values = set()
        self._batches.append(Batch(table, n_rows, buckets, xxh3))

    def finish(self) -> Part:
        """Write the footer; the sink is still the caller's to close."""
        self._arrow.close()
        frame = self._framed.frame.intdigest()
        return Part(self._file, self._framed.n_bytes, frame, self._tables, tuple(self._batches))


class _FrameSink(SinkFile):
    """The file object that Arrow writes to; hashes what no column checksum covers."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.frame = xxhash.xxh3_64()
        self.values: set[int] = set()  # addresses of the column values that are being written

    def write(self, data: Any) -> int:
        if not (isinstance(data, pa.Buffer) and data.address in self.values):
            self.frame.update(data)
        return super().write(data)
