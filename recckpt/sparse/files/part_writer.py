"""Plans and writes part files of about equal size, cut at bucket borders; Arrow writes the frame (no torch here)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.format.catalog import Batch, Part, PartKind, joined
from recckpt.sparse.files.arrow_format import ID_SPEC, TABLE, column_array, names_array, part_schema
from recckpt.storage import Sink, SinkFile
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
PART_BYTES = 1 << 30
_MAX_TABLES = 32_767  # part of the format: the table column is int16
_ID_BYTES = 8 + 2  # bytes of the id and table columns per row
_SMALL_BYTES = 16 << 10  # smaller pieces of a file are collected and written together
_TABLE_SPEC = SlotSpec(TABLE, "int16", ())
_ALIGN = 64


@dataclass(frozen=True)
class TableBytes:
    """The size of the rows of one table.

    ``up_to`` returns, for each bucket, the bytes of rows in this and all lower buckets. It is called only for a table
    that is cut, because counting takes as long as reading all ids.
    """

    name: str
    slots: tuple[SlotSpec, ...]
    n_bytes: int
    up_to: Callable[[], Int64s]

    def within(self, begin: int, end: int) -> int:
        if (begin, end) == (0, N_BUCKETS) or not self.n_bytes:
            return self.n_bytes
        up_to = self.up_to()
        return int(up_to[end - 1] - _before(up_to, begin)) if begin < end else 0


@dataclass(frozen=True)
class BucketRange:  # stands for the rows of one table in buckets [begin, end)
    table: str
    begin: int
    end: int


@dataclass(frozen=True)
class PartPlan:
    """Part ``number`` of a group; a group is the tables with equal slots."""

    group: int
    number: int
    slots: tuple[SlotSpec, ...]
    ranges: tuple[BucketRange, ...]  # in file order, at most one per table

    @property
    def tables(self) -> list[str]:
        return [cut.table for cut in self.ranges]


def row_bytes(slots: Sequence[SlotSpec]) -> int:
    return _ID_BYTES + sum(slot.row_bytes for slot in slots)


def plan_parts(
    tables: Sequence[TableBytes],
    n_writers: int,
    *,
    least_bytes: int,
    part_bytes: int = PART_BYTES,
    buckets: tuple[int, int] = (0, N_BUCKETS),
) -> list[PartPlan]:
    """Divide the rows of tables in buckets [begin, end) among parts, ordered by group, then by number within the group.

    A large table is spread over as many parts as there are writers. Parts are planned to have between ``least_bytes``
    and ``part_bytes`` bytes; parts of a group differ in size by about the rows of one bucket. There are at most
    groups + n_writers + total bytes / part_bytes parts, and one more for every 32,767 tables. A group without rows
    gets no part, and the others keep their group numbers.
    """
    groups: dict[tuple[SlotSpec, ...], list[TableBytes]] = {}
    for table in tables:
        groups.setdefault(table.slots, []).append(table)
    total = sum(table.n_bytes for table in tables)
    target_bytes = max(least_bytes, min(part_bytes, -(-total // n_writers)))
    return [
        PartPlan(group, number, slots, ranges)
        for group, slots in enumerate(sorted(groups))
        for number, ranges in enumerate(_parts(groups[slots], target_bytes, *buckets))
    ]


def _parts(tables: Sequence[TableBytes], target_bytes: int, begin: int, end: int) -> Iterator[tuple[BucketRange, ...]]:
    ranges: list[BucketRange] = []
    for cut in _cut(tables, target_bytes, begin, end):
        if ranges and (cut is None or len(ranges) == _MAX_TABLES):
            yield tuple(ranges)
            ranges = []
        if cut is not None:
            ranges.append(cut)
    if ranges:
        yield tuple(ranges)


def _cut(tables: Sequence[TableBytes], target_bytes: int, begin: int, end: int) -> Iterator[BucketRange | None]:
    """Place tables end to end and cut them into equal parts; yield their ranges, and None at the end of each part."""
    sizes = [table.within(begin, end) for table in tables]
    total, before = sum(sizes), 0
    n_parts = max(1, round(total / target_bytes))
    for table, n_bytes in zip(tables, sizes, strict=True):
        if not n_bytes:
            continue
        first, last = (min(n_parts - 1, at * n_parts // total) for at in (before, before + n_bytes))
        if first == last:
            yield BucketRange(table.name, begin, end)
        else:
            limits = np.array([total * number // n_parts - before for number in range(first + 1, last + 1)])
            yield from _cut_one(table.name, table.up_to(), limits, begin, end)
        before += n_bytes


def _cut_one(table: str, up_to: Int64s, limits: Int64s, begin: int, end: int) -> Iterator[BucketRange | None]:
    """Cut a table at the bucket border nearest to each limit (bytes from ``begin``); yield None after each cut."""
    up_to = np.concatenate([[0], up_to[begin:end] - _before(up_to, begin)])
    after = np.searchsorted(up_to, limits)  # first border that is preceded by at least as many bytes as the limit
    borders = np.where((after > 0) & (limits - up_to[after - 1] < up_to[after] - limits), after - 1, after)
    at = 0
    for border in borders.tolist():
        if up_to[at] < up_to[border]:
            yield BucketRange(table, begin + at, begin + border)
        yield None
        at = border
    if up_to[at] < up_to[-1]:
        yield BucketRange(table, begin + at, end)


def _before(up_to: Int64s, bucket: int) -> int:
    return int(up_to[bucket - 1]) if bucket else 0


@dataclass(frozen=True)
class ColumnBytes:
    """Values of a column of a batch, in pieces; fetching the next piece may overwrite the last one."""

    spec: SlotSpec
    n_rows: int
    pieces: Iterable[npt.NDArray[np.uint8]]

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.spec.row_bytes


class RowBatch(NamedTuple):  # one batch of a part, rows in bucket order
    table: str
    ids: npt.NDArray[np.int64]
    slots: Sequence[ColumnBytes]

    @classmethod
    def of(cls, table: str, slots: Sequence[SlotSpec], columns: Sequence[npt.NDArray[Any]]) -> RowBatch:
        """Return a batch of columns (ids, then slots); each item of a column's array holds a whole row."""
        ids, *values = columns
        pairs = zip(slots, values, strict=True)
        return cls(table, ids.view(np.int64), [ColumnBytes(slot, len(ids), [v.view(np.uint8)]) for slot, v in pairs])


class RowStream(Protocol):
    @property
    def size(self) -> TableBytes:
        """The table's name, slots and size, which the planning of parts needs."""

    def batches(self, begin: int, end: int) -> Iterator[RowBatch]:
        """Yield the rows in buckets [begin, end); fetching the next batch may invalidate the last one."""


def planned_batches(
    plan: PartPlan, sources: Mapping[str, RowStream], advance: Callable[[int], object]
) -> Iterator[RowBatch]:
    """Yield the batches of a planned part; call ``advance`` with the bytes of each batch once it is written."""
    size = row_bytes(plan.slots)
    for cut in plan.ranges:
        for batch in sources[cut.table].batches(cut.begin, cut.end):
            yield batch
            advance(len(batch.ids) * size)


def write_part(
    create: Callable[[], tuple[str, Sink]],
    tables: Sequence[str],
    slots: Sequence[SlotSpec],
    batches: Iterator[RowBatch],
    *,
    holds: PartKind = "rows",
) -> Part | None:
    """Write batches as a part and return its catalog entry; return None if there are no batches.

    ``create`` makes a new file and returns its name and sink; it is called only if there are batches.
    """
    first = next(batches, None)
    if first is None:
        return None
    file, sink = create()
    with sink:
        writer = PartWriter(sink, file, tables, slots, holds=holds)
        for batch in chain([first], batches):
            writer.write(batch)
        return writer.finish()


class PartWriter:
    """Writes one part into a sink. Not thread-safe."""

    def __init__(
        self, sink: Sink, file: str, tables: Sequence[str], slots: Sequence[SlotSpec], *, holds: PartKind = "rows"
    ) -> None:
        self._file, self._tables, self._holds = file, tuple(tables), holds
        self._numbers = {name: number for number, name in enumerate(tables)}
        self._dictionary = names_array(*joined(self._tables))
        self._schema = part_schema(slots)
        self._framed = _FrameSink(sink)
        self._batches: list[Batch] = []
        self._arrow = pa.ipc.new_file(pa.PythonFile(self._framed, "w"), self._schema)

    def write(self, batch: RowBatch) -> None:
        """Write rows of one table, with the slots in the order of the part."""
        table, ids, slots = batch
        columns = [ColumnBytes(ID_SPEC, len(ids), [ids.view(np.uint8)]), *slots]
        numbers = np.full(len(ids), self._numbers[table], np.int16).view(np.uint8)
        buffers = self._framed.stand_ins([ColumnBytes(_TABLE_SPEC, len(ids), [numbers]), *columns])
        indices = pa.Array.from_buffers(pa.int16(), len(ids), [None, buffers[TABLE]])
        arrays = [pa.DictionaryArray.from_arrays(indices, self._dictionary, safe=False)]
        arrays += [column_array(column.spec, buffers[column.spec.name], len(ids)) for column in columns]
        self._arrow.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        first, last = bucket_of(ids[[0, -1]])
        buckets, of_ids = (int(first), int(last) + 1), (int(ids.min()), int(ids.max()))
        self._batches.append(Batch(table, len(ids), buckets, of_ids, self._framed.take_checksums()))

    def finish(self) -> Part:
        """Write the footer and return the catalog entry; the caller closes the sink."""
        self._arrow.close()
        self._framed.write_small()
        frame = self._framed.frame.intdigest()
        return Part(self._file, self._framed.n_bytes, frame, self._tables, tuple(self._batches), self._holds)


class _FrameSink(SinkFile):
    """The file that Arrow writes to; hashes all bytes that no column checksum covers.

    Arrow lays out the frame without reading the values, so it gets placeholder memory. When Arrow writes a placeholder,
    the real values are fetched, hashed and written in its place, in pieces small enough for the CPU cache. Small pieces
    of the frame are collected, because each write costs as much as the rows of a small delta.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.frame = xxhash.xxh3_64()
        self._small = bytearray()
        self._space = pa.py_buffer(b"")
        self._columns: dict[int, ColumnBytes] = {}  # address of the placeholder -> column of the current batch
        self._xxh3: dict[str, int] = {}

    def stand_ins(self, columns: Sequence[ColumnBytes]) -> dict[str, pa.Buffer]:
        ends = np.cumsum([-(-column.n_bytes // _ALIGN) * _ALIGN for column in columns]).tolist()
        if self._space.size < ends[-1]:
            self._space = pa.py_buffer(mmap.mmap(-1, ends[-1], access=mmap.ACCESS_READ))
        begins = [0, *ends[:-1]]
        buffers = [self._space.slice(begin, c.n_bytes) for begin, c in zip(begins, columns, strict=True)]
        self._columns = {buffer.address: column for buffer, column in zip(buffers, columns, strict=True)}
        self._xxh3 = {}
        return {column.spec.name: buffer for buffer, column in zip(buffers, columns, strict=True)}

    def take_checksums(self) -> dict[str, int]:
        """Return the checksums of the columns. Raises RuntimeError if Arrow did not write a column."""
        left_out = [c.spec.name for c in self._columns.values() if c.spec.name not in self._xxh3]
        if left_out:  # this Arrow copies the placeholders, so their zeros would be in the file
            raise RuntimeError(f"Arrow {pa.__version__} wrote the columns {left_out} from a copy, without their values")
        self._columns = {}
        return self._xxh3

    def write(self, data: Any) -> int:
        column = self._columns.get(data.address) if isinstance(data, pa.Buffer) else None
        if column is None:
            self.frame.update(data)
            self._pass_on(data)
            return len(data)
        xxh3, n_bytes = xxhash.xxh3_64(), 0
        for piece in column.pieces:
            buffer = pa.py_buffer(piece)
            xxh3.update(buffer)
            self._pass_on(buffer)
            n_bytes += len(buffer)
        if n_bytes != column.n_bytes:
            raise RuntimeError(f"column {column.spec.name!r} has {n_bytes} bytes, expected {column.n_bytes}")
        self._xxh3[column.spec.name] = xxh3.intdigest()
        return n_bytes

    def _pass_on(self, data: Any) -> None:
        if len(data) < _SMALL_BYTES:
            self._small += data
        else:
            self.write_small()
            super().write(data)

    def tell(self) -> int:
        return self.n_bytes + len(self._small)

    def write_small(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            super().write(small)
