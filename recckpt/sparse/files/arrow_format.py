"""The Arrow layout of a part file (docs/format.md, section 5): its columns and their byte positions.

The flatbuffer metadata of a batch is never interpreted: it could declare compressed values, and a file of 100 kB could
then ask for gigabytes before any check. Instead, the body must have the length that the numbers of rows and slots
imply, and values are read at the offsets that follow from those numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.format.catalog import Part
from recckpt.format.tensor_index import widened
from recckpt.types import SlotSpec

TABLE, ID = "table", "id"  # column names; part of the file format
DTYPE_KEY = b"recckpt.dtype"  # metadata key of a column; part of the file format
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
Read = Callable[[int, int], bytes | memoryview]  # reads bytes [begin, end) of a file; stops at the end of the file
_Bytes = TypeVar("_Bytes", int, npt.NDArray[np.int64])
FIRST = 8  # offset of the first message, behind the magic bytes
PREFIX = struct.Struct("<ii")  # begins each message: -1, and the length of the message's metadata


def slot_field(slot: SlotSpec) -> pa.Field:
    metadata = {DTYPE_KEY: b"bfloat16"} if slot.dtype == "bfloat16" else None
    return pa.field(slot.name, _column_type(slot), nullable=False, metadata=metadata)


def _column_type(slot: SlotSpec) -> pa.DataType:
    item = _ARROW[slot.dtype]
    if not slot.shape:
        return item
    return pa.list_(item, slot.shape[0]) if len(slot.shape) == 1 else pa.fixed_shape_tensor(item, slot.shape)


def part_schema(slots: Sequence[SlotSpec]) -> pa.Schema:
    head = [pa.field(TABLE, _TABLE_TYPE, nullable=False), pa.field(ID, pa.int64(), nullable=False)]
    return pa.schema(head + [slot_field(slot) for slot in slots])


def names_array(ends: bytes, names: bytes) -> pa.Array:
    """Return joined names as an Arrow array, without ``pa.array``, which imports pandas if pandas is installed."""
    return pa.Array.from_buffers(pa.utf8(), len(ends) // 4 - 1, [None, pa.py_buffer(ends), pa.py_buffer(names)])


def column_array(spec: SlotSpec, buffer: pa.Buffer, n_rows: int) -> pa.Array:
    values = pa.Array.from_buffers(_ARROW[spec.dtype], n_rows * math.prod(spec.shape), [None, buffer])
    if not spec.shape:
        return values
    rows = pa.FixedSizeListArray.from_arrays(values, math.prod(spec.shape))
    return rows if len(spec.shape) == 1 else pa.ExtensionArray.from_storage(_column_type(spec), rows)


def column_buffer(array: pa.Array) -> pa.Buffer:
    values = array.storage if isinstance(array, pa.ExtensionArray) else array
    if isinstance(values, pa.FixedSizeListArray):
        width = values.type.list_size
        values = values.values.slice(values.offset * width, len(values) * width)  # flatten() imports pyarrow.compute
    elif isinstance(values, pa.DictionaryArray):
        values = values.indices
    item = values.type.bit_width // 8
    return values.buffers()[1].slice(values.offset * item, len(values) * item)


def ids_in(columns: Mapping[str, pa.Array] | pa.RecordBatch) -> npt.NDArray[np.int64]:
    return np.frombuffer(column_buffer(columns[ID]), np.int64)


def stored_dtype(slot: SlotSpec) -> np.dtype[Any]:
    """Return the dtype of a slot's values in files; bfloat16 is stored as its bits in uint16."""
    return np.dtype("uint16" if slot.dtype == "bfloat16" else slot.dtype)


def column_values(array: pa.Array, slot: SlotSpec) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = np.frombuffer(column_buffer(array), stored_dtype(slot))
    return (widened(values) if slot.dtype == "bfloat16" else values).reshape(len(array), *slot.shape)


class PartLayout:
    """Byte positions of the columns of each batch in a part: a sequence of messages (schema, table names, batches).

    The metadata of every batch has the same length, so the position of a batch follows without reading the others.
    ``widths`` maps columns, in file order, to bytes per row. Raises ValueError if the file has no such messages.
    """

    def __init__(self, read: Read, widths: Mapping[str, int], part: Part) -> None:
        self._read, self._widths, self._part = read, widths, part
        self._names = b"".join(each.ljust(padded(len(each)), b"\0") for each in part.names)
        self._names_at = _body_of(read, _body_of(read, FIRST))
        self._first = self._names_at + len(self._names)
        if (n_bytes := _description_bytes(read, self._first)) < 0:
            raise ValueError(f"a dictionary of other than {len(self._names)} bytes: compressed, or of other tables")
        self._ends = part.batch_ends(tuple(widths.values()), PREFIX.size + n_bytes)

    def other_names(self) -> list[str] | None:
        body = bytes(self._read(self._names_at, self._first))
        return None if body == self._names else names_in(body, len(self._part.tables))

    def columns(self, number: int) -> Iterator[tuple[str, int, int]]:
        n_rows = self._part.batches[number].rows
        body = self.end(number) - _body_bytes(self._widths, n_rows)
        for name, begin, end in _places(self._widths, n_rows):
            yield name, body + begin, body + end

    def check_length(self, number: int, read: Read) -> None:
        """Raise ValueError unless another message or the end marker follows the batch; ``read`` must reach it."""
        if _description_bytes(read, self.end(number)) < 0:
            n_bytes = _body_bytes(self._widths, self._part.batches[number].rows)
            raise ValueError(f"a body of other than {n_bytes} bytes: compressed, with nulls, or with other rows")

    def end(self, number: int) -> int:
        return self._first + int(self._ends[number])


def unlisted_batches(data: memoryview) -> Iterator[tuple[list[str], dict[str, memoryview]]]:
    """Yield (table names, column -> values) of a part without a catalog; refuse bodies that fit no number of rows."""
    reader = pa.ipc.open_file(pa.py_buffer(data))
    widths, names = {field.name: _width(field.type) for field in reader.schema}, list[str]()
    if missing := {TABLE, ID} - widths.keys():
        raise ValueError(f"no column {sorted(missing)}")
    source, n_left = pa.BufferReader(pa.py_buffer(data)[FIRST:]), reader.num_record_batches
    while n_left:
        message = pa.ipc.read_message(source)  # pyarrow does not interpret the body here
        body = memoryview(message.body)
        if message.type == "dictionary":
            names = names_in(body)
        elif message.type == "record batch":
            n_left -= 1
            yield names, {name: body[begin:end] for name, begin, end in _places(widths, _count_of_rows(body, widths))}


def _count_of_rows(body: memoryview, widths: Mapping[str, int]) -> int:
    most = len(body) // sum(widths.values())
    for n_rows in range(most, max(0, most - 8 * len(widths)) - 1, -1):
        if _body_bytes(widths, n_rows) == len(body):
            return n_rows
    raise ValueError(f"a body of {len(body)} bytes, which fits no number of rows: compressed, or with nulls")


def _places(widths: Mapping[str, int], n_rows: int) -> Iterator[tuple[str, int, int]]:
    at = 0
    for name, width in widths.items():
        yield name, at, at + width * n_rows
        at += padded(width * n_rows)


def _body_bytes(widths: Mapping[str, int], n_rows: int) -> int:
    return sum(padded(width * n_rows) for width in widths.values())


def _width(kind: pa.DataType) -> int:
    kind = getattr(kind, "storage_type", kind)
    if isinstance(kind, pa.FixedSizeListType):
        return int(kind.list_size) * _width(kind.value_type)
    return int(kind.bit_width) // 8


def names_in(body: bytes | memoryview, count: int | None = None) -> list[str]:
    """Return ``count`` names of a dictionary (default: the count that its length implies); replace invalid UTF-8."""
    ends = np.frombuffer(body, "<i4", len(body) // 4 if count is None else count + 1).tolist()
    if count is None:
        fits = (n for n, end in enumerate(ends) if padded(4 * (n + 1)) + padded(end) == len(body))
        count = next(fits, None)
        if count is None:
            raise ValueError(f"a dictionary of table names with {len(body)} bytes: compressed, or torn")
    ends, names = ends[: count + 1], bytes(body[padded(4 * (count + 1)) :])
    return [names[begin:end].decode(errors="replace") for begin, end in pairwise(ends)]


def _body_of(read: Read, at: int) -> int:
    if (n_bytes := _description_bytes(read, at)) <= 0:
        raise ValueError(f"no message at byte {at}")
    return at + PREFIX.size + n_bytes


def _description_bytes(read: Read, at: int) -> int:
    """Return the metadata length of the message at ``at``: 0 at the end marker, -1 if no message begins there."""
    prefix = read(at, at + PREFIX.size)
    mark, n_bytes = PREFIX.unpack(prefix) if len(prefix) == PREFIX.size else (0, 0)
    return int(n_bytes) if mark == -1 else -1


def padded(n_bytes: _Bytes) -> _Bytes:
    return -(-n_bytes // 8) * 8
