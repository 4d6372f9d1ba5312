"""Columns to Arrow and back, and the reader of part files (docs/format.md, section 5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format.catalog import Part
from recckpt.sparse.files.compression_check import Messages, check_message
from recckpt.storage import missing
from recckpt.storage.base import Files
from recckpt.types import SlotSpec

TABLE, ID = "table", "id"  # part of the format
_DTYPE_KEY = b"recckpt.dtype"  # part of the format
_EXTENSION = b"ARROW:extension:name"  # of Arrow
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
    metadata = {_DTYPE_KEY: b"bfloat16"} if slot.dtype == "bfloat16" else None
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
    values = _values(array)
    item = values.type.bit_width // 8
    return values.buffers()[1].slice(values.offset * item, len(values) * item)


def column_values(array: pa.Array, slot: SlotSpec) -> npt.NDArray[Any]:
    """Return a column as a numpy array of shape (rows, *slot_shape), without a copy; bfloat16 as float32, with one."""
    dtype = np.dtype("uint16" if slot.dtype == "bfloat16" else slot.dtype)
    values: npt.NDArray[Any] = np.frombuffer(column_buffer(array), dtype)
    if slot.dtype == "bfloat16":
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.reshape(len(array), *slot.shape)


def _values(array: pa.Array) -> pa.Array:
    """Return the primitive array in a column."""
    rows = array.storage if isinstance(array, pa.ExtensionArray) else array
    if isinstance(rows, pa.FixedSizeListArray):
        width = rows.type.list_size
        return rows.values.slice(rows.offset * width, len(rows) * width)  # flatten() imports pyarrow.compute
    return rows.indices if isinstance(rows, pa.DictionaryArray) else rows


class _WatchedFile:
    """The file object that Arrow reads from; remembers the error of the storage, of which Arrow makes another."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            self.error = error
            raise
        check_message(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


class PartReader:
    """Reads one part and checks every byte that it gives out against the catalog. Not thread-safe.

    Args:
        storage: where the checkpoint lies.
        directory: the checkpoint's directory in it.
        part: catalog entry of the file.
        slots: the slots that its tables have, by the manifest.
        columns: names of the slots to read, None for all; the ids are always read.
        mapped: the bytes of the file, where the caller has them; a memory map of it otherwise.

    Raises:
        CorruptCheckpointError: the file is missing, of another size, not Arrow, or of another schema.
    """

    def __init__(
        self,
        storage: Files,
        directory: str,
        part: Part,
        slots: Sequence[SlotSpec],
        columns: Iterable[str] | None = None,
        *,
        mapped: memoryview | None = None,
    ) -> None:
        self.path, self._part = f"{directory}/{part.file}", part
        wanted = None if columns is None else set(columns)
        self._specs = {spec.name: spec for spec in slots if wanted is None or spec.name in wanted}
        try:
            mapped = storage.map(self.path) if mapped is None else mapped
            found = len(mapped) if mapped is not None else storage.size(self.path)
        except FileNotFoundError as error:
            raise missing(self.path, error, f"{part.n_bytes} bytes") from error
        if found != part.n_bytes:
            raise self._corrupt("its size", f"{found} bytes", f"{part.n_bytes} bytes")
        self.mapped = mapped
        self._watched = None if mapped is not None else _WatchedFile(storage.open(self.path))
        source = pa.PythonFile(self._watched, "r") if mapped is None else pa.BufferReader(mapped)
        self._messages: Messages | None = None
        self._arrow = self._opened(source, slots)
        self._names_checked = False

    def read(self, number: int) -> Mapping[str, pa.Array]:
        """Return id and slots of a batch, each checked: name -> Arrow array."""
        found = self.unchecked(number)
        for name in (ID, *self._specs):
            problem = self.column_problem(number, found, name)
            if problem:
                raise problem
        self._check_table(number, found.column(TABLE))
        return {name: found.column(name) for name in (ID, *self._specs)}

    def unchecked(self, number: int) -> pa.RecordBatch:
        """Return a batch of the right number of rows whose values nobody has checked yet."""
        try:
            if self._messages is not None:
                self._messages.check_batch(number)
            found = self._arrow.get_batch(number)
            found.validate()
        except (pa.ArrowException, OSError, ValueError) as error:
            self._raise_storage_error()
            raise self._corrupt(self._place(number), f"invalid Arrow ({error})", "a record batch") from error
        rows = self._part.batches[number].rows
        if found.num_rows != rows:
            raise self._corrupt(self._place(number), f"{found.num_rows} rows", f"{rows} rows")
        return found

    def column_problem(self, number: int, found: pa.RecordBatch, name: str) -> CorruptCheckpointError | None:
        """Return what is wrong with a column of a batch: nulls, or values of another checksum."""
        array, where = found.column(name), f"{self._place(number)}, column {name!r}"
        nulls = array.null_count or _values(array).null_count
        if nulls:
            return self._corrupt(where, f"{nulls} nulls", "no nulls")
        digest, expected = xxhash.xxh3_64_intdigest(column_buffer(array)), self._part.batches[number].xxh3[name]
        if digest != expected:
            return self._corrupt(where, f"checksum {digest:016x}", f"{expected:016x}")
        return None

    def read_all(self) -> Iterator[Mapping[str, pa.Array]]:
        """Yield all batches."""
        for number in range(len(self._part.batches)):
            yield self.read(number)

    def check_frame(self) -> None:
        """Check the bytes that are no column values; with those, every byte of the file has been looked at.

        Needs all columns and a file that lies in memory.

        Raises:
            CorruptCheckpointError: they are not what was written.
        """
        frame, done = xxhash.xxh3_64(), 0
        whole = pa.py_buffer(self.mapped)
        for number in range(len(self._part.batches)):
            found = self.unchecked(number)
            for name in found.schema.names:
                values = column_buffer(found.column(name))
                begin = values.address - whole.address
                if not done <= begin <= begin + values.size <= whole.size:
                    where = f"{self._place(number)}, column {name!r}"
                    raise self._corrupt(where, "values out of order", "values in the order of the schema")
                frame.update(whole.slice(done, begin - done))
                done = begin + values.size
        frame.update(whole.slice(done))
        if frame.intdigest() != self._part.frame:
            raise self._corrupt("its frame", f"checksum {frame.intdigest():016x}", f"{self._part.frame:016x}")

    def _opened(self, source: Any, slots: Sequence[SlotSpec]) -> Any:
        try:
            reader = pa.ipc.open_file(source)
            self._check_schema(reader.schema, slots)
            if reader.num_record_batches != len(self._part.batches):
                count, expected = reader.num_record_batches, len(self._part.batches)
                raise self._corrupt("", f"{count} batches", f"{expected} batches")
            names = [TABLE, ID, *self._specs]
            if len(names) < len(reader.schema):
                included = [reader.schema.get_field_index(name) for name in names]
                options = pa.ipc.IpcReadOptions(included_fields=included)
                source.seek(0)
                reader = pa.ipc.open_file(source, options=options)
            if self.mapped is not None:
                self._messages = Messages(self.mapped)
                self._messages.check_dictionaries()
        except (pa.ArrowException, OSError, ValueError) as error:
            self._raise_storage_error()
            raise self._corrupt("", f"no Arrow file ({error})", "an Arrow IPC file") from error
        return reader

    def _raise_storage_error(self) -> None:
        """Raise what the storage raised while Arrow read from it: a lost connection is no damage."""
        if self._watched is not None and self._watched.error is not None:
            raise self._watched.error

    def _check_table(self, number: int, column: pa.DictionaryArray) -> None:
        """Check the column by which other readers tell tables apart: one value all through, so it needs no checksum."""
        if not self._names_checked:  # the batches of a file share one dictionary
            self._check_names(number, column.dictionary)
            self._names_checked = True
        expected = self._part.tables.index(self._part.batches[number].table)
        wrong = np.frombuffer(column_buffer(column), np.int16) != expected
        if column.null_count or wrong.any():
            where = f"{self._place(number)}, column 'table'"
            found = "nulls" if column.null_count else f"row {np.argmax(wrong)} of another table"
            raise self._corrupt(where, found, "rows of this table only")

    def _check_names(self, number: int, names: pa.StringArray) -> None:
        where, expected = f"{self._place(number)}, column 'table'", list(self._part.tables)
        try:
            names.validate(full=True)
            found = names.to_pylist()
        except (pa.ArrowException, ValueError) as error:
            raise self._corrupt(where, f"invalid names ({error})", str(expected)) from error
        if found != expected:
            raise self._corrupt(where, f"the tables {found}", str(expected))

    def _check_schema(self, found: pa.Schema, slots: Sequence[SlotSpec]) -> None:
        expected = part_schema(slots)
        if sorted(found.names) != sorted(expected.names):
            raise self._corrupt("its columns", str(found.names), str(expected.names))
        for field in expected:
            other = found.field(field.name)
            if _EXTENSION in (other.metadata or {}):  # of a type that is not registered here
                kind = other.metadata[_EXTENSION].decode(errors="replace")
                raise self._corrupt(f"column {field.name!r}", f"the extension {kind!r:.200}", str(field.type))
            if other.type != field.type or (other.metadata or {}).get(_DTYPE_KEY) != (field.metadata or {}).get(
                _DTYPE_KEY
            ):
                raise self._corrupt(f"column {field.name!r}", str(other.type), str(field.type))

    def _place(self, number: int) -> str:
        return f"batch {number} (table {self._part.batches[number].table!r})"

    def _corrupt(self, where: str, found: str, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(self.path, where, found=found, expected=expected)
