"""Every byte and every id of the sparse files, held against the catalogs (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.format.catalog import Batch, Catalog, Part
from recckpt.format.manifest import Manifest, TableEntry
from recckpt.sparse.files.part_reader import ID, TABLE, PartReader, column_buffer
from recckpt.storage import Storage
from recckpt.storage.spool import mapped

Int64s = npt.NDArray[np.int64]

_WINDOW_ROWS = 8 << 20  # ids that are compared at once where the shards of a table overlap
_OUT_OF_ORDER = "rows out of bucket order", "buckets that never fall"


@dataclass
class PartCheck:
    """What came of looking at one part.

    Attributes:
        path: the file.
        errors: all that is wrong in it.
        ids: what the next part of the shard has to fit to, by table.
    """

    path: str
    errors: list[CorruptCheckpointError] = field(default_factory=list)
    ids: dict[str, IdCheck] = field(default_factory=dict)


def check_part(
    storage: Storage, directory: str, manifest: Manifest, part: Part, advance: Callable[[int], object]
) -> PartCheck:
    """Hold every byte of a part against its catalog entry.

    Args:
        storage: where the checkpoint lies.
        directory: the checkpoint's directory in it.
        manifest: what the part is held against.
        part: its catalog entry.
        advance: called with the bytes of each batch once it is checked.
    """
    done = PartCheck(layout.join(directory, part.file))
    slots = {table.slots for name in part.tables if (table := manifest.table(name))}
    if len(slots) != 1:
        found, expected = f"tables of {len(slots)} kinds of slots", "tables that agree in their slots"
        done.errors.append(CorruptCheckpointError(done.path, "its tables", found=found, expected=expected))
        return done
    try:
        memory = mapped(storage, done.path)
        reader = PartReader(storage, directory, part, slots.pop(), mapped=memory)
    except CorruptCheckpointError as error:
        done.errors.append(error)
        return done
    readable = True
    for number in range(len(part.batches)):
        try:
            values = reader.unchecked(number)
        except CorruptCheckpointError as error:
            readable = False
            done.errors.append(error)
        else:
            done.errors += _batch_errors(reader, part, number, values, done.ids)
            advance(values.nbytes)
    if readable:
        done.errors += _raised(reader.check_frame)
    return done


def between_parts(parts: Iterable[PartCheck]) -> Iterator[CorruptCheckpointError]:
    """Yield what is wrong where a table goes on in the next part; takes the parts of a shard in their order."""
    before: dict[str, IdCheck] = {}
    for part in parts:
        for table, ids in part.ids.items():
            if table in before:
                for found, expected in ids.follow(before[table]):
                    yield CorruptCheckpointError(part.path, f"table {table!r}", found=found, expected=expected)
            before[table] = ids


def _batch_errors(
    reader: PartReader, part: Part, number: int, values: pa.RecordBatch, ids: dict[str, IdCheck]
) -> Iterator[CorruptCheckpointError]:
    batch = part.batches[number]
    problems = {name: reader.column_problem(number, values, name) for name in values.schema.names}
    yield from (problem for problem in problems.values() if problem)
    where = f"batch {number} (table {batch.table!r})"
    if problems[TABLE] is None:
        for found, expected in _table_column(values.column(TABLE), part, batch):
            yield CorruptCheckpointError(reader.path, f"{where}, column 'table'", found=found, expected=expected)
    if problems[ID] is None:
        found_ids = np.frombuffer(column_buffer(values.column(ID)), np.int64)
        for found, expected in ids.setdefault(batch.table, IdCheck()).check(found_ids, batch):
            yield CorruptCheckpointError(reader.path, where, found=found, expected=expected)


class IdCheck:
    """The ids of one table in one part, batch by batch: in bucket order, and none twice."""

    def __init__(self) -> None:
        self._first_bucket = self._bucket = -1
        self._head: Int64s = np.empty(0, np.int64)  # the ids in the first bucket, where the part before may end
        self._tail: Int64s = np.empty(0, np.int64)  # the ids so far in the last bucket, which may go on

    def check(self, ids: Int64s, batch: Batch) -> Iterator[tuple[str, str]]:
        """Yield (found, expected) for all that is wrong with the ids of the next batch."""
        buckets = bucket_of(ids)
        span = int(buckets.min()), int(buckets.max()) + 1
        if span != batch.buckets:
            yield f"ids of buckets {list(span)}", f"{list(batch.buckets)}"
        if buckets[0] < self._bucket or (np.diff(buckets) < 0).any():
            yield _OUT_OF_ORDER
        if buckets[0] != self._bucket:
            self._tail = self._tail[:0]
        yield from _repeats(np.concatenate([self._tail, ids]))
        if self._bucket < 0:
            self._first_bucket = int(buckets[0])
        if buckets[0] == self._first_bucket:
            self._head = np.union1d(self._head, ids[buckets == self._first_bucket])
        self._bucket = int(buckets[-1])
        ended = ids[buckets == self._bucket]
        self._tail = np.union1d(self._tail, ended) if buckets[0] == self._bucket else ended.copy()

    def follow(self, before: IdCheck) -> Iterator[tuple[str, str]]:
        """Yield (found, expected) for what does not fit to the part before; take over what goes on from there."""
        if self._first_bucket < before._bucket:
            yield _OUT_OF_ORDER
        elif self._first_bucket == before._bucket:
            twice = np.intersect1d(before._tail, self._head)
            yield from _repeats(np.concatenate([twice, twice]))
            if self._bucket == self._first_bucket:
                self._tail = np.union1d(before._tail, self._tail)


def repeated_between_shards(
    storage: Storage, directory: str, table: TableEntry, catalogs: Sequence[Catalog]
) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each range of buckets in which an id is in two shards; reads only where shards overlap.

    Raises:
        CorruptCheckpointError: the ids cannot be read.
    """
    if not _shards_overlap(catalogs, table):
        return
    for window in _windows(sum(catalog.rows.get(table.name, 0) for catalog in catalogs)):
        shards = [np.unique(_ids_in(window, storage, directory, table, catalog)) for catalog in catalogs]
        for found, expected in _repeats(np.concatenate(shards)):
            path, where = layout.join(directory, layout.SPARSE_DIR), f"table {table.name!r}, between shards"
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
