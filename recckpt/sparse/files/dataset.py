"""A table as a dataset of Arrow, for others to query: its parts, or the merged rows of a chain (no torch)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from recckpt.format.catalog import Catalog
from recckpt.sparse.files.arrow_format import TABLE, column_array, column_values, part_schema
from recckpt.sparse.files.chain_table import ChainTable
from recckpt.sparse.files.checked_columns import CheckedColumns, columns_schema, table_column
from recckpt.sparse.files.met_shards import shards_that_meet, with_ids_in
from recckpt.sparse.files.table_reader import TableReader, table_schema
from recckpt.types import SlotSpec


def dataset_of(table: ChainTable, *, checked: bool = True) -> ds.Dataset:
    """Return the rows of a table as a dataset that Arrow, polars and duckdb query by themselves.

    What a query reads is checked. With ``checked=False`` Arrow reads the parts of a single link by itself, as they are.

    Raises:
        CorruptCheckpointError: where one link holds all rows: a part is missing, cut, of another schema or compressed,
            or an id is in two shards.
    """
    return CheckedDataset(table) if checked or len(table.links) > 1 else _of_parts(table.links[0])


def _of_parts(table: TableReader) -> ds.Dataset:
    """Return the parts of a table as they are."""
    table.check_shards()
    name, file_format = table.entry.name, ds.IpcFileFormat()
    fragments, is_shared = [], False
    for part, numbers in (each for catalog in table.catalogs for each in catalog.parts_of(name, "rows")):
        ranges = [part.batches[number].ids for number in numbers]
        ids = with_ids_in((min(least for least, _ in ranges), max(greatest for _, greatest in ranges)))
        fragments.append(file_format.make_fragment(table.part(part).source(), partition_expression=ids))
        is_shared |= len(numbers) < len(part.batches)
    dataset = ds.FileSystemDataset(fragments, part_schema(table.entry.slots), file_format)
    return dataset.filter(ds.field(TABLE) == name) if is_shared else dataset  # a filter copies what it lets through


class CheckedDataset(ds.FileSystemDataset):  # type: ignore[misc]  # Arrow has no types
    """Rows that are checked for each query, those of a chain merged; polars, duckdb and pandas use its ``scanner``.

    What goes past that, such as joins of pyarrow, asks the one fragment for rows, which says what to do instead.

    Attributes:
        problem: the error that a query has met last, of which others may make one of their own.
    """

    problem: Exception | None = None

    def __init__(self, table: ChainTable, condition: ds.Expression | None = None) -> None:
        file_format = ds.IpcFileFormat()
        fragment = file_format.make_fragment(pa.PythonFile(_NoFile(), "r"))
        super().__init__([fragment], self._schema_of(table.links[0].specs), file_format)
        self._table, self._condition = table, condition
        self._columns = CheckedColumns(table.links[0]) if len(table.links) == 1 else None

    def scanner(
        self, columns: Any = None, filter: ds.Expression | None = None, *, cache_metadata: bool = True, **options: Any
    ) -> ds.Scanner:
        """Return a scan of the rows, as that of any dataset.

        Columns that it does not need are not read, and of a single link no shards in which no id meets the filter.
        """
        condition = _both(self._condition, filter)
        needed = _needed(self.schema, columns, condition)
        schema = pa.schema([self.schema.field(name) for name in needed])
        link = self._table.links[0]
        shards = shards_that_meet(link.catalogs, link.entry.name, self.schema, condition)
        batches = self._noting_problems(self._batches_of(schema, shards))
        return ds.Scanner.from_batches(batches, schema=schema, columns=columns, filter=condition, **options)

    def count_rows(self, filter: ds.Expression | None = None, **options: Any) -> int:
        """Return the number of rows; reads what the filter needs."""
        return int(self.scanner(columns=[], filter=filter, **options).count_rows())

    def filter(self, expression: ds.Expression) -> CheckedDataset:
        """Return the dataset of those rows for which this holds."""
        return type(self)(self._table, _both(self._condition, expression))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a dataset of open files cannot be pickled; open one in each process")

    def _schema_of(self, slots: Sequence[SlotSpec]) -> pa.Schema:
        return part_schema(slots)

    def _batches_of(self, schema: pa.Schema, shards: Sequence[Catalog]) -> Iterator[pa.RecordBatch]:
        return self._read(schema.names, shards)

    def _noting_problems(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except Exception as error:
            self.problem = error.with_traceback(None)
            raise

    def _read(self, names: Sequence[str], shards: Sequence[Catalog]) -> Iterator[pa.RecordBatch]:
        """Yield columns as the files have them, where one link holds all rows of these shards, else of all."""
        if self._columns is not None:
            yield from self._columns.batches(names, shards)
            return
        table = self._table.with_slots([slot for slot in self._table.links[0].slots if slot in names])
        for batch in table.all_rows():
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns[TABLE] = table_column(table.links[0].entry.name, len(batch))
            yield pa.RecordBatch.from_arrays(
                [columns[name] for name in names], schema=columns_schema(table.links[0].specs, names)
            )


class NumbersDataset(CheckedDataset):
    """Rows of any table with float16 and bfloat16 as float32, and no column of its name.

    For those that know neither dtype, and would take one for an error and the other for whole numbers.
    """

    def _schema_of(self, slots: Sequence[SlotSpec]) -> pa.Schema:
        return table_schema(map(_as_number, slots))

    def _batches_of(self, schema: pa.Schema, shards: Sequence[Catalog]) -> Iterator[pa.RecordBatch]:
        specs = {spec.name: spec for spec in self._table.links[0].specs}
        for batch in self._read(schema.names, shards):
            columns = [
                _numbers(array, specs.get(name)) for name, array in zip(schema.names, batch.columns, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _numbers(array: pa.Array, spec: SlotSpec | None) -> pa.Array:
    """Return a column with float32 in the place of 16 bits."""
    if spec is None or _as_number(spec) == spec:
        return array
    values = np.ascontiguousarray(column_values(array, spec), np.float32)
    return column_array(_as_number(spec), pa.py_buffer(values), len(array))


def _needed(schema: pa.Schema, columns: Any, condition: ds.Expression | None) -> list[str]:
    """Return the columns without which a scan cannot be made; one where it needs none, for the number of rows."""
    if columns is None:
        return list(schema.names)
    names = [name for name in schema.names if not _scans(schema, name, columns, condition)]
    return names or schema.names[:1]


def _scans(schema: pa.Schema, without: str, columns: Any, condition: ds.Expression | None) -> bool:
    """Say whether a scan can be made without a column."""
    rest = pa.schema([field for field in schema if field.name != without])
    try:
        ds.Scanner.from_batches([], schema=rest, columns=columns, filter=condition)
    except (pa.ArrowInvalid, KeyError):
        return False
    return True


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
