"""Columns of a table in one link, as others query them: every byte checked, ids not compared (no torch here)."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from recckpt.format.catalog import Catalog, Part
from recckpt.parallel.ahead import made_ahead
from recckpt.sparse.files.arrow_format import ID, TABLE, ids_in, names_array, part_schema
from recckpt.sparse.files.id_check import check_range
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_reader import TableReader
from recckpt.types import SlotSpec

_THREADS = 8


class CheckedColumns:
    """Reads columns of one table. Thread-safe.

    A column of a batch that lies in a memory map is checked once, when it is first read, and on a storage without maps
    whenever it is read. Opening it looks at the ends of all parts.

    Raises:
        CorruptCheckpointError: a part is missing, cut, of another schema or compressed, or an id is in two shards.
    """

    def __init__(self, table: TableReader) -> None:
        table.check_shards()
        self._table = table
        self._checked = set[tuple[str, int, str]]()  # file, batch, column
        for part, _ in self._batches():
            table.part(part).check_messages()

    def batches(self, names: Sequence[str], shards: Sequence[Catalog] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield these columns, of which ``table`` may be one, batch by batch in the order of the files.

        Args:
            names: of the columns.
            shards: those that are read; None for all.

        Raises:
            CorruptCheckpointError: bytes of these columns are not those that were written.
        """
        table, readers = self._table, _Readers(self._table, names)
        schema = columns_schema(table.entry.slots, names)

        def read(at: tuple[Part, int]) -> pa.RecordBatch:
            part, number = at
            with readers.of(part) as reader:
                batch = self._checked_batch(reader, number, [each for each in names if each != TABLE])
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            if TABLE in names:  # the catalog, which is checked, says whose rows these are
                columns[TABLE] = table_column(table.entry.name, len(batch))
            return pa.RecordBatch.from_arrays([columns[each] for each in names], schema=schema)

        every = [(part, number) for part, numbers in self._batches(shards) for number in numbers]
        return made_ahead(read, every, min(table.storage.threads(_THREADS), len(every)))

    def _batches(self, shards: Sequence[Catalog] | None = None) -> Iterator[tuple[Part, list[int]]]:
        for catalog in self._table.catalogs if shards is None else shards:
            yield from catalog.parts_of(self._table.entry.name, "rows")

    def _checked_batch(self, reader: PartReader, number: int, names: Collection[str]) -> pa.RecordBatch:
        """Return a batch whose columns are checked, now or before."""
        new = [name for name in names if (reader.part.file, number, name) not in self._checked]
        batch = reader.checked(number, new)
        for found, expected in check_range(ids_in(batch), reader.part.batches[number]) if ID in new else ():
            raise reader.damage(number, found, expected)
        if reader.mapped is not None:
            self._checked.update((reader.part.file, number, name) for name in new)
        return batch


def columns_schema(slots: Sequence[SlotSpec], names: Iterable[str]) -> pa.Schema:
    """Return the schema of some columns of parts."""
    schema = part_schema(slots)
    return pa.schema([schema.field(name) for name in names])


def table_column(table: str, n_rows: int) -> pa.Array:
    """Return the column by which readers tell tables apart, for rows of one table."""
    return pa.DictionaryArray.from_arrays(np.zeros(n_rows, np.int16), names_array([table]))


class _Readers:
    """Readers of parts, each for one thread at a time."""

    def __init__(self, table: TableReader, names: Sequence[str]) -> None:
        self._table, self._columns = table, [name for name in names if name not in (TABLE, ID)]
        self._idle: defaultdict[str, list[PartReader]] = defaultdict(list)
        self._lock = threading.Lock()

    @contextmanager
    def of(self, part: Part) -> Iterator[PartReader]:
        """Give a reader of a part, opened if none is idle."""
        with self._lock:
            reader = self._idle[part.file].pop() if self._idle[part.file] else None
        if reader is None:
            reader = self._table.part(part, self._columns)
        yield reader
        with self._lock:
            self._idle[part.file].append(reader)
