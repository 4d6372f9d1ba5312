"""Merges the rows of a table over a chain of checkpoints, in bucket order, in bounded memory (no torch here).

The newest link that names an id decides: the id has that link's row, or no row if that link deletes it. Damage, an id
that occurs twice in a link, and links with different slots raise CorruptCheckpointError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain as chained
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.format.buckets import N_BUCKETS, distinct
from recckpt.format.catalog import Catalog, Part, PartKind
from recckpt.sparse.files.arrow_format import ID_SPEC
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.part_writer import RowBatch
from recckpt.sparse.files.pieces import TO_BUCKET, Hashes, IdCheck, Int64s, RowPiece, ids_of, row_of
from recckpt.sparse.files.table_reader import NamedIds, TableReader, check_once, record_batch, table_damage
from recckpt.types import SlotSpec

_BATCH_BYTES = 8 << 20
_BOOKS_BYTES = 64  # working memory per row: id, hash, position and flags

Columns = list[npt.NDArray[Any]]  # one array per column, ids first; an item is the bytes of a row's values


def down_to_whole(links: Iterable[TableReader]) -> list[TableReader]:
    """Return the links of a table, newest first, down to the first whole link, which hides all older ones."""
    used: list[TableReader] = []
    for link in links:
        first = used[0] if used else link
        own, expected = ({"its slots": e.slots, "its live layout": e.live} for e in (link.entry, first.entry))
        for where in own:
            if own[where] != expected[where]:
                raise table_damage(link, where, str(own[where]), f"{expected[where]}, as in {first.directory}")
        used.append(link)
        if link.entry.is_whole:
            break
    return used


def bytes_up_to(links: Iterable[TableReader], extra_bytes: int) -> npt.NDArray[np.int64]:
    """Return, for each bucket, about how many bytes the rows up to and including this bucket take, times 65,536.

    Rows are assumed to be spread evenly over the buckets of their batch. ``extra_bytes`` is added for each row.
    """
    # Second differences of the result, in 1/65,536 of a byte, so that the two sums below are exact.
    steps = np.zeros(N_BUCKETS + 1, np.int64)
    for link in links:
        row_bytes = 8 + sum(slot.row_bytes for slot in link.specs)
        for part, numbers in (some for catalog in link.catalogs for some in catalog.parts_of(link.entry.name)):
            n_bytes = extra_bytes + (row_bytes if part.holds == "rows" else 8)
            for batch in (part.batches[number] for number in numbers):
                begin, end = batch.buckets
                bytes_there = batch.rows * n_bytes * N_BUCKETS // (end - begin) + 1
                steps[begin] += bytes_there
                steps[end] -= bytes_there
    return np.cumsum(np.cumsum(steps[:-1]))


def bucket_ranges(
    links: Iterable[TableReader], within: tuple[int, int], budget_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield ranges of buckets whose rows in all links take about ``budget_bytes``; each has one bucket or more."""
    begin, last = within
    up_to = bytes_up_to(links, _BOOKS_BYTES)[:last]
    done, total = int(up_to[begin - 1]) if begin else 0, int(up_to[-1]) if last else 0
    while (begin := int(np.searchsorted(up_to, done, side="right"))) < last:  # skips empty buckets
        limit = min(done + budget_bytes * N_BUCKETS, total)
        end = max(begin + 1, int(np.searchsorted(up_to, limit, side="right")))
        yield begin, end
        done = int(up_to[end - 1])


class LinkCursor:
    """Rows and deletes of one link in buckets [begin, end), read from front to back."""

    def __init__(self, link: TableReader, within: tuple[int, int]) -> None:
        self.link, self._may_repeat = link, link.may_repeat
        self._shards = [[_Cursor(link, shard, kind, within) for kind in ("rows", "deletes")] for shard in link.catalogs]

    def between(self, begin: int, end: int) -> tuple[list[RowPiece], list[RowPiece]]:
        """Return the rows and deletes of buckets [begin, end). Ranges must be requested in ascending order."""
        rows: list[list[RowPiece]] = []
        deletes: list[list[RowPiece]] = []
        for of_rows, of_deletes in self._shards:
            rows.append(list(of_rows.between(begin, end)))
            deletes.append(list(of_deletes.between(begin, end)))
        if any(deletes) or (self._may_repeat and sum(map(bool, rows)) > 1):
            ids = ((ids_of(upserted), ids_of(deleted)) for upserted, deleted in zip(rows, deletes, strict=True))
            check_once(ids, partial(table_damage, self.link), between=self._may_repeat)
        return list(chained(*rows)), list(chained(*deletes))


class _Cursor:
    def __init__(self, link: TableReader, catalog: Catalog, kind: PartKind, within: tuple[int, int]) -> None:
        self._link, self._specs = link, link.specs if kind == "rows" else ()
        parts = catalog.parts_of(link.entry.name, kind)
        every = ((part, number, part.batches[number].buckets) for part, numbers in parts for number in numbers)
        met = ((part, number) for part, number, (begin, end) in every if begin < within[1] and within[0] < end)
        self._batches, self._end = list(met), within[1]
        self._at = 0  # number of the first unfinished batch
        self._order = IdCheck()
        self._current: RowPiece | None = None  # the batch ``_at``, if it is partly returned and lies in a memory map
        self._open: tuple[Part, PartReader] | None = None
        spans = [part.batches[number].buckets for part, number in self._batches]
        for before, after in pairwise(spans):
            if after[0] < before[1] - 1:
                order = f"a batch of buckets {list(after)} behind one of {list(before)}"
                raise table_damage(link, "", order, "their order")

    def between(self, begin: int, end: int) -> Iterator[RowPiece]:
        if self._current is None:
            self._order = IdCheck()  # a partly returned batch is read once more
        while self._at < len(self._batches):
            part, number = self._batches[self._at]
            first_bucket, end_bucket = part.batches[number].buckets
            if first_bucket >= end:
                return
            piece, self._current = self._current, None
            if self._open is None or self._open[0] is not part:
                self._open = part, self._link.part(part, [slot.name for slot in self._specs])
            is_mapped = self._open[1].mapped is not None
            piece = piece or self._order.piece(self._open[1], number)
            if begin <= first_bucket and end_bucket <= end:
                yield piece
            else:
                first, last = np.searchsorted(piece.hashes >> TO_BUCKET, np.array([begin, end], np.uint64))
                rows = piece.some(first, last, goes_on=end < min(end_bucket, self._end))
                if end_bucket > end and is_mapped:
                    self._current = piece
                yield rows if is_mapped else rows.copy()
            if end_bucket > end:
                return
            self._at += 1


def merged_rows(links: Sequence[TableReader], budget_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield :meth:`merged_range` of all buckets as Arrow batches, then check the number of rows."""
    n_rows = 0
    for batch in map(in_arrow, merged_range(links, (0, N_BUCKETS), budget_bytes)):
        n_rows += batch.num_rows
        yield batch
    check_count(links[0], n_rows)


def in_arrow(batch: RowBatch) -> pa.RecordBatch:
    columns: Columns = [batch.ids, *(piece for slot in batch.slots for piece in slot.pieces)]
    return record_batch([slot.spec for slot in batch.slots], columns)


def merged_range(
    links: Sequence[TableReader],
    buckets: tuple[int, int],
    budget_bytes: int,
    used: Callable[[RowPiece, Int64s], object] = lambda piece, rows: None,
    *,
    is_reused: bool = False,
) -> Iterator[RowBatch]:
    """Yield a table's rows in buckets [begin, end), in bucket order, from the links of a chain, newest first.

    Links older than a whole one are ignored. Within a link, a row in any shard overrides a delete in any shard. Memory
    is about ``budget_bytes`` and one batch of the files, for any number of links. With a smaller budget, batches that
    span two ranges are read again more often from unmapped files. ``used`` is called with the rows of each piece before
    they are yielded. With ``is_reused`` each batch may overwrite the one before: writing to fresh memory would take
    longer than the copy.
    """
    met = down_to_whole(links)
    chain, specs = [LinkCursor(link, buckets) for link in met], (ID_SPEC, *met[0].specs)
    batch_rows = max(1, min(_BATCH_BYTES, budget_bytes // 8) // sum(spec.row_bytes for spec in specs))
    room = [np.empty(batch_rows, row_of(spec)) for spec in specs] if is_reused else None
    for part in bucket_ranges(met, buckets, budget_bytes * 3 // 4):
        # Pieces come from a generator, so that only one of them is in memory at a time.
        pieces, name = _checked(current_rows(chain, part), used), met[0].entry.name
        yield from RangeRows(pieces).batches(name, specs, batch_rows, room)


def _checked(
    pieces: Iterable[tuple[RowPiece, Int64s]], used: Callable[[RowPiece, Int64s], object]
) -> Iterator[tuple[RowPiece, Int64s]]:
    for piece, rows in pieces:
        used(piece.check(), rows)
        yield piece, rows


def check_count(newest: TableReader, n_rows: int) -> None:
    if n_rows != newest.entry.rows:
        raise table_damage(newest, "", f"{n_rows} rows in the chain", f"{newest.entry.rows}, by the manifest")


def deleted_ids(links: Sequence[TableReader], budget_bytes: int) -> Iterator[Int64s]:
    """Yield the distinct ids whose newest mention in the links is a delete, by ascending bucket ranges."""
    chain = [LinkCursor(link, (0, N_BUCKETS)) for link in links]
    for begin, end in bucket_ranges(links, (0, N_BUCKETS), budget_bytes):
        named = NamedIds()
        for cursor in chain:
            rows, gone = cursor.between(begin, end)
            named.add(ids_of(rows))
            deleted = distinct(ids_of(gone))
            new = deleted[named.is_new(deleted)]
            if len(new):
                yield new
            named.add(deleted)


def current_rows(chain: Sequence[LinkCursor], buckets: tuple[int, int]) -> Iterator[tuple[RowPiece, Int64s]]:
    """Yield each piece in a range of buckets, newest link first, with the rows that no newer link names."""
    newer = NamedIds()  # has hashes of ids: ids in bucket order have hashes close to each other
    for cursor in chain:
        pieces, deleted = cursor.between(*buckets)
        is_oldest = cursor is chain[-1]
        if not is_oldest and len(pieces) > 1:  # deltas with few changes have many small pieces
            pieces = [RowPiece.joined(pieces)]
        for piece in pieces:
            yield piece, np.flatnonzero(newer.is_new(piece.hashes))
        if not is_oldest:
            newer.add(*(piece.hashes for piece in (*pieces, *deleted)))


class RangeRows:
    def __init__(self, pieces: Iterable[tuple[RowPiece, Int64s]]) -> None:
        self._pieces: list[RowPiece] = []
        kept: list[Int64s] = []  # per piece, the numbers of its rows
        for piece, rows in pieces:
            self._pieces.append(piece)
            kept.append(rows)
        hashes = (piece.hashes[rows] for piece, rows in zip(self._pieces, kept, strict=True))
        all_hashes = np.concatenate([np.empty(0, np.uint64), *hashes])
        buckets_of = (all_hashes >> TO_BUCKET).astype(np.uint16)
        numbers = np.arange(len(kept), dtype=np.min_scalar_type(len(kept)))
        of_piece = np.repeat(numbers, [len(rows) for rows in kept])
        order: slice | Int64s = slice(None)
        if (buckets_of[1:] < buckets_of[:-1]).any():  # when several links, or shards with common buckets, are merged
            order = np.argsort(buckets_of, kind="stable")  # 16 bits: radix sort
        self.hashes: Hashes = all_hashes[order]
        self._of_piece, self._rows = of_piece[order], np.concatenate([np.empty(0, np.int64), *kept])[order]

    def end(self) -> None:
        """Check what is still unchecked in all pieces."""
        for piece in self._pieces:
            piece.end()

    def batches(
        self, table: str, specs: Sequence[SlotSpec], batch_rows: int, room: Columns | None = None
    ) -> Iterator[RowBatch]:
        for first in range(0, len(self.hashes), batch_rows):
            rows = self.at(np.arange(first, min(first + batch_rows, len(self.hashes))))
            rooms = [None] * len(specs) if room is None else room
            yield RowBatch.of(table, specs[1:], [rows(number, each) for number, each in enumerate(rooms)])

    def at(self, places: Int64s) -> Callable[[int, npt.NDArray[Any] | None], npt.NDArray[Any]]:
        """Return a function that gives a column of the rows at ``places``, as bytes of whole rows.

        The column is a view if the rows are adjacent in one piece, otherwise a copy in the array ``room`` or a new one.
        """
        rows, of_piece = self._rows[places], self._of_piece[places]
        first = int(of_piece[0])
        is_one_piece = bool((of_piece == of_piece[0]).all())
        copies = [(first, rows, slice(0, len(rows)))] if is_one_piece else list(_copies(rows, of_piece))
        end = int(rows.max()) + 1 if is_one_piece else 0
        is_view = is_one_piece and end - int(rows[0]) == len(rows) and bool((rows[1:] > rows[:-1]).all())

        def column(number: int, room: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
            source = self._pieces[first].columns[number]
            if is_one_piece:
                self._pieces[first].pass_to(number, end)
            if is_view:
                return source[rows[0] : end]
            target = np.empty(len(rows), source.dtype) if room is None else room[: len(rows)]
            for piece, some, to in copies:
                if isinstance(to, slice):  # take() with mode="raise" would make another copy
                    self._pieces[piece].columns[number].take(some, out=target[to], mode="clip")
                else:
                    target[to] = self._pieces[piece].columns[number][some]
            return target

        return column

    def piece_ends(self, places: Int64s) -> Int64s:
        of_piece = self._of_piece[places]
        return np.flatnonzero(of_piece[1:] != of_piece[:-1]) + 1


def _copies(rows: Int64s, of_piece: npt.NDArray[Any]) -> Iterator[tuple[int, Int64s, Int64s | slice]]:
    """Yield (piece, its rows, their positions in the batch) for each copy that fills a batch.

    A piece that has most rows of a span of the batch comes first, as one slice; later copies overwrite its gaps.
    """
    by_piece = np.argsort(of_piece, kind="stable")
    places = np.split(by_piece, np.flatnonzero(np.diff(of_piece[by_piece])) + 1)
    few, end = [], 0
    for at in sorted(places, key=lambda at: int(at[0])):
        first, last = int(at[0]), int(at[-1]) + 1
        if first >= end and 2 * len(at) > last - first:
            every = np.full(last - first, rows[first])
            every[at - first] = rows[at]
            yield int(of_piece[first]), every, slice(first, last)
            end = last
        else:
            few.append(at)
    for at in few:
        yield int(of_piece[at[0]]), rows[at], at
