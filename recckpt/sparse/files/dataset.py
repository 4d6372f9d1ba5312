"""A table as a dataset of Arrow, for others to query: its parts, or the merged rows of a chain (no torch)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from recckpt.format import layout
from recckpt.format.catalog import Catalog, Part, joined
from recckpt.parallel.threads import made_ahead
from recckpt.sparse.files.arrow_format import ID, TABLE, column_array, column_values, names_array, part_schema
from recckpt.sparse.files.chain_table import ChainTable
from recckpt.sparse.files.part_reader import LinkBatches, PartReader
from recckpt.sparse.files.pieces import check_range
from recckpt.sparse.files.table_reader import TableReader, table_schema
from recckpt.storage.local_files import mapped
from recckpt.types import SlotSpec

_THREADS = 8
ReadRows = Callable[[pa.Schema, ds.Expression | None], Iterator[pa.RecordBatch]]


def shards_that_meet(
    shards: Sequence[Catalog], table: str, schema: pa.Schema, condition: ds.Expression | None
) -> Sequence[Catalog]:
    """Return the shards that may have rows of a table for which a condition on columns of a schema holds.

    Arrow decides that, as it does for partitions of a dataset, without a look at any file.
    """
    of_table = [(str(number), shard.ids[table]) for number, shard in enumerate(shards) if table in shard.ids]
    if condition is None or len(of_table) < 2:
        return shards
    file_format, files = ds.IpcFileFormat(), LocalFileSystem()
    spans = [(name, (ds.field(ID) >= first) & (ds.field(ID) <= last)) for name, (first, last) in of_table]
    fragments = [file_format.make_fragment(name, files, span) for name, span in spans]
    try:
        met = ds.FileSystemDataset(fragments, schema, file_format, files).get_fragments(condition)
        return [shards[int(fragment.path)] for fragment in met]
    except pa.ArrowException:  # of numbers that ids do not convert to: the query itself is to say so
        return shards


def table_column(table: str, n_rows: int) -> pa.Array:
    """Return the column by which readers tell tables apart, for rows of one table."""
    return pa.DictionaryArray.from_arrays(np.zeros(n_rows, np.int16), names_array(*joined([table])))


def dataset_of(table: ChainTable, *, checked: bool = True) -> ds.Dataset:
    """Return the rows of a table as a dataset that Arrow, polars and duckdb query by themselves.

    What a query reads is checked. With ``checked=False`` the values of a single link are taken as they are.

    Raises:
        CorruptCheckpointError: where one link holds all rows: a part is missing, cut, of another schema or length, or
            an id is in two shards.
    """
    if checked or len(table.links) > 1:
        return checked_dataset(table)
    link, entry = table.links[0], table.links[0].entry
    link.check_shards()
    parts = [each for catalog in link.catalogs for each in catalog.parts_of(entry.name, "rows")]
    schema, batches = part_schema(entry.slots), list[pa.RecordBatch]()
    names = table_column(entry.name, max((int(part.rows.max()) for part, _ in parts), default=0))
    # Values as they lie in memory maps, and no file: how one describes them could ask for any amount of memory.
    for part, numbers in parts:
        memory = mapped(link.storage, layout.join(link.directory, part.file))
        reader = PartReader(link.storage, link.directory, part, entry.slots, mapped=memory)
        for number in numbers:
            columns = reader.arrays(number, reader.unchecked(number))
            columns[TABLE] = names[: part.batches[number].rows]
            batches.append(pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema))
    return ds.InMemoryDataset(batches, schema=schema)


class StreamedDataset(ds.FileSystemDataset):  # type: ignore[misc]  # Arrow has no types
    """Rows that are read anew for each query; polars, duckdb and pandas use its ``scanner``.

    Code that bypasses it, such as joins of pyarrow, gets an error that says what to do instead.

    Args:
        schema: of all columns.
        read: returns the rows with the columns of a schema; those that do not meet the condition may be among them.
        condition: which rows there are; None for all.

    Attributes:
        problem: the error that a query has met last, of which others may make one of their own.
    """

    problem: Exception | None = None

    def __init__(self, schema: pa.Schema, read: ReadRows, condition: ds.Expression | None = None) -> None:
        file_format = ds.IpcFileFormat()
        super().__init__([file_format.make_fragment(pa.PythonFile(_NoFile(), "r"))], schema, file_format)
        self._read, self._condition = read, condition

    def scanner(
        self, columns: Any = None, filter: ds.Expression | None = None, *, cache_metadata: bool = True, **options: Any
    ) -> ds.Scanner:
        """Return a scan of the rows, as that of any dataset; columns that it does not need are not read."""
        condition = _both(self._condition, filter)
        schema = pa.schema([self.schema.field(name) for name in _needed(self.schema, columns, condition)])
        return ds.Scanner.from_batches(
            self._batches(schema, condition), schema=schema, columns=columns, filter=condition, **options
        )

    def count_rows(self, filter: ds.Expression | None = None, **options: Any) -> int:
        """Return the number of rows; reads what the filter needs."""
        return int(self.scanner(columns=[], filter=filter, **options).count_rows())

    def filter(self, expression: ds.Expression) -> StreamedDataset:
        return StreamedDataset(self.schema, self._read, _both(self._condition, expression))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a dataset of open files cannot be pickled; open one in each process")

    def _batches(self, schema: pa.Schema, condition: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._read(schema, condition)
        except Exception as error:
            self.problem = error.with_traceback(None)
            raise


def checked_dataset(table: ChainTable, *, as_numbers: bool = False) -> StreamedDataset:
    """Return rows that are checked for each query, those of a chain merged.

    A column of a batch that lies in a memory map is checked once, when it is first read, and on a storage without maps
    whenever it is read. Of a single link no shards are read in which no id meets the filter.

    With ``as_numbers`` float16 and bfloat16 come as float32, and no column has the name of the table: for those that
    know neither dtype, and would take one for an error and the other for whole numbers.

    Raises:
        CorruptCheckpointError: a part of a single link is missing, cut, of another schema or length, or an id is in two
            of its shards.
    """
    if len(table.links) == 1:
        [link] = table.links
        link.check_shards()
        for catalog in link.catalogs:
            for part, _ in catalog.parts_of(link.entry.name, "rows"):
                link.part(part).check_lengths()
    specs = table.links[0].specs
    schema = numbers_schema(specs) if as_numbers else part_schema(specs)
    return StreamedDataset(schema, _CheckedRows(table, schema, as_numbers=as_numbers).read)


class _CheckedRows:
    """Reads the columns of a table that a query needs."""

    def __init__(self, table: ChainTable, schema: pa.Schema, *, as_numbers: bool) -> None:
        self._table, self._schema, self._as_numbers = table, schema, as_numbers
        self._checked = set[tuple[str, int, str]]()  # file, batch, column

    def read(self, schema: pa.Schema, condition: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        link = self._table.links[0]
        shards = shards_that_meet(link.catalogs, link.entry.name, self._schema, condition)
        in_files = part_schema(link.specs)
        batches = self._read(pa.schema([in_files.field(name) for name in schema.names]), shards)
        return (numbers_of(batch, schema, link.specs) for batch in batches) if self._as_numbers else batches

    def _read(self, schema: pa.Schema, shards: Sequence[Catalog]) -> Iterator[pa.RecordBatch]:
        """Yield columns as the files have them, where one link holds all rows of these shards, else of all."""
        link = self._table.links[0]
        if len(self._table.links) == 1:
            yield from self._columns_of(link, schema, shards)
            return
        for batch in self._table.all_rows([slot for slot in link.slots if slot in schema.names]):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns[TABLE] = table_column(link.entry.name, len(batch))
            yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)

    def _columns_of(self, table: TableReader, schema: pa.Schema, shards: Sequence[Catalog]) -> Iterator[pa.RecordBatch]:
        """Yield columns of some shards, of which ``table`` may be one, batch by batch in the order of the files."""
        columns_of_file = [name for name in schema.names if name != TABLE]
        readers, slots = LinkBatches(table.storage, table.directory), frozenset(columns_of_file) - {ID}

        def read(at: tuple[Part, int]) -> pa.RecordBatch:
            part, number = at
            reader = readers.reader(part, table.entry.slots, slots)
            new = [name for name in columns_of_file if (part.file, number, name) not in self._checked]
            values = reader.read(number, new)
            ids = np.frombuffer(values[ID], np.int64)
            for found, expected in check_range(ids, part.batches[number]) if ID in new else ():
                raise reader.damage(number, found, expected)
            columns = reader.arrays(number, values)
            if reader.mapped is not None:
                self._checked.update((part.file, number, name) for name in new)
            if TABLE in schema.names:  # the catalog, which is checked, says whose rows these are
                columns[TABLE] = table_column(table.entry.name, part.batches[number].rows)
            return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)

        parts = (each for shard in shards for each in shard.parts_of(table.entry.name, "rows"))
        every = [(part, number) for part, numbers in parts for number in numbers]
        return made_ahead(read, every, min(table.storage.threads(_THREADS), len(every)))


def numbers_of(batch: pa.RecordBatch, schema: pa.Schema, slots: Iterable[SlotSpec]) -> pa.RecordBatch:
    """Return the columns of a schema as :func:`numbers_schema` has them, with float32 in the place of 16 bits."""
    specs, columns = {slot.name: slot for slot in slots}, []
    for name in schema.names:
        array, spec = batch.column(name), specs.get(name)
        if spec is not None and _as_number(spec) != spec:
            values = np.ascontiguousarray(column_values(array, spec), np.float32)
            array = column_array(_as_number(spec), pa.py_buffer(values), len(array))
        columns.append(array)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _needed(schema: pa.Schema, columns: Any, condition: ds.Expression | None) -> list[str]:
    """Return the columns without which a scan cannot be made; one where it needs none, for the number of rows."""
    if columns is None:
        return list(schema.names)
    names = []
    for name in schema.names:
        rest = pa.schema([field for field in schema if field.name != name])
        try:
            ds.Scanner.from_batches([], schema=rest, columns=columns, filter=condition)
        except (pa.ArrowInvalid, KeyError):
            names.append(name)
    return names or schema.names[:1]


def numbers_schema(slots: Iterable[SlotSpec]) -> pa.Schema:
    """Return the schema of ``id`` and the slots, with float16 and bfloat16 as float32."""
    return table_schema(map(_as_number, slots))


def has_halves(slots: Iterable[SlotSpec]) -> bool:
    """Say whether a slot has values of 16 bits that are no whole numbers."""
    return any(_as_number(slot) != slot for slot in slots)


def _as_number(slot: SlotSpec) -> SlotSpec:
    return replace(slot, dtype="float32") if slot.dtype in ("float16", "bfloat16") else slot


def _both(one: ds.Expression | None, other: ds.Expression | None) -> ds.Expression | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


class _NoFile(io.RawIOBase):
    """What Arrow would read the rows from by itself.

    Only reading fails: Arrow asks for the size of each file at once, and keeps an error of that, and by its traceback
    the dataset and its open files, for ever.
    """

    _SIZE = 1 << 20  # of a file that could hold a footer, so that it is read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._SIZE if whence == io.SEEK_END else offset

    def tell(self) -> int:
        return self._SIZE

    def read(self, _: int = -1) -> NoReturn:
        raise NotImplementedError(
            "these rows are checked, and those of a delta merged, as they are read, which Arrow does not do by itself: "
            "query to_table(), to_batches() or scanner() of the dataset, write it with write_dataset() and query that, "
            "or open a full checkpoint with checked=False"
        )
