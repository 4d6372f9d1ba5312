"""The Arrow form of a part (docs/format.md, section 5): its columns, and what no message in it may say."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.format.dtypes import widened
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


def names_array(names: Sequence[str]) -> pa.Array:
    """Return names as an Arrow array; ``pa.array`` imports pandas to make one, where that is installed."""
    encoded = [name.encode() for name in names]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(pa.utf8(), len(names), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])


def int64_array(values: npt.NDArray[np.int64]) -> pa.Array:
    """Return ids or numbers of rows as an Arrow array, without a copy; ``pa.array`` imports pandas here too."""
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values, np.int64))])


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


def ids_in(columns: Mapping[str, pa.Array] | pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return the ids of a batch, without a copy."""
    return np.frombuffer(column_buffer(columns[ID]), np.int64)


def column_values(array: pa.Array, slot: SlotSpec) -> npt.NDArray[Any]:
    """Return a column as a numpy array of shape (rows, *slot_shape), without a copy; bfloat16 as float32, with one."""
    dtype = np.dtype("uint16" if slot.dtype == "bfloat16" else slot.dtype)
    values: npt.NDArray[Any] = np.frombuffer(column_buffer(array), dtype)
    return (widened(values) if slot.dtype == "bfloat16" else values).reshape(len(array), *slot.shape)


def column_items(array: pa.Array) -> pa.Array:
    """Return the primitive array in a column."""
    rows = array.storage if isinstance(array, pa.ExtensionArray) else array
    if isinstance(rows, pa.FixedSizeListArray):
        width = rows.type.list_size
        return rows.values.slice(rows.offset * width, len(rows) * width)  # flatten() imports pyarrow.compute
    return rows.indices if isinstance(rows, pa.DictionaryArray) else rows


# Places in the flatbuffers of an Arrow file.
_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of the metadata, bytes of the body
_END_BYTES = 10  # of a file: the size of the footer, and a magic
_DICTIONARIES, _BATCHES = 2, 3  # fields of a Footer
_VERSION, _KIND, _HEADER, _CUSTOM = 0, 1, 2, 4  # fields of a Message
_V5 = 4  # of the metadata
_DICTIONARY, _BATCH = 2, 3  # kinds of a header
_DATA = 1  # field of a DictionaryBatch
_COMPRESSION = 3  # field of a RecordBatch

_Data = bytes | memoryview


class Messages:
    """The messages of an Arrow file that lies in memory and has a footer that Arrow takes, looked at before it does.

    Arrow expands a compressed batch before it can be looked at: a file of 100 kB may ask for any number of
    gigabytes. Parts are not compressed, so one that says it is is refused.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._footer = len(data) - _END_BYTES - _int32(data, len(data) - _END_BYTES)

    def check_dictionaries(self) -> None:
        """Raise ValueError if a dictionary is compressed."""
        first, count = self._vector(_DICTIONARIES)
        for number in range(count):
            self._check(first, number)

    def check_all(self) -> None:
        """Raise ValueError if anything is compressed."""
        self.check_dictionaries()
        for number in range(self._vector(_BATCHES)[1]):
            self.check_batch(number)

    def check_batch(self, number: int) -> None:
        """Raise ValueError if a record batch is compressed."""
        self._check(self._vector(_BATCHES)[0], number)

    def _vector(self, field: int) -> tuple[int, int]:
        """Return where the first block is and how many there are."""
        place = _field(self._data, _follow(self._data, self._footer), field)
        vector = _follow(self._data, place) if place else 0
        return vector + 4, _int32(self._data, vector) if place else 0

    def _check(self, first: int, number: int) -> None:
        try:
            begin, n_bytes, _ = _BLOCK.unpack_from(self._data, first + number * _BLOCK.size)
        except struct.error as error:
            raise ValueError(f"a broken footer ({error})") from error
        check_message(self._data[begin : begin + n_bytes])


def check_message(data: _Data) -> None:
    """Look at what Arrow has read in one go, a message or anything else.

    Raises:
        ValueError: it is a message with compressed values.
    """
    if len(data) > 8 and _int32(data, 0) == -1:
        begin = 8
    elif len(data) > 4 and _int32(data, 0) == len(data) - 4:  # as Arrow before 0.15 wrote them
        begin = 4
    else:
        return
    try:
        compressed = _is_compressed(data, begin)
    except (struct.error, IndexError):
        return  # no message that Arrow would take
    if compressed:
        raise ValueError("compressed values, which a part does not have")


def _is_compressed(data: _Data, begin: int) -> bool:
    message = _follow(data, begin)
    kind, header, version = (_field(data, message, field) for field in (_KIND, _HEADER, _VERSION))
    if not kind or not header or data[kind] not in (_DICTIONARY, _BATCH):
        return False
    batch = _follow(data, header)
    if data[kind] == _DICTIONARY:
        inner = _field(data, batch, _DATA)
        if not inner:
            return False
        batch = _follow(data, inner)
    # Before version 5 the compression stood in the metadata that any writer may add to.
    is_old = not version or struct.unpack_from("<h", data, version)[0] < _V5
    return _field(data, batch, _COMPRESSION) > 0 or (is_old and _field(data, message, _CUSTOM) > 0)


def _field(data: _Data, table: int, field: int) -> int:
    """Return where a field of a table is, 0 where the table has none."""
    fields = table - _int32(data, table)
    at = 4 + 2 * field
    if at + 2 > struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", data, fields + at)[0]
    return table + int(offset) if offset else 0


def _follow(data: _Data, at: int) -> int:
    """Return where an offset leads."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _int32(data: _Data, at: int) -> int:
    return int(struct.unpack_from("<i", data, at)[0])
