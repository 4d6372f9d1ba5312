"""Tables to Arrow parts: plan the parts by row counts, gather rows in bucket order, checksum and write them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.errors import StateMismatchError
from recckpt.format import layout
from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Catalog, Held, Part
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID_SPEC
from recckpt.sparse.files.part_writer import ColumnBytes, PartWriter
from recckpt.sparse.files.table_rows import BucketOrder, TableSource, deleted_from
from recckpt.sparse.table.column import aligned_bytes
from recckpt.sparse.table.kernels import first_repeat
from recckpt.storage import NewFiles
from recckpt.types import SlotSpec

BATCH_BYTES = 8 << 20
LEAST_BATCH_BYTES = 1 << 20  # of a delta, whose batches are the smaller the fewer rows have changed: each has its cost
PART_BYTES = 1 << 30
_MAX_TABLES = 32_767  # part of the format: the table column counts in int16
_ID_BYTES = 8 + 2  # the id and table columns
ORDER_BYTES = 128 << 20  # all writers together
_ORDER_ITEM = 4
PIECE_BYTES = 512 << 10  # of a column, copied, hashed and written: it stays in the second cache of a core meanwhile


@dataclass(frozen=True)
class RowRange:
    """Rows [begin, end) of one table, counted in bucket order."""

    table: int
    begin: int
    end: int


@dataclass(frozen=True)
class PartPlan:
    """One part to write: number ``number`` of the tables that have these slots, which are a group."""

    group: int
    number: int
    slots: tuple[SlotSpec, ...]
    chunks: tuple[RowRange, ...]  # in file order; of different tables

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all columns."""
        return row_bytes(self.slots)


@dataclass(frozen=True)
class _PartToWrite:
    """A part, and where its rows come from: the chunks of its plan name tables by their numbers."""

    file: str
    holds: Held
    plan: PartPlan
    sources: Sequence[TableSource]
    orders: Sequence[BucketOrder]


def row_bytes(slots: Sequence[SlotSpec]) -> int:
    """Return the bytes of one row in all columns."""
    return _ID_BYTES + sum(slot.row_bytes for slot in slots)


def plan_parts(
    tables: Sequence[tuple[int, tuple[SlotSpec, ...]]],
    concurrency: int,
    *,
    least_bytes: int,
    part_bytes: int = PART_BYTES,
) -> list[PartPlan]:
    """Divide tables, (rows, slots) each, over parts of about equal bytes, in the order of group and number.

    One large table is spread over as many parts as there are writers, but none is smaller than ``least_bytes``. The
    count is at most groups + concurrency + total bytes / part_bytes, and one more for every 32,767 tables. A group has
    the same number on all ranks that have the same tables, with rows or without.
    """
    groups: dict[tuple[SlotSpec, ...], list[tuple[int, int]]] = {}
    for table, (rows, slots) in enumerate(tables):
        groups.setdefault(slots, []).append((table, rows))
    total = sum(rows * row_bytes(slots) for rows, slots in tables)
    target = max(least_bytes, min(part_bytes, -(-total // concurrency)))
    return [
        PartPlan(group, number, slots, chunks)
        for group, slots in enumerate(sorted(groups))
        for number, chunks in enumerate(_roll(groups[slots], target, row_bytes(slots)))
    ]


def _roll(tables: Sequence[tuple[int, int]], target_bytes: int, row_bytes: int) -> Iterator[tuple[RowRange, ...]]:
    """Cut the rows of (table, rows) pairs, laid end to end, into parts of equal size near the target."""
    n_rows = sum(rows for _, rows in tables)
    n_parts = max(1, min(n_rows, round(n_rows * row_bytes / target_bytes)))
    part_rows = -(-n_rows // n_parts)
    chunks: list[RowRange] = []
    room = part_rows
    for table, rows in tables:
        begin = 0
        while begin < rows:
            if room == 0 or len(chunks) == _MAX_TABLES:
                yield tuple(chunks)
                chunks, room = [], part_rows
            end = min(rows, begin + room)
            chunks.append(RowRange(table, begin, end))
            room -= end - begin
            begin = end
    if chunks:
        yield tuple(chunks)


class RepeatFinder:
    """Looks for equal ids among those that it is given piece by piece, in bucket order."""

    def __init__(self) -> None:
        self._open = np.empty(0, np.int64)  # of the bucket in which the last piece ended

    def find(self, ids: npt.NDArray[np.int64]) -> int | None:
        """Return an id that came before, None where there is not one."""
        ids = np.concatenate([self._open, ids])
        repeat, begin = first_repeat(ids)
        self._open = ids[begin:].copy()
        return None if repeat < 0 else int(ids[repeat])


class SparseSaver:
    """Writes the tables of one shard with several threads, each of which keeps one buffer from save to save.

    Memory beyond the tables: a buffer of ``PIECE_BYTES`` a thread, and ``order_bytes`` for the order of the rows;
    larger tables are ordered in passes.
    """

    def __init__(self, concurrency: int, *, batch_bytes: int = BATCH_BYTES, order_bytes: int = ORDER_BYTES) -> None:
        self._concurrency = concurrency
        self._batch_bytes = batch_bytes
        self._order_rows = max(1, order_bytes // concurrency // _ORDER_ITEM)
        self._buffers: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def save(
        self,
        sources: Sequence[TableSource],
        storage: NewFiles,
        directory: str,
        *,
        save_id: str,
        shard: int,
        shards: int,
        advance: Callable[[int], object],
    ) -> Catalog:
        """Write all parts of a shard and return their catalog, which is still to be written; deleted ids come last.

        ``advance`` is called with the bytes of each batch once it is written, from several threads.

        Raises:
            StateMismatchError: a table has an id twice.
            OSError: the storage failed; other files of the shard may be there, without a catalog.
        """
        threads = storage.threads(self._concurrency)

        def write(part: _PartToWrite) -> Part:
            plan = part.plan
            with self._buffer(plan) as buffer, storage.create(layout.join(directory, part.file)) as sink:
                names = [part.sources[chunk.table].name for chunk in plan.chunks]
                writer = PartWriter(sink, part.file, names, plan.slots)
                for chunk in plan.chunks:
                    source, order = part.sources[chunk.table], part.orders[chunk.table]
                    repeats = _repeats_before(chunk, source, order)
                    for rows in self._batches(chunk, order, self._batch_rows(source, plan.row_bytes)):
                        ids = np.empty(len(rows), np.int64)
                        source.read(0, rows, ids.view(np.uint8), for_good=False)
                        _check_ids(source, ids, repeats)
                        first, last = bucket_of(ids[[0, -1]])
                        writer.write(source.name, (int(first), int(last) + 1), _columns(source, rows, ids, buffer))
                        advance(len(rows) * plan.row_bytes)
                return replace(writer.finish(), holds=part.holds)

        def name_of_rows(plan: PartPlan) -> str:
            return layout.part(shard, shards, plan.group, plan.number)

        def name_of_deletes(plan: PartPlan) -> str:
            return layout.deletes_part(shard, shards, plan.number)

        parts = [
            *self._parts(sources, "rows", name_of_rows, threads),
            *self._parts([deleted_from(source) for source in sources], "deletes", name_of_deletes, threads),
        ]
        return Catalog(save_id, shard, shards, tuple(run_all(write, parts, threads)))

    def _parts(
        self, sources: Sequence[TableSource], holds: Held, name: Callable[[PartPlan], str], threads: int
    ) -> list[_PartToWrite]:
        sizes = [(source.n_rows, source.slots) for source in sources]
        orders = [BucketOrder(source.ids, source.n_rows, self._order_rows) for source in sources]
        plans = plan_parts(sizes, threads, least_bytes=self._batch_bytes)
        return [_PartToWrite(name(plan), holds, plan, sources, orders) for plan in plans]

    def _batch_rows(self, source: TableSource, row_bytes: int) -> int:
        """Return the rows of a batch: of a delta as many fewer as rows have changed, so it has as many buckets."""
        share = min(source.n_rows, source.n_all) * self._batch_bytes // max(1, source.n_all)
        return max(1, max(share, min(LEAST_BATCH_BYTES, self._batch_bytes)) // row_bytes)

    def _batches(self, chunk: RowRange, order: BucketOrder, batch_rows: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows of each batch of a chunk."""
        for begin in range(chunk.begin, chunk.end, self._order_rows):
            end = min(chunk.end, begin + self._order_rows)
            ordered = order.rows(begin, end)
            for first in range(0, len(ordered), batch_rows):
                yield ordered[first : first + batch_rows]

    @contextmanager
    def _buffer(self, plan: PartPlan) -> Iterator[npt.NDArray[np.uint8]]:
        """Lend a buffer that holds a piece; it is kept, since the first touch of fresh memory is what is slow."""
        n_bytes = max(PIECE_BYTES, plan.row_bytes)
        with self._lock:
            buffer = self._buffers.pop() if self._buffers else None
        if buffer is None or len(buffer) < n_bytes:
            buffer = aligned_bytes(n_bytes)
        try:
            yield buffer
        finally:
            with self._lock:
                self._buffers.append(buffer)


def _repeats_before(chunk: RowRange, source: TableSource, order: BucketOrder) -> RepeatFinder:
    """Return what looks for ids twice in a chunk; it knows those of its first bucket that are in the chunk before."""
    repeats = RepeatFinder()
    begin = order.bucket_begin(chunk.begin) if 0 < chunk.begin < chunk.end else chunk.begin
    if begin < chunk.begin:
        _check_ids(source, source.ids.gather(order.rows(begin, chunk.begin).astype(np.int64)).numpy(), repeats)
    return repeats


def _check_ids(source: TableSource, ids: npt.NDArray[np.int64], repeats: RepeatFinder) -> None:
    """Raise StateMismatchError where an id comes twice: nothing could load what is written then."""
    id_ = repeats.find(ids)
    if id_ is not None:
        raise StateMismatchError(
            f"table {source.name!r}",
            mismatched={"id": (f"{id_} more than once", "every id once")},
            remedy="nothing was saved; restore the last checkpoint, since the rows of the table are not what they were",
        )


def _columns(
    source: TableSource, rows: npt.NDArray[Any], ids: npt.NDArray[np.int64], buffer: npt.NDArray[np.uint8]
) -> list[ColumnBytes]:
    """Return the columns of a batch; the slots are copied into the buffer when they are written."""
    columns = [ColumnBytes(ID_SPEC, len(rows), [ids.view(np.uint8)])]
    for number, spec in enumerate(source.slots, start=1):
        columns.append(ColumnBytes(spec, len(rows), _pieces(source, number, spec.row_bytes, rows, buffer)))
    return columns


def _pieces(
    source: TableSource, column: int, row_bytes: int, rows: npt.NDArray[Any], buffer: npt.NDArray[np.uint8]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Copy rows of one column into the buffer, as many at a time as fit."""
    piece_rows = len(buffer) // row_bytes
    for begin in range(0, len(rows), piece_rows):
        some = rows[begin : begin + piece_rows]
        piece = buffer[: len(some) * row_bytes]
        source.read(column, some, piece, for_good=column == len(source.slots))  # the last one to be read
        yield piece
