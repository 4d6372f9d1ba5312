"""The links of a chain, read side by side in bucket order: what each holds of a table (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain as chained
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.format.catalog import Batch, Catalog, Part, PartKind
from recckpt.sparse.files.arrow_format import ID_SPEC, column_buffer
from recckpt.sparse.files.id_check import IdCheck
from recckpt.sparse.files.once import Int64s, check_once
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_reader import TableReader, table_damage
from recckpt.types import SlotSpec

_BOOKS_BYTES = 64  # beside each row: its id and hash, where it lies, what is known of it

Piece = list[npt.NDArray[Any]]  # rows of one batch: the bytes of each, column by column; the ids first


def down_to_whole(links: Iterable[TableReader]) -> list[TableReader]:
    """Return the links of a table, newest first, down to one that holds all of it: nothing older counts.

    Raises:
        CorruptCheckpointError: they differ in their slots, or in how the table was live.
    """
    used: list[TableReader] = []
    for link in links:
        if used and link.entry.slots != used[0].entry.slots:
            found, expected = str(link.entry.slots), f"{used[0].entry.slots}, as in {used[0].directory}"
            raise table_damage(link, "its slots", found, expected)
        if used and link.entry.live != used[0].entry.live:
            found, expected = str(link.entry.live), f"{used[0].entry.live}, as in {used[0].directory}"
            raise table_damage(link, "its live layout", found, expected)
        used.append(link)
        if link.entry.is_whole:
            break
    return used


def bytes_up_to(links: Iterable[TableReader], extra_bytes: int) -> npt.NDArray[np.int64]:
    """Return for each bucket about how many bytes the rows up to and in it take, of all links, times 65,536.

    Rows are taken to be spread evenly over the buckets of their batch; each takes ``extra_bytes`` beside its columns.
    """
    # What a bucket takes differs by this from the one before, in parts of a byte, so that sums are exact.
    steps = np.zeros(N_BUCKETS + 1, np.int64)
    for link in links:
        row_bytes = 8 + sum(slot.row_bytes for slot in link.specs)
        for batch, n_bytes in ((batch, row_bytes if kind == "rows" else 8) for batch, kind in _batches(link)):
            begin, end = batch.buckets
            bytes_there = batch.rows * (n_bytes + extra_bytes) * N_BUCKETS // (end - begin) + 1
            steps[begin] += bytes_there
            steps[end] -= bytes_there
    return np.cumsum(np.cumsum(steps[:-1]))


def bucket_ranges(
    links: Iterable[TableReader], within: tuple[int, int], budget_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield ranges of buckets whose rows, of all links, take about as many bytes; each of one bucket at least."""
    begin, last = within
    up_to = bytes_up_to(links, _BOOKS_BYTES)[:last]
    done, total = int(up_to[begin - 1]) if begin else 0, int(up_to[-1]) if last else 0
    while (begin := int(np.searchsorted(up_to, done, side="right"))) < last:  # empty buckets are left out
        limit = min(done + budget_bytes * N_BUCKETS, total)
        end = max(begin + 1, int(np.searchsorted(up_to, limit, side="right")))
        yield begin, end
        done = int(up_to[end - 1])


def _batches(link: TableReader) -> Iterator[tuple[Batch, PartKind]]:
    for catalog in link.catalogs:
        for part in catalog.parts:
            yield from ((batch, part.holds) for batch in part.batches if batch.table == link.entry.name)


class LinkCursor:
    """What one link holds of a table in buckets [begin, end), read from front to back."""

    def __init__(self, link: TableReader, within: tuple[int, int]) -> None:
        self.link, self._may_repeat = link, link.may_repeat
        self._shards = [[_Cursor(link, shard, kind, within) for kind in ("rows", "deletes")] for shard in link.catalogs]

    def between(self, begin: int, end: int) -> tuple[list[Piece], list[Piece]]:
        """Return the rows and the deletes of buckets [begin, end), which are behind all that were asked for before.

        Raises:
            CorruptCheckpointError: a file is damaged, an id is in two rows, or it is a row and deleted in one shard.
        """
        rows: list[list[Piece]] = []
        deletes: list[list[Piece]] = []
        for of_rows, of_deletes in self._shards:
            rows.append(list(of_rows.between(begin, end)))
            deletes.append(list(of_deletes.between(begin, end)))
        if any(deletes) or (self._may_repeat and sum(map(bool, rows)) > 1):
            ids = ((ids_of(upserted), ids_of(deleted)) for upserted, deleted in zip(rows, deletes, strict=True))
            check_once(ids, partial(table_damage, self.link), between=self._may_repeat)
        return list(chained(*rows)), list(chained(*deletes))


class _Cursor:
    """The batches that one shard has of a table in a range of buckets."""

    def __init__(self, link: TableReader, catalog: Catalog, kind: PartKind, within: tuple[int, int]) -> None:
        self._link, self._has_rows = link, kind == "rows"
        parts = catalog.parts_of(link.entry.name, kind)
        every = ((part, number, part.batches[number].buckets) for part, numbers in parts for number in numbers)
        met = ((part, number) for part, number, (begin, end) in every if begin < within[1] and within[0] < end)
        self._batches = list(met)
        self._at = 0  # of the first batch that is not behind us
        self._order = IdCheck()
        self._current: _Batch | None = None  # at ``_at``, if a part of it was returned and it is mapped: no memory
        self._open: tuple[Part, PartReader] | None = None
        spans = [part.batches[number].buckets for part, number in self._batches]
        for before, after in pairwise(spans):
            if after[0] < before[1] - 1:
                order = f"a batch of buckets {list(after)} behind one of {list(before)}"
                raise table_damage(link, "", order, "their order")

    def between(self, begin: int, end: int) -> Iterator[Piece]:
        if self._current is None:
            self._order = IdCheck()  # a batch that was read before is read again
        while self._at < len(self._batches):
            part, number = self._batches[self._at]
            first_bucket, end_bucket = part.batches[number].buckets
            if first_bucket >= end:
                return
            batch = self._current or self._read(part, number)
            self._current = batch if end_bucket > end and batch.is_mapped else None
            if begin <= first_bucket and end_bucket <= end:
                yield batch.columns
            else:
                yield batch.between(begin, end)
            if end_bucket > end:
                return
            self._at += 1

    def _read(self, part: Part, number: int) -> _Batch:
        link = self._link
        specs = link.specs if self._has_rows else ()
        if self._open is None or self._open[0] is not part:
            self._open = part, link.part(part, [slot.name for slot in specs])
        arrays = self._order.read(self._open[1], number)
        columns = [np.frombuffer(column_buffer(arrays[spec.name]), row_of(spec)) for spec in (ID_SPEC, *specs)]
        return _Batch(columns, is_mapped=self._open[1].mapped is not None)


class _Batch:
    """A batch that was read and checked."""

    def __init__(self, columns: Piece, *, is_mapped: bool) -> None:
        self.columns, self.is_mapped = columns, is_mapped
        self._buckets: Int64s | None = None

    def between(self, begin: int, end: int) -> Piece:
        """Return the rows of some buckets; copies, unless the others take no memory."""
        if self._buckets is None:
            self._buckets = bucket_of(ids_of([self.columns]))
        first, last = np.searchsorted(self._buckets, [begin, end])
        rows = [column[first:last] for column in self.columns]
        return rows if self.is_mapped else [column.copy() for column in rows]


def row_of(spec: SlotSpec) -> np.dtype[np.void]:
    """Return the dtype of the bytes of one row."""
    return np.dtype((np.void, spec.row_bytes))


def ids_of(pieces: Iterable[Piece]) -> Int64s:
    """Return the ids of pieces, one behind the other."""
    return np.concatenate([np.empty(0, np.int64), *(piece[0].view(np.int64) for piece in pieces)])
