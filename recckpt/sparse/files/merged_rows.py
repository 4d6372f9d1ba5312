"""The rows of a table in a chain of checkpoints, merged in bucket order within a bound on memory (no torch here).

The newest link that names an id says what becomes of it: it has this row, or, where the link deletes it, none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.format.buckets import N_BUCKETS, mix64
from recckpt.sparse.files.arrow_format import ID_SPEC, column_array
from recckpt.sparse.files.id_check import Int64s, is_among
from recckpt.sparse.files.link_cursors import LinkCursor, Piece, bucket_ranges, down_to_whole, ids_of, row_of
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
    for batch in merged_range(links, (0, N_BUCKETS), budget_bytes):
        n_rows += batch.num_rows
        yield batch
    check_count(links[0], n_rows)


def merged_range(links: Sequence[TableReader], buckets: tuple[int, int], budget_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table in buckets [begin, end), in their order, from the links of a chain, newest first.

    Links below one that is whole do not count. Within a link a row in any shard beats a delete in any. Memory is about
    ``budget_bytes``, and a batch of the files, however many links there are: the fewer bytes there are for each of
    them, the more often batches that lie on both sides of a border between ranges of buckets are read again.

    Raises:
        CorruptCheckpointError: a file is damaged, an id is twice in one link, or the links differ in their slots.
    """
    used = down_to_whole(links)
    chain, slots = [LinkCursor(link, buckets) for link in used], used[0].specs
    batch_rows = max(1, min(_BATCH_BYTES, budget_bytes // 8) // (8 + sum(slot.row_bytes for slot in slots)))
    for part in bucket_ranges(used, buckets, budget_bytes * 3 // 4):
        yield from _Range(chain, part).batches(slots, batch_rows)


def check_count(newest: TableReader, n_rows: int) -> None:
    """Raise CorruptCheckpointError where the rows in all buckets are not as many as the manifest says."""
    if n_rows != newest.entry.rows:
        raise table_damage(newest, "", f"{n_rows} rows in the chain", f"{newest.entry.rows}, by the manifest")


class _Range:
    """The rows of a range of buckets: where each of them lies, in bucket order."""

    def __init__(self, chain: Sequence[LinkCursor], buckets: tuple[int, int]) -> None:
        self._pieces: list[Piece] = []
        known: Hashes = np.empty(0, np.uint64)  # to newer links, sorted: near each other for ids in bucket order
        kept: list[Int64s] = []  # rows of each piece
        for cursor in chain:
            pieces, deleted = cursor.between(*buckets)
            kept += [np.flatnonzero(~is_among(_hashes([piece]), known)) for piece in pieces]
            self._pieces += pieces
            if cursor is not chain[-1]:
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
                values = np.empty(len(rows), row_of(spec))
                for number, at in places:
                    values[at] = self._pieces[number][column][rows[at]]
                arrays.append(column_array(spec, pa.py_buffer(values.view(np.uint8)), len(rows)))
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _hashes(pieces: Iterable[Piece]) -> Hashes:
    """Return the hashes of the ids, by which buckets are ordered; different ids have different ones."""
    hashes: Hashes = mix64(ids_of(pieces).view(np.uint64))
    return hashes
