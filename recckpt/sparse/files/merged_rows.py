"""The rows of a table in a chain of checkpoints, merged in bucket order within a bound on memory (no torch here).

The newest link that names an id says what becomes of it: it has this row, or, where the link deletes it, none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, bucket_of, mix64
from recckpt.format.catalog import Batch, Catalog, Part
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ID, ID_SPEC, column_array, column_buffer
from recckpt.sparse.files.id_check import IdCheck, Int64s, is_among, repeats
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_reader import table_schema
from recckpt.storage.base import Files
from recckpt.types import SlotSpec

Hashes = npt.NDArray[np.uint64]
_BATCH_BYTES = 8 << 20
_BOOKS_BYTES = 64  # beside each row: its id and hash, where it lies, what is known of it

_Piece = list[npt.NDArray[Any]]  # rows of one batch: the bytes of each, column by column; the ids first


@dataclass(frozen=True)
class Link:
    """What one checkpoint of a chain has of a table."""

    storage: Files
    directory: str
    entry: TableEntry  # of its manifest: as many rows as the table had then, whichever links hold them
    rows: Sequence[Catalog]  # of each shard the parts of rows
    deletes: Sequence[Catalog]  # of each shard the parts of ids alone
    is_whole: bool  # it holds all rows: what is older does not count


def merged_rows(links: Sequence[Link], budget_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a table, as :func:`merged_range` does.

    Raises:
        CorruptCheckpointError: also where the rows are not as many as the newest link says.
    """
    n_rows = 0
    for batch in merged_range(links, (0, N_BUCKETS), budget_bytes):
        n_rows += batch.num_rows
        yield batch
    check_count(links[0], n_rows)


def merged_range(links: Sequence[Link], buckets: tuple[int, int], budget_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table in buckets [begin, end), in their order, from the links of a chain, newest first.

    Links below one that is whole do not count. Within a link a row in any shard beats a delete in any. Memory is about
    ``budget_bytes``, and a batch of the files, however many links there are: the fewer bytes there are for each of
    them, the more often batches that lie on both sides of a border between ranges of buckets are read again.

    Raises:
        CorruptCheckpointError: a file is damaged, an id is twice in one link, or the links differ in their slots.
    """
    n_used = next((number for number, link in enumerate(links, 1) if link.is_whole), len(links))
    chain = [_Cursors(link, buckets) for link in links[:n_used]]
    newest = links[0]
    for link in links[1:n_used]:
        if link.entry.slots != newest.entry.slots:
            found, expected = str(link.entry.slots), f"{newest.entry.slots}, as in {newest.directory}"
            raise _damage(link, "its slots", found, expected)
    batch_rows = max(1, min(_BATCH_BYTES, budget_bytes // 8) // newest.entry.row_bytes)
    for part in _ranges(links[:n_used], buckets, budget_bytes * 3 // 4):
        yield from _Range(chain, part).batches(newest.entry.slots, batch_rows)


def check_count(newest: Link, n_rows: int) -> None:
    """Raise CorruptCheckpointError where the rows in all buckets are not as many as the manifest says."""
    if n_rows != newest.entry.rows:
        raise _damage(newest, "", f"{n_rows} rows in the chain", f"{newest.entry.rows}, by the manifest")


def bytes_up_to(links: Iterable[Link], extra_bytes: int) -> npt.NDArray[np.int64]:
    """Return for each bucket about how many bytes the rows up to and in it take, of all links, times 65,536.

    Rows are taken to be spread evenly over the buckets of their batch; each takes ``extra_bytes`` beside its columns.
    """
    # What a bucket takes differs by this from the one before, in parts of a byte, so that sums are exact.
    steps = np.zeros(N_BUCKETS + 1, np.int64)
    for link in links:
        for catalogs, row_bytes in ((link.rows, link.entry.row_bytes), (link.deletes, 8)):
            for part, number in (found for catalog in catalogs for found in _batches(catalog, link.entry.name)):
                begin, end = part.batches[number].buckets
                bytes_there = part.batches[number].rows * (row_bytes + extra_bytes) * N_BUCKETS // (end - begin) + 1
                steps[begin] += bytes_there
                steps[end] -= bytes_there
    return np.cumsum(np.cumsum(steps[:-1]))


def _ranges(links: Iterable[Link], within: tuple[int, int], budget_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of buckets whose rows, of all links, take about as many bytes; each of one bucket at least."""
    up_to = bytes_up_to(links, _BOOKS_BYTES)
    begin, last = within
    up_to = up_to[:last]
    done, total = int(up_to[begin - 1]) if begin else 0, int(up_to[-1]) if last else 0
    while (begin := int(np.searchsorted(up_to, done, side="right"))) < last:  # empty buckets are left out
        limit = min(done + budget_bytes * N_BUCKETS, total)
        end = max(begin + 1, int(np.searchsorted(up_to, limit, side="right")))
        yield begin, end
        done = int(up_to[end - 1])


def _batches(catalog: Catalog, table: str) -> list[tuple[Part, int]]:
    return [(part, number) for part in catalog.parts for number, b in enumerate(part.batches) if b.table == table]


class _Cursor:
    """The batches that one shard has of a table in a range of buckets, read from front to back."""

    def __init__(self, link: Link, catalog: Catalog, slots: Sequence[SlotSpec], within: tuple[int, int]) -> None:
        found = ((part, number, part.batches[number].buckets) for part, number in _batches(catalog, link.entry.name))
        met = [(part, number) for part, number, (begin, end) in found if begin < within[1] and within[0] < end]
        self._link, self._slots, self._batches = link, slots, met
        self._at = 0  # of the first batch that is not behind us
        self._open: tuple[Part, PartReader] | None = None
        spans = [part.batches[number].buckets for part, number in self._batches]
        for before, after in pairwise(spans):
            if after[0] < before[1] - 1:
                raise _damage(link, "", f"a batch of buckets {list(after)} behind one of {list(before)}", "their order")

    def between(self, begin: int, end: int) -> Iterator[_Piece]:
        """Yield the rows of buckets [begin, end), which are behind all that were asked for before."""
        order = IdCheck()
        while self._at < len(self._batches):
            part, number = self._batches[self._at]
            batch = part.batches[number]
            if batch.buckets[0] >= end:
                return
            columns = self._read(part, number, batch, order)
            if begin <= batch.buckets[0] and batch.buckets[1] <= end:
                yield columns
            else:
                first, last = np.searchsorted(bucket_of(_ids([columns])), [begin, end])
                yield [column[first:last].copy() for column in columns]
            if batch.buckets[1] > end:
                return
            self._at += 1

    def _read(self, part: Part, number: int, batch: Batch, order: IdCheck) -> _Piece:
        if self._open is None or self._open[0] is not part:
            self._open = part, PartReader(self._link.storage, self._link.directory, part, self._slots)
        found, reader = self._open[1].read(number), self._open[1]
        for wrong, expected in order.check(np.frombuffer(column_buffer(found[ID]), np.int64), batch):
            where = f"batch {number} (table {batch.table!r})"
            raise CorruptCheckpointError(reader.path, where, found=wrong, expected=expected)
        specs = (ID_SPEC, *self._slots)
        return [np.frombuffer(column_buffer(found[spec.name]), _row_of(spec)) for spec in specs]


class _Cursors:
    """The cursors of one link: one for each shard, over its rows and over its deletes."""

    def __init__(self, link: Link, within: tuple[int, int]) -> None:
        self.link = link
        self._rows = [_Cursor(link, catalog, link.entry.slots, within) for catalog in link.rows]
        self._deletes = [_Cursor(link, catalog, (), within) for catalog in link.deletes]

    def between(self, begin: int, end: int) -> tuple[list[_Piece], list[_Piece]]:
        """Return the rows of buckets [begin, end), in which no id is twice, and the deletes."""
        by_shard = [list(cursor.between(begin, end)) for cursor in self._rows]
        if sum(map(bool, by_shard)) > 1:
            for found, expected in repeats(_ids([piece for pieces in by_shard for piece in pieces])):
                raise _damage(self.link, "between shards", found, expected)
        deleted = [piece for cursor in self._deletes for piece in cursor.between(begin, end)]
        return [piece for pieces in by_shard for piece in pieces], deleted


class _Range:
    """The rows of a range of buckets: where each of them lies, in bucket order."""

    def __init__(self, chain: Sequence[_Cursors], buckets: tuple[int, int]) -> None:
        self._pieces: list[_Piece] = []
        known: Hashes = np.empty(0, np.uint64)  # to newer links, sorted: near each other for ids in bucket order
        kept: list[Int64s] = []  # rows of each piece
        for cursors in chain:
            pieces, deleted = cursors.between(*buckets)
            kept += [np.flatnonzero(~is_among(_hashes([piece]), known)) for piece in pieces]
            self._pieces += pieces
            if cursors is not chain[-1]:
                known = np.sort(np.concatenate([known, _hashes(pieces), _hashes(deleted)]))
        hashes = _hashes([piece[0][rows]] for piece, rows in zip(self._pieces, kept, strict=True))
        order = np.argsort((hashes >> np.uint64(48)).astype(np.uint16), kind="stable")  # 16 bits: radix sort
        self._of_piece = np.repeat(np.arange(len(kept)), [len(rows) for rows in kept])[order]
        self._rows = np.concatenate([np.empty(0, np.int64), *kept])[order]

    def batches(self, slots: Sequence[SlotSpec], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows, so many at a time."""
        schema = table_schema(slots)
        for first in range(0, len(self._rows), batch_rows):
            rows, of_piece = (found[first : first + batch_rows] for found in (self._rows, self._of_piece))
            numbers = np.flatnonzero(np.bincount(of_piece))
            places = [(number, np.flatnonzero(of_piece == number)) for number in numbers]
            arrays = []
            for column, spec in enumerate((ID_SPEC, *slots)):
                values = np.empty(len(rows), _row_of(spec))
                for number, at in places:
                    values[at] = self._pieces[number][column][rows[at]]
                arrays.append(column_array(spec, pa.py_buffer(values.view(np.uint8)), len(rows)))
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _row_of(spec: SlotSpec) -> np.dtype[np.void]:
    """Return the dtype of the bytes of one row."""
    return np.dtype((np.void, spec.row_bytes))


def _ids(pieces: Iterable[_Piece]) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *(piece[0].view(np.int64) for piece in pieces)])


def _hashes(pieces: Iterable[_Piece]) -> Hashes:
    """Return the hashes of the ids, by which buckets are ordered; different ids have different ones."""
    hashes: Hashes = mix64(_ids(pieces).view(np.uint64))
    return hashes


def _damage(link: Link, where: str, found: str, expected: str) -> CorruptCheckpointError:
    path, table = layout.join(link.directory, layout.SPARSE_DIR), f"table {link.entry.name!r}"
    return CorruptCheckpointError(path, f"{table}, {where}" if where else table, found=found, expected=expected)
