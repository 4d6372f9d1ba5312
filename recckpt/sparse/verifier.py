"""Every byte and every id of the sparse files, held against the catalogs (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt import layout
from recckpt.errors import CorruptCheckpointError
from recckpt.manifest import Manifest, TableEntry
from recckpt.sparse.buckets import N_BUCKETS, bucket_of
from recckpt.sparse.catalog import Batch, Catalog, Part
from recckpt.sparse.codec import ID, TABLE, PartReader, column_buffer
from recckpt.storage import Storage
from recckpt.storage.spool import mapped

Int64s = npt.NDArray[np.int64]

_WINDOW_ROWS = 8 << 20  # ids that are compared at once where the shards of a table overlap


class ShardVerifier:
    """Checks the parts of one shard, which must come in the order of the catalog.

    Args:
        storage: where the checkpoint lies.
        directory: the checkpoint's directory in it.
        manifest: what it is held against.
    """

    def __init__(self, storage: Storage, directory: str, manifest: Manifest) -> None:
        self._storage, self._directory, self._manifest = storage, directory, manifest
        self._ids: dict[str, _IdCheck] = {}

    def check(self, part: Part, advance: Callable[[int], object]) -> Iterator[CorruptCheckpointError]:
        """Yield all that is wrong in a part.

        Args:
            part: its catalog entry.
            advance: called with the bytes of each batch once it is checked.
        """
        path = layout.join(self._directory, part.file)
        slots = {table.slots for name in part.tables if (table := self._manifest.table(name))}
        if len(slots) != 1:
            found = f"tables of {len(slots)} kinds of slots"
            yield CorruptCheckpointError(path, "its tables", found=found, expected="tables that agree in their slots")
            return
        try:
            memory = mapped(self._storage, path)
            reader = PartReader(self._storage, self._directory, part, slots.pop(), mapped=memory)
        except CorruptCheckpointError as error:
            yield error
            return
        readable = True
        for number in range(len(part.batches)):
            try:
                values = reader.unchecked(number)
            except CorruptCheckpointError as error:
                readable = False
                yield error
            else:
                yield from self._check_batch(reader, part, number, values)
                advance(values.nbytes)
        if readable:
            yield from _raised(reader.check_frame)

    def _check_batch(
        self, reader: PartReader, part: Part, number: int, values: pa.RecordBatch
    ) -> Iterator[CorruptCheckpointError]:
        batch = part.batches[number]
        problems = {name: reader.column_problem(number, values, name) for name in values.schema.names}
        yield from (problem for problem in problems.values() if problem)
        where = f"batch {number} (table {batch.table!r})"
        if problems[TABLE] is None:
            for found, expected in _table_column(values.column(TABLE), part, batch):
                yield CorruptCheckpointError(reader.path, f"{where}, column 'table'", found=found, expected=expected)
        if problems[ID] is None:
            ids = np.frombuffer(column_buffer(values.column(ID)), np.int64)
            for found, expected in self._ids.setdefault(batch.table, _IdCheck()).check(ids, batch):
                yield CorruptCheckpointError(reader.path, where, found=found, expected=expected)


class _IdCheck:
    """The ids of one table in one shard, batch by batch: in bucket order, and none twice."""

    def __init__(self) -> None:
        self._bucket = -1
        self._tail: Int64s = np.empty(0, np.int64)  # the ids so far in the last bucket, which may go on

    def check(self, ids: Int64s, batch: Batch) -> Iterator[tuple[str, str]]:
        """Yield (found, expected) for all that is wrong with the ids of the next batch."""
        buckets = bucket_of(ids)
        span = int(buckets.min()), int(buckets.max()) + 1
        if span != batch.buckets:
            yield f"ids of buckets {list(span)}", f"{list(batch.buckets)}"
        if buckets[0] < self._bucket or (np.diff(buckets) < 0).any():
            yield "rows out of bucket order", "buckets that never fall"
        if buckets[0] != self._bucket:
            self._tail = self._tail[:0]
        yield from _repeats(np.concatenate([self._tail, ids]))
        self._bucket = int(buckets[-1])
        ended = ids[buckets == self._bucket]
        self._tail = np.union1d(self._tail, ended) if buckets[0] == self._bucket else ended.copy()


def repeated_between_shards(
    storage: Storage, directory: str, manifest: Manifest, catalogs: Sequence[Catalog]
) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each table with an id in two shards; reads ids only where shards share buckets.

    Raises:
        CorruptCheckpointError: the ids cannot be read.
    """
    for table in manifest.tables:
        if not _shards_overlap(catalogs, table):
            continue
        for window in _windows(table.rows):
            shards = [np.unique(_ids_in(window, storage, directory, table, catalog)) for catalog in catalogs]
            for found, expected in _repeats(np.concatenate(shards)):
                where = f"table {table.name!r}, between shards"
                path = layout.join(directory, layout.SPARSE_DIR)
                yield CorruptCheckpointError(path, where, found=found, expected=expected)


def _shards_overlap(catalogs: Sequence[Catalog], table: TableEntry) -> bool:
    spans = []
    for catalog in catalogs:
        ranges = [batch.buckets for part in catalog.parts for batch in part.batches if batch.table == table.name]
        if ranges:
            spans.append((min(begin for begin, _ in ranges), max(end for _, end in ranges)))
    spans.sort()
    return any(following[0] < before[1] for before, following in pairwise(spans))


def _windows(rows: int) -> list[tuple[int, int]]:
    """Cut the buckets into ranges that hold about as many rows as may be compared at once."""
    width = max(1, N_BUCKETS * _WINDOW_ROWS // max(rows, _WINDOW_ROWS))
    return [(begin, min(begin + width, N_BUCKETS)) for begin in range(0, N_BUCKETS, width)]


def _ids_in(window: tuple[int, int], storage: Storage, directory: str, table: TableEntry, catalog: Catalog) -> Int64s:
    """Return the ids that one shard has of a table in a range of buckets."""
    begin, end = window
    found: list[Int64s] = [np.empty(0, np.int64)]
    for part in catalog.parts:
        numbers = [
            number
            for number, batch in enumerate(part.batches)
            if batch.table == table.name and batch.buckets[0] < end and begin < batch.buckets[1]
        ]
        if numbers:
            reader = PartReader(storage, directory, part, table.slots, ())
            for number in numbers:
                ids = np.frombuffer(column_buffer(reader.read(number)[ID]), np.int64)
                buckets = bucket_of(ids)
                found.append(ids[(begin <= buckets) & (buckets < end)])
    return np.concatenate(found)


def _table_column(column: pa.DictionaryArray, part: Part, batch: Batch) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the table names that readers other than ours go by."""
    try:
        column.dictionary.validate(full=True)
        names = column.dictionary.to_pylist()
    except (pa.ArrowException, ValueError) as error:
        yield f"an invalid dictionary ({error})", str(list(part.tables))
        return
    if names != list(part.tables):
        yield f"the tables {names}", str(list(part.tables))
    numbers = np.unique(np.frombuffer(column_buffer(column), np.int16))
    expected = part.tables.index(batch.table)
    if numbers.tolist() != [expected]:
        yield f"rows of tables {numbers.tolist()}", f"table {expected} only"


def _repeats(ids: Int64s) -> Iterator[tuple[str, str]]:
    ordered = np.sort(ids)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if len(twice):
        others = f" and {len(twice) - 1} others" if len(twice) > 1 else ""
        yield f"id {twice[0]}{others} twice", "every id once"


def _raised(check: Callable[[], None]) -> Iterator[CorruptCheckpointError]:
    try:
        check()
    except CorruptCheckpointError as error:
        yield error
