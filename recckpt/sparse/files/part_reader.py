"""Readers of part files (docs/format.md, section 5): of one part, one damaged part, or all parts of a link."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeVar

import numpy as np
import pyarrow as pa
import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format.catalog import Part
from recckpt.sparse.files.arrow_format import (
    DTYPE_KEY,
    FIRST,
    ID,
    ID_SPEC,
    PREFIX,
    TABLE,
    PartLayout,
    Read,
    column_array,
    padded,
    part_schema,
)
from recckpt.storage import NOT_READABLE, missing
from recckpt.storage.base import Files
from recckpt.storage.retry import read_twice
from recckpt.types import SlotSpec

_T = TypeVar("_T")
Values = bytes | memoryview  # the values of one column of a batch, byte for byte as in the file
_EXTENSION = b"ARROW:extension:name"
READ_BYTES = 16 << 20  # about how many bytes one request to the storage asks for, unless one batch is larger
_GAP_BYTES = 64 << 10  # ranges with a smaller gap between them are read in one request
_MOST_OF_SCHEMA = 1 << 20  # bytes
_HEAD_BYTES = 512  # enough for the Arrow metadata of the table names and of the first batch


def runs_of(items: Iterable[_T], most: int, size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Yield lists of consecutive items, of at most ``most`` in total; a larger item is a list of its own."""
    some, total = list[_T](), 0
    for item in items:
        total += size(item)
        if some and total > most:
            yield some
            some, total = [], size(item)
        some.append(item)
    if some:
        yield some


class _PartBytes:
    """The bytes of a part: a memory map, or ranges that are read on demand, of which the first is kept.

    Must not refer to a reader: the reference cycle would keep the part mapped until a garbage collection.
    """

    def __init__(
        self, storage: Files, path: str, mapped: memoryview | None, part: Part, slots: Sequence[SlotSpec]
    ) -> None:
        self._storage, self._path, self._mapped = storage, path, mapped
        self._head = b""
        if mapped is None:
            n_bytes = FIRST + part_schema(slots).serialize().size + sum(padded(len(each)) for each in part.names)
            self._head = storage.read(path, n_bytes + _HEAD_BYTES)

    def __call__(self, begin: int, end: int) -> Values:
        if self._mapped is not None:
            return self._mapped[begin:end]
        return self._head[begin:end] if end <= len(self._head) else self._storage.read(self._path, end - begin, begin)

    def spanning(self, ranges: Iterable[tuple[int, int]]) -> Read:
        """Return a reader for some ranges, after reading all of them at once; close ranges take one request."""
        if self._mapped is not None:
            return self
        spans = list[tuple[int, int]]()
        for begin, end in sorted(ranges):
            is_close = spans and begin - spans[-1][1] <= _GAP_BYTES
            first, last = spans.pop() if is_close else (begin, end)
            spans.append((first, max(last, end)))
        pieces = [(begin, memoryview(self(begin, end))) for begin, end in spans]

        def read(begin: int, end: int) -> Values:
            at, data = pieces[bisect_right(pieces, begin, key=itemgetter(0)) - 1]
            return data[begin - at : end - at]

        return read


class PartReader:
    """Reads one part and checks all bytes that it returns against the catalog. Thread-safe.

    If the file is not mapped, its head is read once, and batches with as few requests as possible. Damage raises
    CorruptCheckpointError.

    Args:
        storage, directory: the checkpoint's storage and directory.
        part: catalog entry of the file.
        slots: the slots that the manifest lists for the part's tables.
        columns: slots to read besides the ids; None for all.
        mapped: the bytes of the file, if the caller has them.
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
        self.specs = tuple(spec for spec in slots if chosen is None or spec.name in chosen)
        self._storage, self._slots, self._own_map = storage, slots, mapped
        self._read_names = (TABLE, ID, *(spec.name for spec in self.specs))
        self._names_checked = False
        self._twice(self._open)

    def _twice(self, read: Callable[[], _T], reopen: Callable[[], object] = lambda: None) -> _T:
        """Call ``read``; if a remote file is damaged, reopen and retry once. The caller's own bytes are read once."""
        return read() if self._own_map is not None else read_twice(self._storage, self.path, read, reopen)

    def _open(self) -> None:
        storage, part = self._storage, self.part
        try:
            mapped = storage.map(self.path) if self._own_map is None else self._own_map
            bytes_in = _PartBytes(storage, self.path, mapped, part, self._slots)
        except NOT_READABLE as error:
            raise missing(self.path, error, f"{part.n_bytes} bytes") from error
        if mapped is not None:
            self._check_size(len(mapped))
        self._bytes, self.mapped = bytes_in, mapped
        self._layout = self._laid_out(self._column_names())

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes != self.part.n_bytes:
            raise self._corrupt("its size", f"{n_bytes} bytes", f"{self.part.n_bytes} bytes")

    def check_lengths(self) -> None:
        """Refuse a part with a batch length that does not fit its rows, or, if unmapped, with a wrong file size."""
        if self.mapped is None:
            self._check_size(self._storage.size(self.path))
            return
        for number in range(len(self.part.batches)):
            self._check_length(number, self._bytes)

    def batches(self, numbers: Iterable[int]) -> Iterator[tuple[int, Mapping[str, Values]]]:
        row_bytes = 10 + sum(spec.row_bytes for spec in self.specs)
        for some in runs_of(numbers, READ_BYTES, lambda number: self.part.batches[number].rows * row_bytes):
            span = self._span(some)
            for number in some:
                yield number, self.read(number, None, span)

    def read(self, number: int, names: Iterable[str] | None = None, span: Read | None = None) -> Mapping[str, Values]:
        """Return the values of all requested columns, after checking the columns in ``names``; None checks all."""
        checked = self._read_names if names is None else tuple(names)
        first = [span] if span is not None else []

        def read() -> Mapping[str, Values]:
            columns = self.unchecked(number, first.pop() if first else None)
            for name in checked:
                if problem := self.column_problem(number, columns[name], name):
                    raise problem
            return columns

        return self._twice(read, self._open)

    def unchecked(self, number: int, span: Read | None = None) -> Mapping[str, Values]:
        """Return the values of all requested columns, unchecked."""
        columns, bytes_in = dict[str, Values](), span or self._span([number])
        self._check_length(number, bytes_in)
        for name, begin, end in self._layout.columns(number):
            if name not in self._read_names:
                continue
            columns[name] = values = bytes_in(begin, end)
            if len(values) != end - begin:
                raise self.damage(number, f"{len(values)} bytes of {name!r}", f"{end - begin} bytes")
        return columns

    def _span(self, numbers: Iterable[int]) -> Read:
        columns = (column for number in numbers for column in self._layout.columns(number))
        every = [(begin, end) for name, begin, end in columns if name in self._read_names]
        ends = [self._layout.end(number) for number in numbers]
        return self._bytes.spanning([*every, *((end, end + PREFIX.size) for end in ends)])

    def arrays(self, number: int, columns: Mapping[str, Values]) -> dict[str, pa.Array]:
        n_rows, specs = self.part.batches[number].rows, (ID_SPEC, *self.specs)
        return {spec.name: column_array(spec, pa.py_buffer(columns[spec.name]), n_rows) for spec in specs}

    def _check_length(self, number: int, bytes_in: Read) -> None:
        try:
            self._layout.check_length(number, bytes_in)
        except ValueError as error:
            raise self.damage(number, str(error), "the rows that the catalog lists") from error

    def column_problem(self, number: int, values: Values, name: str) -> CorruptCheckpointError | None:
        if name == TABLE:  # other readers tell tables apart by this column
            part, where = self.part, f", column {name!r}"
            if not self._names_checked:  # the batches of a file share one dictionary
                if (names := self._layout.other_names()) is not None:
                    return self.damage(number, f"the tables {names}", str(list(part.tables)), where)
                self._names_checked = True
            wrong = np.frombuffer(values, np.int16) != part.numbers[part.batches[number].table]
            if wrong.any():
                return self.damage(number, f"row {np.argmax(wrong)} of another table", "rows of this table only", where)
        return self.checksum_problem(number, name, xxhash.xxh3_64_intdigest(values))

    def checksum_problem(self, number: int, name: str, digest: int) -> CorruptCheckpointError | None:
        expected = self.part.batches[number].xxh3[name]
        if digest != expected:
            return self.damage(number, f"checksum {digest:016x}", f"{expected:016x}", f", column {name!r}")
        return None

    def check_frame(self) -> None:
        """Check the bytes between the values if the file is mapped; otherwise they would have to be read once more."""
        if self.mapped is not None:
            self._twice(self._check_frame, self._open)

    def _check_frame(self) -> None:
        frame, done = xxhash.xxh3_64(), 0
        assert self.mapped is not None
        for number in range(len(self.part.batches)):
            for _, begin, end in self._layout.columns(number):
                frame.update(self.mapped[done:begin])
                done = end
        frame.update(self.mapped[done:])
        if frame.intdigest() != self.part.frame:
            raise self._corrupt("its frame", f"checksum {frame.intdigest():016x}", f"{self.part.frame:016x}")

    def _column_names(self) -> list[str]:
        """Return the columns in file order, after checking the schema and, if the file is mapped, the footer."""
        try:
            if self.mapped is None:
                found = pa.ipc.read_schema(pa.py_buffer(self._schema_bytes()))
            else:
                reader = pa.ipc.open_file(pa.BufferReader(self.mapped))
                found, count, n_batches = reader.schema, reader.num_record_batches, len(self.part.batches)
                if count != n_batches:
                    raise self._corrupt("", f"{count} batches", f"{n_batches} batches")
            expected = part_schema(self._slots)
            if found.equals(expected, check_metadata=True):
                return list(found.names)
            if sorted(found.names) != sorted(expected.names):
                raise self._corrupt("its columns", str(found.names), str(expected.names))
            for column in expected:
                where, other = f"column {column.name!r}", found.field(column.name)
                metadata, of_column = other.metadata or {}, column.metadata or {}
                if _EXTENSION in metadata:  # pyarrow does not know this extension type
                    kind = metadata[_EXTENSION].decode(errors="replace")
                    raise self._corrupt(where, f"the extension {kind!r:.200}", str(column.type))
                if other.type != column.type or metadata.get(DTYPE_KEY) != of_column.get(DTYPE_KEY):
                    raise self._corrupt(where, str(other.type), str(column.type))
            return list(found.names)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._corrupt("", f"not an Arrow file ({error})", "an Arrow IPC file") from error

    def _schema_bytes(self) -> Values:
        n_bytes = int.from_bytes(self._bytes(FIRST + 4, FIRST + PREFIX.size), "little")
        return self._bytes(FIRST, FIRST + PREFIX.size + min(n_bytes, _MOST_OF_SCHEMA))

    def _laid_out(self, names: Iterable[str]) -> PartLayout:
        of_slots = {slot.name: slot.row_bytes for slot in self._slots}
        widths = {TABLE: 2, ID: 8, **of_slots}
        try:
            return PartLayout(self._bytes, {name: widths[name] for name in names}, self.part)
        except ValueError as error:
            raise self._corrupt("", str(error), "a schema, the names of the tables, and batches") from error

    def damage(self, number: int, found: str, expected: str, where: str = "") -> CorruptCheckpointError:
        return self._corrupt(f"batch {number} (table {self.part.batches[number].table!r}){where}", found, expected)

    def _corrupt(self, where: str, found: str, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(self.path, where, found=found, expected=expected)


class DamagedPart(PartReader):
    """Reads a part whose size, schema, footer or end may be wrong; batches are located by the catalog alone.

    The file is not mapped: reading an unreadable disk block then raises an error; in a map it would kill the process.
    """

    def _open(self) -> None:
        try:
            self._bytes, self.mapped = _PartBytes(self._storage, self.path, None, self.part, self._slots), None
        except NOT_READABLE as error:
            raise missing(self.path, error, f"{self.part.n_bytes} bytes") from error
        names = [TABLE, ID, *(slot.name for slot in self._slots)]
        try:
            in_file = list(pa.ipc.read_schema(pa.py_buffer(self._schema_bytes())).names)
        except (pa.ArrowException, OSError, ValueError):  # unreadable schema: use the manifest's order of columns
            in_file = []
        self._layout = self._laid_out(in_file if sorted(in_file) == sorted(names) else names)

    def _check_length(self, number: int, bytes_in: Read) -> None:
        """Check nothing here: the checksums of the columns find wrong lengths, too."""


@dataclass(frozen=True)
class LinkBatches:
    """The parts of a link that may have rows or deletes for a rank.

    Attributes:
        tables: tables to read from this link; newer links have all rows of the other tables.
        parts: shard -> its parts, deletes before rows.
    """

    files: Files
    directory: str
    tables: Collection[str] = ()
    parts: Mapping[int, Sequence[Part]] = field(default_factory=dict)
    _readers: dict[tuple[str, frozenset[str]], PartReader] = field(default_factory=dict, init=False)
    _opening: defaultdict[tuple[str, frozenset[str]], threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock), init=False
    )

    @property
    def every_part(self) -> Iterator[Part]:
        return (part for parts in self.parts.values() for part in parts)

    def reader(self, part: Part, slots: Sequence[SlotSpec], columns: frozenset[str]) -> PartReader:
        key = part.file, columns
        with self._opening[key]:  # one thread opens the file and reads its head or footer; others wait for the reader
            if key not in self._readers:
                self._readers[key] = PartReader(self.files, self.directory, part, slots, columns)
        return self._readers[key]
