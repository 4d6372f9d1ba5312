"""The rows of a table in a chain of checkpoints, merged in bucket order within a bound on memory (no torch here).

The newest link that names an id says what becomes of it: it has this row, or, where the link deletes it, none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.format.buckets import N_BUCKETS, mix64
from recckpt.sparse.files.arrow_format import ID_SPEC, column_array
from recckpt.sparse.files.link_cursors import LinkCursor, Piece, bucket_ranges, down_to_whole, ids_of, row_of
from recckpt.sparse.files.once import Int64s, NamedIds
from recckpt.sparse.files.table_reader import TableReader, table_damage, table_schema
from recckpt.types import SlotSpec

Hashes = npt.NDArray[np.uint64]
_BATCH_BYTES = 8 << 20


def merged_rows(links: Sequence[TableReader], budget_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a table, as :func:`merged_range` does.

    Raises:
        CorruptCheckpointError: also where the rows are not as many as the newest link says.
    """
    n_rows = 0
    for batch in merged_range(links, (0, N_BUCKETS), budget_bytes, lambda piece, rows: None):
        n_rows += batch.num_rows
        yield batch
    check_count(links[0], n_rows)


def merged_range(
    links: Sequence[TableReader],
    buckets: tuple[int, int],
    budget_bytes: int,
    used: Callable[[Piece, Int64s], object],
    *,
    is_reused: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table in buckets [begin, end), in their order, from the links of a chain, newest first.

    Links below one that is whole do not count. Within a link a row in any shard beats a delete in any. Memory is about
    ``budget_bytes``, and a batch of the files, however many links there are: the fewer bytes there are for each of
    them, the more often batches that lie on both sides of a border between ranges of buckets are read again, of files
    that are not mapped. ``used`` is called with the rows of each piece before they are yielded. With ``is_reused`` the
    next batch may overwrite the one before: the first touch of fresh memory takes longer than the copy.

    Raises:
        CorruptCheckpointError: a file is damaged, an id is twice in one link, or the links differ in their slots.
    """
    met = down_to_whole(links)
    chain, slots = [LinkCursor(link, buckets) for link in met], met[0].specs
    batch_rows = max(1, min(_BATCH_BYTES, budget_bytes // 8) // (8 + sum(slot.row_bytes for slot in slots)))
    room = [np.empty(batch_rows, row_of(spec)) for spec in (ID_SPEC, *slots)] if is_reused else None
    for part in bucket_ranges(met, buckets, budget_bytes * 3 // 4):
        yield from RangeRows(chain, part, used).batches(slots, batch_rows, room)


def check_count(newest: TableReader, n_rows: int) -> None:
    """Raise CorruptCheckpointError where the rows in all buckets are not as many as the manifest says."""
    if n_rows != newest.entry.rows:
        raise table_damage(newest, "", f"{n_rows} rows in the chain", f"{newest.entry.rows}, by the manifest")


def current_rows(chain: Sequence[LinkCursor], buckets: tuple[int, int]) -> Iterator[tuple[Piece, Hashes, Int64s]]:
    """Yield each piece of a range of buckets, newest link first: with the hashes of its ids, and its rows that count.

    Those are the rows that no newer link names.
    """
    newer = NamedIds()  # by their hashes, which are near each other for ids in bucket order
    for cursor in chain:
        pieces, deleted = cursor.between(*buckets)
        is_oldest = cursor is chain[-1]
        own = pieces if is_oldest else _as_one(pieces)
        of_link = [_hashes([piece]) for piece in own]
        for piece, hashed in zip(own, of_link, strict=True):
            yield piece, hashed, newer.new(hashed)
        if not is_oldest:
            newer.add(*of_link, _hashes(deleted))


class RangeRows:
    """The rows of a range of buckets: where each of them lies, in bucket order.

    Attributes:
        hashes: of the ids of the rows.
    """

    def __init__(
        self, chain: Sequence[LinkCursor], buckets: tuple[int, int], used: Callable[[Piece, Int64s], object]
    ) -> None:
        self._pieces: list[Piece] = []
        kept: list[Int64s] = []  # rows of each piece
        hashes: list[Hashes] = []  # of these rows
        for piece, hashed, rows in current_rows(chain, buckets):
            used(piece, rows)
            self._pieces.append(piece)
            kept.append(rows)
            hashes.append(hashed[rows])
        all_hashes = np.concatenate([np.empty(0, np.uint64), *hashes])
        buckets_of = (all_hashes >> np.uint64(48)).astype(np.uint16)
        numbers = np.arange(len(kept), dtype=np.min_scalar_type(len(kept)))
        of_piece = np.repeat(numbers, [len(rows) for rows in kept])
        order: slice | Int64s = slice(None)
        if (buckets_of[1:] < buckets_of[:-1]).any():  # several shards that overlap, or several links
            order = np.argsort(buckets_of, kind="stable")  # 16 bits: radix sort
        self.hashes: Hashes = all_hashes[order]
        self._of_piece, self._rows = of_piece[order], np.concatenate([np.empty(0, np.int64), *kept])[order]

    def batches(
        self, slots: Sequence[SlotSpec], batch_rows: int, room: Piece | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows, so many at a time; copies go to ``room`` as with :meth:`take`."""
        schema = table_schema(slots)
        for first in range(0, len(self.hashes), batch_rows):
            columns = self.take(np.arange(first, min(first + batch_rows, len(self.hashes))), room)
            arrays = [
                column_array(spec, pa.py_buffer(values.view(np.uint8)), len(values))
                for spec, values in zip((ID_SPEC, *slots), columns, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def take(self, places: Int64s, room: Sequence[npt.NDArray[Any]] | None = None) -> Piece:
        """Return the columns of the rows at some places, whole rows as bytes; a view where they lie side by side.

        Copies go to ``room``, where that is given: an array for each column, of at least as many rows.
        """
        rows, of_piece = self._rows[places], self._of_piece[places]
        columns = self._pieces[int(of_piece[0])]
        is_one_piece = bool((of_piece == of_piece[0]).all())
        if is_one_piece and (rows[1:] - rows[:-1] == 1).all():
            return [column[rows[0] : rows[-1] + 1] for column in columns]
        room = [np.empty(len(rows), column.dtype) for column in columns] if room is None else room
        copies = (
            [_RowCopy(int(of_piece[0]), rows, slice(0, len(rows)))] if is_one_piece else list(_copies(rows, of_piece))
        )
        for copy in copies:
            for number, values in enumerate(room):
                copy.do(self._pieces[copy.piece][number], values)
        return [values[: len(rows)] for values in room]

    def piece_ends(self, places: Int64s) -> Int64s:
        """Return where, among the rows at some places, one piece ends and another begins."""
        of_piece = self._of_piece[places]
        return np.flatnonzero(of_piece[1:] != of_piece[:-1]) + 1


@dataclass(frozen=True)
class _RowCopy:
    """Rows of a piece, and where in a batch they belong: positions, or a slice of which others fill the gaps later."""

    piece: int
    rows: Int64s
    to: Int64s | slice

    def do(self, source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        """Copy the rows."""
        if isinstance(self.to, slice):
            source.take(self.rows, out=target[self.to], mode="clip")  # "raise" would make a copy in between
        else:
            target[self.to] = source[self.rows]


def _copies(rows: Int64s, of_piece: npt.NDArray[Any]) -> Iterator[_RowCopy]:
    """Yield what fills a batch, first the pieces that have most of the rows where they are: they go in one by one."""
    by_piece = np.argsort(of_piece, kind="stable")
    places = np.split(by_piece, np.flatnonzero(np.diff(of_piece[by_piece])) + 1)
    few, end = [], 0
    for at in sorted(places, key=lambda at: int(at[0])):
        first, last = int(at[0]), int(at[-1]) + 1
        if first >= end and 2 * len(at) > last - first:
            every = np.full(last - first, rows[first])
            every[at - first] = rows[at]
            yield _RowCopy(int(of_piece[first]), every, slice(first, last))
            end = last
        else:
            few.append(at)
    for at in few:
        yield _RowCopy(int(of_piece[at[0]]), rows[at], at)


def _as_one(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces, which are small and many where little has changed, as one."""
    return [[np.concatenate(columns) for columns in zip(*pieces, strict=True)]] if len(pieces) > 1 else list(pieces)


def _hashes(pieces: Iterable[Piece]) -> Hashes:
    """Return the hashes of the ids, by which buckets are ordered; different ids have different ones."""
    hashes: Hashes = mix64(ids_of(pieces).view(np.uint64))
    return hashes
