"""The reader of part files (docs/format.md, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format.catalog import Part
from recckpt.sparse.files.arrow_format import (
    DTYPE_KEY,
    ID,
    TABLE,
    Messages,
    check_message,
    column_buffer,
    column_items,
    part_schema,
)
from recckpt.storage import NOT_READABLE, missing
from recckpt.storage.base import Files
from recckpt.storage.read_again import read_twice
from recckpt.types import SlotSpec

_T = TypeVar("_T")
_EXTENSION = b"ARROW:extension:name"  # of Arrow


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
        storage, directory: where the checkpoint lies.
        part: catalog entry of the file.
        slots: the slots that its tables have, by the manifest.
        columns: names of the slots to read, None for all; the ids are always read.
        mapped: the bytes of the file, where the caller has them.

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
        self.path, self.part = f"{directory}/{part.file}", part
        chosen = None if columns is None else set(columns)
        self._specs = {spec.name: spec for spec in slots if chosen is None or spec.name in chosen}
        self._storage, self._slots, self._own_map = storage, slots, mapped
        self._twice(self._open)

    def _twice(self, read: Callable[[], _T], reopen: Callable[[], object] = lambda: None) -> _T:
        """Read, and once more where a file that is not local is damaged; bytes of the caller are for it to read."""
        return read() if self._own_map is not None else read_twice(self._storage, self.path, read, reopen)

    def _open(self) -> None:
        storage, part = self._storage, self.part
        try:
            mapped = storage.map(self.path) if self._own_map is None else self._own_map
            n_bytes = len(mapped) if mapped is not None else storage.size(self.path)
        except NOT_READABLE as error:
            raise missing(self.path, error, f"{part.n_bytes} bytes") from error
        if n_bytes != part.n_bytes:
            raise self._corrupt("its size", f"{n_bytes} bytes", f"{part.n_bytes} bytes")
        self.mapped = mapped
        self._watched = None if mapped is not None else _WatchedFile(storage.open(self.path))
        self._file = None if mapped is not None else pa.PythonFile(self._watched, "r")
        self._messages: Messages | None = None
        self._arrow = self._opened(pa.BufferReader(mapped) if self._file is None else self._file, self._slots)
        self._names_checked = False

    def source(self) -> pa.Buffer | pa.NativeFile:
        """Return what Arrow reads the part from by itself, without checks, but for batches that are compressed."""
        self.check_messages()
        return pa.py_buffer(self.mapped) if self._file is None else self._file

    def check_messages(self) -> None:
        """Refuse a part with batches that are compressed; of one that is not mapped, each when it is read."""
        try:
            if self._messages is not None:
                self._messages.check_all()
        except ValueError as error:
            raise self._corrupt("", f"invalid Arrow ({error})", "record batches") from error

    def read(self, number: int) -> Mapping[str, pa.Array]:
        """Return id and slots of a batch, each checked: name -> Arrow array."""
        batch = self.checked(number, (TABLE, ID, *self._specs))
        return {name: batch.column(name) for name in (ID, *self._specs)}

    def checked(self, number: int, names: Iterable[str]) -> pa.RecordBatch:
        """Return a batch, of which these columns are checked."""
        return self._twice(partial(self._checked, number, tuple(names)), self._open)

    def _checked(self, number: int, names: Iterable[str]) -> pa.RecordBatch:
        batch = self.unchecked(number)
        for name in names:
            problem = self.column_problem(number, batch, name)
            if problem:
                raise problem
        return batch

    def unchecked(self, number: int) -> pa.RecordBatch:
        """Return a batch of the right number of rows whose values are not checked yet."""
        try:
            if self._messages is not None:
                self._messages.check_batch(number)
            batch = self._arrow.get_batch(number)
            batch.validate()
        except (pa.ArrowException, OSError, ValueError) as error:
            self._raise_storage_error()
            raise self.damage(number, f"invalid Arrow ({error})", "a record batch") from error
        rows = self.part.batches[number].rows
        if batch.num_rows != rows:
            raise self.damage(number, f"{batch.num_rows} rows", f"{rows} rows")
        return batch

    def column_problem(self, number: int, batch: pa.RecordBatch, name: str) -> CorruptCheckpointError | None:
        """Return what is wrong with a column of a batch: nulls, rows of another table, values of another checksum."""
        array, where = batch.column(name), f"{self._place(number)}, column {name!r}"
        nulls = array.null_count or column_items(array).null_count
        if nulls:
            return self._corrupt(where, f"{nulls} nulls", "no nulls")
        if name == TABLE and (misnamed := self._misnamed(number, array)):
            return self._corrupt(where, *misnamed)
        digest, expected = xxhash.xxh3_64_intdigest(column_buffer(array)), self.part.batches[number].xxh3[name]
        if digest != expected:
            return self._corrupt(where, f"checksum {digest:016x}", f"{expected:016x}")
        return None

    def _misnamed(self, number: int, column: pa.DictionaryArray) -> tuple[str, str] | None:
        """Return (found, expected) where the column by which other readers tell tables apart names another table."""
        tables = list(self.part.tables)
        if not self._names_checked:  # the batches of a file share one dictionary
            try:
                column.dictionary.validate(full=True)
                names = column.dictionary.to_pylist()
            except (pa.ArrowException, ValueError) as error:
                return f"invalid names ({error})", str(tables)
            if names != tables:
                return f"the tables {names}", str(tables)
            self._names_checked = True
        wrong = np.frombuffer(column_buffer(column), np.int16) != tables.index(self.part.batches[number].table)
        return (f"row {np.argmax(wrong)} of another table", "rows of this table only") if wrong.any() else None

    def check_frame(self) -> None:
        """Check the bytes that are not column values; needs all columns and a file that lies in memory."""
        frame, done = xxhash.xxh3_64(), 0
        whole = pa.py_buffer(self.mapped)
        for number in range(len(self.part.batches)):
            batch = self.unchecked(number)
            for name in batch.schema.names:
                values = column_buffer(batch.column(name))
                begin = values.address - whole.address
                if not done <= begin <= begin + values.size <= whole.size:
                    where = f"{self._place(number)}, column {name!r}"
                    raise self._corrupt(where, "values out of order", "values in the order of the schema")
                frame.update(whole.slice(done, begin - done))
                done = begin + values.size
        frame.update(whole.slice(done))
        if frame.intdigest() != self.part.frame:
            raise self._corrupt("its frame", f"checksum {frame.intdigest():016x}", f"{self.part.frame:016x}")

    def _opened(self, source: Any, slots: Sequence[SlotSpec]) -> Any:
        try:
            reader = pa.ipc.open_file(source)
            self._check_schema(reader.schema, slots)
            if reader.num_record_batches != len(self.part.batches):
                count, expected = reader.num_record_batches, len(self.part.batches)
                raise self._corrupt("", f"{count} batches", f"{expected} batches")
            names = [TABLE, ID, *self._specs]
            if self.mapped is None and len(names) < len(reader.schema):  # of a map Arrow would copy what it includes
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

    def _check_schema(self, found: pa.Schema, slots: Sequence[SlotSpec]) -> None:
        expected = part_schema(slots)
        if sorted(found.names) != sorted(expected.names):
            raise self._corrupt("its columns", str(found.names), str(expected.names))
        for field in expected:
            other = found.field(field.name)
            if _EXTENSION in (other.metadata or {}):  # of a type that is not registered here
                kind = other.metadata[_EXTENSION].decode(errors="replace")
                raise self._corrupt(f"column {field.name!r}", f"the extension {kind!r:.200}", str(field.type))
            if other.type != field.type or (other.metadata or {}).get(DTYPE_KEY) != (field.metadata or {}).get(
                DTYPE_KEY
            ):
                raise self._corrupt(f"column {field.name!r}", str(other.type), str(field.type))

    def damage(self, number: int, found: str, expected: str) -> CorruptCheckpointError:
        """Return the error for a batch that is not what was written."""
        return self._corrupt(self._place(number), found, expected)

    def _place(self, number: int) -> str:
        return f"batch {number} (table {self.part.batches[number].table!r})"

    def _corrupt(self, where: str, found: str, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(self.path, where, found=found, expected=expected)
