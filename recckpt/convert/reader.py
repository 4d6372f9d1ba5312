"""``recckpt.convert.SourceReader``: reads files of other programs without importing them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.convert.formats import open_source
from recckpt.convert.source import (
    STEP_BYTES,
    Array,
    ImportOptions,
    Int64s,
    SourceContents,
    SourceRows,
    SourceTable,
    SourceTensor,
)
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.tensor_source import TensorTable, tensor_source
from recckpt.errors import ConversionError
from recckpt.format.buckets import distinct, is_among
from recckpt.format.tensor_index import NUMPY_DTYPES, widened
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.chain_table import AlignedRows, as_ids, rows_of_default
from recckpt.sparse.files.table_reader import asked_slots, record_batch, table_schema
from recckpt.text import instead_of, nearest, plural, shown
from recckpt.types import EMBEDDING, SlotSpec

if TYPE_CHECKING:
    from recckpt.sparse.files.dataset import StreamedDataset

Ids = Iterable[int] | npt.NDArray[np.integer[Any]]


class SourceReader(AbstractContextManager["SourceReader"]):
    """Reads files of another program as :class:`recckpt.CheckpointReader` reads a checkpoint; nothing is written.

    A dense tensor of one dimension or more, of a dtype that slots support, is also a table: the row index is the id,
    and the row is the slot ``embedding``. There are no checksums, so damage to values is not noticed. A look-up reads
    the whole table; in a tensor, only the requested rows. Files of ``torch.save`` and DCP need torch. Not
    thread-safe.

    Args:
        path: a file or directory of a format in ``recckpt.convert.SOURCES``; any fsspec URL.
        format: name of the format; None to recognise it by the files.
        options: facts that the source does not state, as for an import.

    Attributes:
        path: path or URL of the source.
        contents: what the source contains.
        with_rows: the names of the tables, and of the tensors that are also tables.

    Raises:
        ConversionError: no format is recognised, or a file is damaged.
        MissingLibraryError: the format needs torch, which is not installed.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, format: str | None = None, options: ImportOptions | None = None
    ) -> None:
        self.path = os.fspath(path)
        source = open_source(SourceFiles(self.path), format, options or ImportOptions())
        self.contents: SourceContents = source.contents
        self._tensors = {tensor.name: tensor for tensor in source.contents.dense}
        self._tables = {table.name: (table, source.rows) for table in source.contents.tables}
        for tensor in source.contents.dense:
            with suppress(ConversionError):  # skips scalars, and dtypes that slots do not support
                of_rows = TensorTable(tensor.name, None, {EMBEDDING: tensor})
                rows = tensor_source(SourceContents(""), {}, [of_rows], self.path)
                self._tables.setdefault(tensor.name, (rows.contents.tables[0], rows.rows))
        self.with_rows = tuple(self._tables)

    @shown
    def __repr__(self) -> str:
        tables, tensors = plural(len(self.tables()), "table"), plural(len(self._tensors), "dense tensor")
        return f"{self.path}: {self.contents.format}, {tables}, {tensors}"

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""

    def tables(self) -> list[str]:
        """Return the names of the tables, without the tensors that are also tables."""
        return [table.name for table in self.contents.tables]

    def slots(self, name: str) -> Sequence[SlotSpec]:
        """Return the slots of a table."""
        return self._table(name).slots

    def schema(self, name: str, columns: Collection[str] | None = None) -> pa.Schema:
        """Return the Arrow schema of the batches of a table: ``id`` and one column per slot."""
        return table_schema(slot for slot in self.slots(name) if columns is None or slot.name in columns)

    def table(
        self, name: str, columns: Collection[str] | None = None, ids: Ids | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table, or of a tensor, as Arrow batches, in the order of the source.

        Args:
            name: the table or tensor.
            columns: slots to read beside ``id``; None for all.
            ids: yield only the rows of these ids; None for all rows.

        Raises:
            KeyError: there is no such table, tensor or slot.
            TypeError: ``ids`` are not int64 numbers, or ``columns`` is a single name.
            ConversionError: a file is damaged.
        """
        table = self._table(name)
        slots = asked_slots(name, table.slots, columns)
        sought = None if ids is None else distinct(as_ids(ids))
        return (_batch(rows, table, slots) for rows in self._rows(table, sought))

    def lookup(self, name: str, ids: Ids, slot: str = EMBEDDING, default: Any = 0) -> AlignedRows:
        """Return one row for each of ``ids``, in their order, and a mask of the ids that the table has.

        Arguments and result are those of :meth:`recckpt.CheckpointReader.lookup`.

        Raises:
            KeyError: there is no such table, tensor or slot.
            TypeError, ValueError: an argument has a wrong type, or ``default`` does not fit the slot.
            ConversionError: a file is damaged.
        """
        sought, specs = as_ids(ids), {spec.name: spec for spec in self.slots(name)}
        if slot not in specs:
            raise KeyError(f"table {name!r} has no slot {slot!r}; it has {[*specs]}{nearest(slot, specs)}")
        is_bfloat16 = specs[slot].dtype == "bfloat16"
        values: Array = rows_of_default(default, len(sought), name, specs[slot])
        is_there = np.zeros(len(sought), np.bool_)
        for rows in self._rows(self._table(name), distinct(sought)):
            order = np.argsort(rows.ids)
            here = is_among(sought, rows.ids[order])
            column = rows.columns[[*specs].index(slot)][order[np.searchsorted(rows.ids[order], sought[here])]]
            values[here], is_there[here] = widened(column) if is_bfloat16 else column, True
        return AlignedRows(values, is_there)

    def dataset(self, name: str) -> StreamedDataset:
        """Return the rows of a table or tensor as a ``pyarrow.dataset.Dataset``, read anew for each query.

        float16 and bfloat16 are returned as float32.

        Raises:
            KeyError: there is no such table or tensor.
        """
        from recckpt.sparse.files.dataset import StreamedDataset, numbers_of, numbers_schema  # slow import

        slots = self.slots(name)

        def read(schema: pa.Schema, _: object) -> Iterator[pa.RecordBatch]:
            names = [column for column in schema.names if column != ID]
            return (numbers_of(batch, schema, slots) for batch in self.table(name, names))

        return StreamedDataset(numbers_schema(slots), read)

    def tensor_names(self) -> list[str]:
        """Return the names of the dense tensors."""
        return list(self._tensors)

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a dense tensor."""
        return self._tensor(name).shape

    def tensor_dtype(self, name: str) -> str:
        """Return the dtype of a dense tensor, such as ``float32``."""
        return self._tensor(name).dtype

    def read_tensor(self, name: str) -> Array:
        """Return a dense tensor, whole, as a numpy array; bfloat16 comes as uint16 bit patterns.

        Raises:
            KeyError: there is no such tensor.
            ConversionError: a file is damaged.
        """
        return self._tensor(name).whole()

    def read_through(self, item: SourceTable | SourceTensor) -> Iterator[int]:
        """Internal: read a whole table or tensor in steps, and yield the number of bytes of each step.

        Raises:
            ConversionError: a file is damaged, or its contents differ from what the source declares.
        """
        if isinstance(item, SourceTable):
            n_rows = 0
            for rows in self._rows(item):
                yield len(rows.ids) * item.row_bytes
                n_rows += len(rows.ids)
            if n_rows != item.n_rows:
                found, expected = plural(n_rows, "row"), f"{item.n_rows}, as the source says"
                raise ConversionError(self.path, f"table {item.name!r}", found=found, expected=expected)
            return
        n_rows = item.shape[0] if item.shape else 1
        step = max(1, STEP_BYTES * n_rows // max(1, item.nbytes))
        for begin in range(0, n_rows, step):
            end = min(begin + step, n_rows)
            values, shape = item.read(begin, end), (end - begin, *item.shape[1:])
            if (values.dtype, values.shape) != (NUMPY_DTYPES[item.dtype], shape):
                found, expected = f"{values.dtype} {values.shape}", f"{item.dtype} {shape}"
                raise ConversionError(self.path, f"tensor {item.name!r}", found=found, expected=expected)
            yield len(values.tobytes())  # reads values that were only mapped

    def _tensor(self, name: str) -> SourceTensor:
        if name not in self._tensors:
            raise KeyError(f"no dense tensor {name!r} in {self.path}{instead_of(name, self._tensors)}")
        return self._tensors[name]

    def _table(self, name: str) -> SourceTable:
        if name not in self._tables:
            raise KeyError(f"no table or tensor with rows {name!r} in {self.path}{instead_of(name, self._tables)}")
        return self._tables[name][0]

    def _rows(self, table: SourceTable, ids: Int64s | None = None) -> Iterator[SourceRows]:
        """Yield all rows; with sorted, distinct ``ids``, only their rows."""
        if ids is None or table in self.contents.tables:
            for rows in self._tables[table.name][1](table):
                kept = slice(None) if ids is None else np.flatnonzero(is_among(rows.ids, ids))
                yield SourceRows(rows.ids[kept], [column[kept] for column in rows.columns]).checked(table)
            return
        numbers = ids[(ids >= 0) & (ids < table.n_rows)]
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
        for run in (run for run in runs if len(run)):
            values = self._tensors[table.name].read(int(run[0]), int(run[-1]) + 1)
            yield SourceRows(run, [values]).checked(table)


def _batch(rows: SourceRows, table: SourceTable, slots: Sequence[SlotSpec]) -> pa.RecordBatch:
    columns = {spec.name: column for spec, column in zip(table.slots, rows.columns, strict=True)}
    return record_batch(slots, [rows.ids, *(columns[spec.name] for spec in slots)])
