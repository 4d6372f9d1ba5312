"""Ids checked: in the order of their buckets, and each once, in a part and between shards (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.format.catalog import Batch, Catalog
from recckpt.format.distinct import distinct, is_among, repeated
from recckpt.format.shards import are_disjoint, overlap
from recckpt.format.tables import TableEntry
from recckpt.sparse.files.arrow_format import ids_in
from recckpt.sparse.files.once import Int64s, named_twice
from recckpt.sparse.files.part_reader import PartReader
from recckpt.storage.base import Files

_OUT_OF_ORDER = "rows out of bucket order", "buckets that never fall"
_WINDOW_ROWS = 8 << 20  # ids that are compared at once


class IdCheck:
    """The ids of one table in one part, batch by batch: in bucket order, and none twice."""

    def __init__(self) -> None:
        self._first_bucket = self._bucket = -1
        self._head: Int64s = np.empty(0, np.int64)  # the ids in the first bucket, where the part before may end
        self._tail: Int64s = np.empty(0, np.int64)  # the ids so far in the last bucket, which may go on

    def read(self, reader: PartReader, number: int) -> Mapping[str, pa.Array]:
        """Return the columns of the next batch; CorruptCheckpointError where they are damaged, or its ids wrong."""
        columns = reader.read(number)
        for found, expected in self.check(ids_in(columns), reader.part.batches[number]):
            raise reader.damage(number, found, expected)
        return columns

    def check(self, ids: Int64s, batch: Batch) -> Iterator[tuple[str, str]]:
        """Yield (found, expected) for all that is wrong with the ids of the next batch."""
        buckets = bucket_of(ids)
        span = int(buckets.min()), int(buckets.max()) + 1
        if span != batch.buckets:
            yield f"ids of buckets {list(span)}", f"{list(batch.buckets)}"
        yield from check_range(ids, batch)
        if buckets[0] < self._bucket or (np.diff(buckets) < 0).any():
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
        """Yield (found, expected) for what does not fit to the part before; take over what goes on from there."""
        if self._first_bucket < before._bucket:
            yield _OUT_OF_ORDER
        elif self._first_bucket == before._bucket:
            if len(twice := distinct(before._tail[is_among(before._tail, self._head)])):
                yield named_twice(twice)
            if self._bucket == self._first_bucket:
                self._tail = distinct(before._tail, self._tail)


def check_range(ids: Int64s, batch: Batch) -> Iterator[tuple[str, str]]:
    """Yield (found, expected) where the ids of a batch are not in the range by which readers choose and compare."""
    of_ids = int(ids.min()), int(ids.max())
    if of_ids != batch.ids:
        yield f"ids from {of_ids[0]} to {of_ids[1]}", f"from {batch.ids[0]} to {batch.ids[1]}"


def repeated_between_shards(
    storage: Files, directory: str, table: TableEntry, catalogs: Sequence[Catalog]
) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each range of buckets in which an id is in two shards; reads only where shards overlap.

    It must be known, or be found out elsewhere, that ids lie in the buckets and ranges of their batches.

    Raises:
        CorruptCheckpointError: the ids cannot be read.
    """
    if not may_repeat(catalogs, table.name):
        return
    for window in _windows(sum(catalog.rows.get(table.name, 0) for catalog in catalogs)):
        shards = [distinct(_ids_in(window, storage, directory, table, catalog)) for catalog in catalogs]
        if len(twice := repeated(np.concatenate(shards))):
            path, where = layout.join(directory, layout.SPARSE_DIR), f"table {table.name!r}, between shards"
            found, expected = named_twice(twice)
            yield CorruptCheckpointError(path, where, found=found, expected=expected)


def may_repeat(catalogs: Sequence[Catalog], table: str) -> bool:
    """Say whether an id of a table may be in two shards: where both their ids and their buckets overlap."""
    if are_disjoint(catalog.ids[table] for catalog in catalogs if table in catalog.ids):
        return False
    spans = []
    for catalog in catalogs:
        parts = catalog.parts_of(table, "rows")
        ranges = [part.batches[number].buckets for part, numbers in parts for number in numbers]
        if ranges:
            spans.append((min(begin for begin, _ in ranges), max(end for _, end in ranges)))
    return overlap(spans)


def _windows(rows: int) -> list[tuple[int, int]]:
    """Cut the buckets into ranges that hold about as many rows as may be compared at once."""
    width = max(1, N_BUCKETS * _WINDOW_ROWS // max(rows, _WINDOW_ROWS))
    return [(begin, min(begin + width, N_BUCKETS)) for begin in range(0, N_BUCKETS, width)]


def _ids_in(window: tuple[int, int], storage: Files, directory: str, table: TableEntry, catalog: Catalog) -> Int64s:
    """Return the ids that one shard has of a table in a range of buckets."""
    begin, end = window
    pieces: list[Int64s] = [np.empty(0, np.int64)]
    for part, numbers in catalog.parts_of(table.name, "rows"):
        spans = [(number, part.batches[number].buckets) for number in numbers]
        met = [number for number, span in spans if span[0] < end and begin < span[1]]
        if met:
            reader = PartReader(storage, directory, part, table.slots, ())
            for number in met:
                ids = ids_in(reader.read(number))
                buckets = bucket_of(ids)
                pieces.append(ids[(begin <= buckets) & (buckets < end)])
    return np.concatenate(pieces)
