"""Gives a table as an Arrow dataset that can be queried: its part files, or the merged rows of a chain (no torch)."""

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
    """Return the shards that may have rows of the table that satisfy a condition.

    Arrow decides from the id ranges of the shards, as it prunes partitions of a dataset; no file is read.
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
    except pa.ArrowException:  # the condition's numbers are not ids: leave the error to the query itself
        return shards


def table_column(table: str, n_rows: int) -> pa.Array:  # readers of Arrow files tell tables apart by this column
    return pa.DictionaryArray.from_arrays(np.zeros(n_rows, np.int16), names_array(*joined([table])))


def dataset_of(table: ChainTable, *, checked: bool = True) -> ds.Dataset:
    """Return a table as a dataset for Arrow, polars and duckdb.

    Everything that a query reads is checked. With ``checked=False`` the values of a single link are not checked; damage
    that is visible without the values raises CorruptCheckpointError here.
    """
    if checked or len(table.links) > 1:
        return checked_dataset(table)
    link, entry = table.links[0], table.links[0].entry
    link.check_shards()
    parts = [each for catalog in link.catalogs for each in catalog.parts_of(entry.name, "rows")]
    schema, batches = part_schema(entry.slots), list[pa.RecordBatch]()
    names = table_column(entry.name, max((int(part.rows.max()) for part, _ in parts), default=0))
    # Batches are views of memory maps. Arrow must not open the files: their metadata could ask for any amount of memory
    for part, numbers in parts:
        memory = mapped(link.storage, layout.join(link.directory, part.file))
        reader = PartReader(link.storage, link.directory, part, entry.slots, mapped=memory)
        for number in numbers:
            columns = reader.arrays(number, reader.unchecked(number))
            columns[TABLE] = names[: part.batches[number].rows]
            batches.append(pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema))
    return ds.InMemoryDataset(batches, schema=schema)


class StreamedDataset(ds.FileSystemDataset):  # type: ignore[misc]  # Arrow has no types
    """A dataset whose rows are read anew for each query, through the ``scanner`` that polars, duckdb and pandas use.

    Code that bypasses the scanner, such as pyarrow's joins, gets an error that names alternatives. ``read`` may return
    rows that do not satisfy the condition; the scanner filters them.

    Attributes:
        problem: the last error of a query; other libraries may replace it by an error of their own.
    """

    problem: Exception | None = None

    def __init__(self, schema: pa.Schema, read: ReadRows, condition: ds.Expression | None = None) -> None:
        file_format = ds.IpcFileFormat()
        super().__init__([file_format.make_fragment(pa.PythonFile(_NoFile(), "r"))], schema, file_format)
        self._read, self._condition = read, condition

    def scanner(
        self, columns: Any = None, filter: ds.Expression | None = None, *, cache_metadata: bool = True, **options: Any
    ) -> ds.Scanner:
        condition = _both(self._condition, filter)
        schema = pa.schema([self.schema.field(name) for name in _needed(self.schema, columns, condition)])
        return ds.Scanner.from_batches(
            self._batches(schema, condition), schema=schema, columns=columns, filter=condition, **options
        )

    def count_rows(self, filter: ds.Expression | None = None, **options: Any) -> int:
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
    """Return a dataset whose rows are checked at each query, and merged if there are several links.

    With memory maps, each column of a batch is checked once, at its first read; on other storages at each read. With a
    single link, shards whose id ranges exclude the filter are not read. ``as_numbers`` converts float16 and bfloat16 to
    float32 and omits the column of table names, for libraries that know neither dtype.
    """
    if len(table.links) == 1:
        [link] = table.links
        link.check_shards()
        for catalog in link.catalogs:
            for part, _ in catalog.parts_of(link.entry.name, "rows"):
                link.part(part).check_lengths()
    specs = table.links[0].specs
    schema = numbers_schema(specs) if as_numbers else part_schema(specs)
    link, checked = table.links[0], set[tuple[str, int, str]]()  # file, batch, column

    def read(needed: pa.Schema, condition: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        in_files = part_schema(link.specs)
        of_file = pa.schema([in_files.field(name) for name in needed.names])
        if len(table.links) == 1:
            shards = shards_that_meet(link.catalogs, link.entry.name, schema, condition)
            batches = _columns_of(link, of_file, shards, checked)
        else:
            batches = _merged_columns(table, of_file)
        return (numbers_of(batch, needed, link.specs) for batch in batches) if as_numbers else batches

    return StreamedDataset(schema, read)


def _merged_columns(table: ChainTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    link = table.links[0]
    for batch in table.all_rows([slot for slot in link.slots if slot in schema.names]):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns[TABLE] = table_column(link.entry.name, len(batch))
        yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _columns_of(
    table: TableReader, schema: pa.Schema, shards: Sequence[Catalog], checked: set[tuple[str, int, str]]
) -> Iterator[pa.RecordBatch]:
    """Yield columns of some shards in file order; add to ``checked`` the columns that need no further check."""
    columns_of_file = [name for name in schema.names if name != TABLE]
    readers, slots = LinkBatches(table.storage, table.directory), frozenset(columns_of_file) - {ID}

    def read(at: tuple[Part, int]) -> pa.RecordBatch:
        part, number = at
        reader = readers.reader(part, table.entry.slots, slots)
        new = [name for name in columns_of_file if (part.file, number, name) not in checked]
        values = reader.read(number, new)
        ids = np.frombuffer(values[ID], np.int64)
        for found, expected in check_range(ids, part.batches[number]) if ID in new else ():
            raise reader.damage(number, found, expected)
        columns = reader.arrays(number, values)
        if reader.mapped is not None:
            checked.update((part.file, number, name) for name in new)
        if TABLE in schema.names:  # the catalog is already checked, so its table name is trusted
            columns[TABLE] = table_column(table.entry.name, part.batches[number].rows)
        return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)

    parts = (each for shard in shards for each in shard.parts_of(table.entry.name, "rows"))
    every = [(part, number) for part, numbers in parts for number in numbers]
    return made_ahead(read, every, min(table.storage.threads(_THREADS), len(every)))


def numbers_of(batch: pa.RecordBatch, schema: pa.Schema, slots: Iterable[SlotSpec]) -> pa.RecordBatch:
    specs, columns = {slot.name: slot for slot in slots}, []
    for name in schema.names:
        array, spec = batch.column(name), specs.get(name)
        if spec is not None and _as_number(spec) != spec:
            values = np.ascontiguousarray(column_values(array, spec), np.float32)
            array = column_array(_as_number(spec), pa.py_buffer(values), len(array))
        columns.append(array)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _needed(schema: pa.Schema, columns: Any, condition: ds.Expression | None) -> list[str]:
    """Return the columns that a scan needs. There is at least one, because a batch needs a column to count rows."""
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


def numbers_schema(slots: Iterable[SlotSpec]) -> pa.Schema:  # has float32 in place of float16 and bfloat16
    return table_schema(map(_as_number, slots))


def has_halves(slots: Iterable[SlotSpec]) -> bool:
    return any(_as_number(slot) != slot for slot in slots)


def _as_number(slot: SlotSpec) -> SlotSpec:
    return replace(slot, dtype="float32") if slot.dtype in ("float16", "bfloat16") else slot


def _both(one: ds.Expression | None, other: ds.Expression | None) -> ds.Expression | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


class _NoFile(io.RawIOBase):
    """A stand-in for a file, which raises an error when Arrow reads rows without the scanner.

    Only ``read`` raises. Arrow asks for the size of each file at once and would keep an error from there permanently;
    the traceback of that error would keep the dataset and its open files alive.
    """

    _SIZE = 1 << 20  # bytes: large enough for an Arrow footer, so that Arrow goes on to read

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
            "Arrow cannot read these rows itself, because recckpt checks them, and merges deltas, while reading: "
            "query to_table(), to_batches() or scanner() of the dataset, write it with write_dataset() and query that, "
            "or open a full checkpoint with checked=False"
        )
