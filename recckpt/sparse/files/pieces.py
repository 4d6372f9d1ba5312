"""Reads, checksums and decodes the batches of a part, each once (no torch here).

A reader gets the rows as :class:`RowPiece` and goes over each slot from front to back. Checksums are computed in the
same pass, so the bytes are loaded into the CPU cache once for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import distinct, is_among, mix64, repeated
from recckpt.format.catalog import Batch
from recckpt.sparse.files.arrow_format import ID, ID_SPEC, TABLE
from recckpt.sparse.files.part_reader import PartReader, Values
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
TO_BUCKET = np.uint64(48)  # a hash shifted right by this many bits is the bucket
_OUT_OF_ORDER = "rows out of bucket order", "buckets that never fall"


def row_of(spec: SlotSpec) -> np.dtype[np.void]:
    return np.dtype((np.void, spec.row_bytes))


def named_twice(ids: Int64s) -> tuple[str, str]:
    others = f" and {len(ids) - 1} others" if len(ids) > 1 else ""
    return f"id {ids[0]}{others} twice", "every id once"


class _Unchecked:
    """The slots of a batch whose checksums are not complete yet, with the number of bytes hashed of each."""

    def __init__(self, reader: PartReader, number: int, values: Mapping[str, Values]) -> None:
        self._reader, self._number = reader, number
        self._columns = [(spec, memoryview(values[spec.name]), xxhash.xxh3_64()) for spec in reader.specs]
        self._done = [0] * len(self._columns)

    def pass_to(self, slot: int, row: int) -> None:
        spec, values, digest = self._columns[slot]
        begin, end = self._done[slot], row * spec.row_bytes
        if end > begin:
            digest.update(values[begin:end])
            self._done[slot] = end

    def problems(self) -> Iterator[CorruptCheckpointError]:
        for slot, (spec, _, digest) in enumerate(self._columns):
            self.pass_to(slot, self._reader.part.batches[self._number].rows)
            if problem := self._reader.checksum_problem(self._number, spec.name, digest.intdigest()):
                yield problem


class RowPiece:
    """All or some rows of one batch as columns, ids first; an item of a column has the bytes of a row. Ids are checked.

    ``hashes`` of the ids are distinct for distinct ids, and ordered by bucket.
    """

    def __init__(
        self,
        columns: Sequence[npt.NDArray[Any]],
        hashes: Hashes,
        unchecked: _Unchecked | None = None,
        *,
        first: int = 0,
        goes_on: bool = False,
    ) -> None:
        self.columns, self.hashes = columns, hashes
        self._unchecked, self._first, self._goes_on = unchecked, first, goes_on

    @property
    def ids(self) -> Int64s:
        ids: Int64s = self.columns[0].view(np.int64)
        return ids

    @property
    def n_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def pass_to(self, column: int, row: int) -> None:
        """Continue the checksum of a column up to ``row``; call it just before these rows are read."""
        if self._unchecked is not None and column:
            self._unchecked.pass_to(column - 1, self._first + row)

    def check(self) -> RowPiece:
        """Complete the checksums of the batch and return this piece. Raises CorruptCheckpointError on damage."""
        for problem in self.problems():
            raise problem
        return self

    def end(self) -> None:
        """Check the bytes that have not been hashed yet, unless a later piece continues the batch."""
        if not self._goes_on:
            self.check()

    def problems(self) -> Iterator[CorruptCheckpointError]:
        if self._unchecked is not None:
            yield from self._unchecked.problems()

    def some(self, first: int, end: int, *, goes_on: bool) -> RowPiece:
        """Return the rows [first, end). ``goes_on`` means that another piece continues and completes the batch."""
        columns = [column[first:end] for column in self.columns]
        return RowPiece(columns, self.hashes[first:end], self._unchecked, first=self._first + first, goes_on=goes_on)

    def copy(self) -> RowPiece:
        """Check this piece and return a copy, which does not keep the rest of the batch in memory."""
        return RowPiece([column.copy() for column in self.check().columns], self.hashes.copy())

    @classmethod
    def of(cls, reader: PartReader, number: int, values: Mapping[str, Values], *, is_checked: bool) -> RowPiece:
        """Return a batch whose ids are checked. Unless ``is_checked``, its slots are checked as they are read."""
        columns = [np.frombuffer(values[spec.name], row_of(spec)) for spec in (ID_SPEC, *reader.specs)]
        hashes = mix64(columns[0].view(np.uint64))
        return cls(columns, hashes, None if is_checked else _Unchecked(reader, number, values))

    @classmethod
    def joined(cls, pieces: Sequence[RowPiece]) -> RowPiece:
        columns = [np.concatenate(parts) for parts in zip(*(piece.check().columns for piece in pieces), strict=True)]
        return cls(columns, np.concatenate([piece.hashes for piece in pieces]))


def ids_of(pieces: Iterable[RowPiece]) -> Int64s:
    return np.concatenate([np.empty(0, np.int64), *(piece.ids for piece in pieces)])


class IdCheck:
    """Checks the ids of one table in one part, batch by batch: they are in bucket order, and none occurs twice."""

    def __init__(self) -> None:
        self._first_bucket = self._bucket = -1
        self._head: Int64s = np.empty(0, np.int64)  # ids in the first bucket, which the part before may share
        self._tail: Int64s = np.empty(0, np.int64)  # ids so far in the last bucket, which the next batch may continue

    def piece(self, reader: PartReader, number: int, *, is_whole: bool = False) -> RowPiece:
        """Return the next batch. Slots in a memory map are checked as they are read, or now if ``is_whole``."""
        is_checked = is_whole or reader.mapped is None
        values = reader.read(number, None if is_checked else (TABLE, ID))
        piece = RowPiece.of(reader, number, values, is_checked=is_checked)
        for found, expected in self.check(piece, reader.part.batches[number]):
            raise reader.damage(number, found, expected)
        return piece

    def check(self, piece: RowPiece, batch: Batch) -> Iterator[tuple[str, str]]:
        ids, buckets = piece.ids, (piece.hashes >> TO_BUCKET).astype(np.int64)
        span = int(buckets.min()), int(buckets.max()) + 1
        if span != batch.buckets:
            yield f"ids of buckets {list(span)}", f"{list(batch.buckets)}"
        yield from check_range(ids, batch)
        if buckets[0] < self._bucket or (buckets[1:] < buckets[:-1]).any():
            yield _OUT_OF_ORDER
        if buckets[0] != self._bucket:
            self._tail = self._tail[:0]
        if len(twice := repeated(np.concatenate([self._tail, ids]))):
            yield named_twice(twice)
        if self._bucket < 0:
            self._first_bucket = int(buckets[0])
        if buckets[0] == self._first_bucket:
            self._head = distinct(self._head, ids[buckets == self._first_bucket])
        self._bucket = int(buckets[-1])
        ended = ids[buckets == self._bucket]
        self._tail = distinct(self._tail, ended) if buckets[0] == self._bucket else ended.copy()

    def follow(self, before: IdCheck) -> Iterator[tuple[str, str]]:
        """Yield (found, expected) for each conflict with the part before; take over the ids of a bucket both share."""
        if self._first_bucket < before._bucket:
            yield _OUT_OF_ORDER
        elif self._first_bucket == before._bucket:
            if len(twice := distinct(before._tail[is_among(before._tail, self._head)])):
                yield named_twice(twice)
            if self._bucket == self._first_bucket:
                self._tail = distinct(before._tail, self._tail)


def check_range(ids: Int64s, batch: Batch) -> Iterator[tuple[str, str]]:
    """Yield (found, expected) if the ids' range differs from the catalog's, by which readers select the batch."""
    of_ids = int(ids.min()), int(ids.max())
    if of_ids != batch.ids:
        yield f"ids from {of_ids[0]} to {of_ids[1]}", f"from {batch.ids[0]} to {batch.ids[1]}"
