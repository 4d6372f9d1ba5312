"""A table as a dataset of Arrow, for others to query: its parts, or the merged rows of a chain (no torch)."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from recckpt.sparse.files.arrow_format import ID, TABLE, column_array, column_values, part_schema
from recckpt.sparse.files.chain_table import ChainTable
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.table_reader import TableReader, table_schema
from recckpt.types import SlotSpec


def dataset_of(table: ChainTable) -> ds.Dataset:
    """Return the rows of a table as a dataset that Arrow, polars and duckdb query by themselves.

    Raises:
        CorruptCheckpointError: where one link holds all rows: a part is missing, cut, of another schema or compressed,
            or an id is in two shards.
    """
    return _of_parts(table.links[0]) if len(table.links) == 1 else ChainDataset(table)


def _of_parts(table: TableReader) -> ds.Dataset:
    """Return the parts of a table as they are."""
    table.check_shards()
    name, file_format = table.entry.name, ds.IpcFileFormat()
    fragments, is_shared = [], False
    for part, numbers in (found for catalog in table.catalogs for found in catalog.parts_of(name, "rows")):
        reader = PartReader(table.storage, table.directory, part, table.entry.slots)
        fragments.append(file_format.make_fragment(reader.source()))
        is_shared |= len(numbers) < len(part.batches)
    found = ds.FileSystemDataset(fragments, part_schema(table.entry.slots), file_format)
    return found.filter(ds.field(TABLE) == name) if is_shared else found  # a filter copies what it lets through


class ChainDataset(ds.FileSystemDataset):  # type: ignore[misc]  # Arrow has no types
    """Rows that are merged, and checked, anew for each query; polars, duckdb and pandas query it by its ``scanner``.

    What goes past that, such as joins of pyarrow, asks the one fragment for rows, which says what to do instead.
    """

    def __init__(self, table: ChainTable, condition: ds.Expression | None = None) -> None:
        file_format = ds.IpcFileFormat()
        fragment = file_format.make_fragment(pa.PythonFile(_NoFile(), "r"))
        super().__init__([fragment], self._schema_of(table.links[0].specs), file_format)
        self._table, self._condition = table, condition

    def scanner(
        self, columns: Any = None, filter: ds.Expression | None = None, *, cache_metadata: bool = True, **options: Any
    ) -> ds.Scanner:
        """Return a scan of the rows, as that of any dataset; slots that it does not name are not read."""
        every = self._table.links[0].slots
        named: Collection[str] = every if columns is None else [slot for slot in every if slot in columns]
        condition = _both(self._condition, filter)
        try:
            return self._scan([slot for slot in every if slot in named], columns, condition, options)
        except pa.ArrowInvalid:  # filters and expressions may name others
            return self._scan(every, columns, condition, options)

    def filter(self, expression: ds.Expression) -> ChainDataset:
        """Return the dataset of those rows for which this holds."""
        return type(self)(self._table, _both(self._condition, expression))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a dataset of open files cannot be pickled; open one in each process")

    def _scan(
        self, slots: Collection[str], columns: Any, condition: ds.Expression | None, options: dict[str, Any]
    ) -> ds.Scanner:
        table = self._table.with_slots(list(slots))
        schema, batches = self._schema_of(table.links[0].specs), self._batches_of(table)
        return ds.Scanner.from_batches(batches, schema=schema, columns=columns, filter=condition, **options)

    def _schema_of(self, slots: Sequence[SlotSpec]) -> pa.Schema:
        return part_schema(slots)

    def _batches_of(self, table: ChainTable) -> Iterator[pa.RecordBatch]:
        return _with_name(table, part_schema(table.links[0].specs))


class NumbersDataset(ChainDataset):
    """Rows of any table, checked for each query, with float16 and bfloat16 as float32, and no column of its name.

    For those that know neither dtype, and would take one for an error and the other for whole numbers.
    """

    def _schema_of(self, slots: Sequence[SlotSpec]) -> pa.Schema:
        return table_schema(map(_as_number, slots))

    def _batches_of(self, table: ChainTable) -> Iterator[pa.RecordBatch]:
        specs = table.links[0].specs
        schema = self._schema_of(specs)
        for batch in table.all_rows():
            columns = [batch.column(ID)]
            for spec in specs:
                column = batch.column(spec.name)
                if _as_number(spec) != spec:
                    values = np.ascontiguousarray(column_values(column, spec), np.float32)
                    column = column_array(_as_number(spec), pa.py_buffer(values), len(column))
                columns.append(column)
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def has_halves(slots: Iterable[SlotSpec]) -> bool:
    """Say whether a slot has values of 16 bits that are no whole numbers."""
    return any(_as_number(slot) != slot for slot in slots)


def _as_number(slot: SlotSpec) -> SlotSpec:
    return replace(slot, dtype="float32") if slot.dtype in ("float16", "bfloat16") else slot


def _both(one: ds.Expression | None, other: ds.Expression | None) -> ds.Expression | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _with_name(table: ChainTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the merged rows as parts have them: with a column that names their table."""
    names = pa.array([table.links[0].entry.name])
    for batch in table.all_rows():
        numbers = pa.array(np.zeros(batch.num_rows, np.int16))
        columns = {TABLE: pa.DictionaryArray.from_arrays(numbers, names)}
        columns |= {name: batch.column(name) for name in batch.schema.names}
        yield pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)


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
            "the rows of a delta lie in several checkpoints: query to_table(), to_batches(), or "
            "scanner() of the dataset, or write it with write_dataset() and query that"
        )
