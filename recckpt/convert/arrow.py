"""Reads Arrow files (Feather), Arrow streams, and directories of them; maps columns to ids, vectors and slots."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from recckpt.convert.source import (
    ID_REMEDY,
    Array,
    ImportOptions,
    ImportSource,
    LeftOut,
    SourceContents,
    SourceRows,
    SourceTable,
    int64_ids,
)
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.target_files import check_is_one_table
from recckpt.errors import ConversionError
from recckpt.sparse.files.arrow_format import DTYPE_KEY
from recckpt.text import nearest
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec

_RESERVED = frozenset({"table", "op"})
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}  # Arrow's name -> name here
Batches = Callable[[str], Iterator[pa.RecordBatch]]
_SUFFIXES = (".arrow", ".feather", ".ipc", ".arrows")
_MAGIC = b"ARROW1"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # end marker of a stream


class Columns:
    """Maps the columns of files of rows to ids and slots, as the types in the first batch determine.

    ConversionError if a column is missing or has a type that slots do not support.
    """

    def __init__(self, first: pa.RecordBatch, options: ImportOptions, path: str) -> None:
        self.schema = schema = first.schema
        self._ids, self._path = options.ids, path
        for column, what in ((options.ids, "ids"), (options.embedding, "vectors")):
            if schema.names.count(column) != 1:
                found = f"{schema.names.count(column)} columns {column!r}, which are to be the {what}; {schema.names}"
                remedy = f"name the column{nearest(column, schema.names)}"
                raise ConversionError(path, "", found=found, expected="one column", remedy=remedy)
        others = [name for name in schema.names if name not in (options.ids, options.embedding)]
        unknown = [name for name in options.slots or () if name not in others]
        if unknown:
            remedy = f"name other columns{nearest(unknown[0], others)}"
            raise ConversionError(path, "", found=f"slots {unknown}", expected=f"some of {others}", remedy=remedy)
        self.unasked = [name for name in others if options.slots is not None and name not in options.slots]
        names = [name for name in others if name not in self.unasked and name not in _RESERVED]
        self._names = [options.embedding, *names]
        slots = [EMBEDDING, *names]
        self.left_out = [name for name in schema.names if name in _RESERVED and name not in self.unasked]
        if len(set(slots)) < len(slots):
            raise ConversionError(path, "", found=f"columns {schema.names}", expected="different names of slots")
        pairs = zip(slots, self._names, strict=True)
        self.slots = tuple(self._slot(slot, schema.field(name), first.column(name)) for slot, name in pairs)

    def rows(self, batch: pa.RecordBatch) -> SourceRows:
        """Return the rows of a batch; ConversionError for nulls, or for types other than those of the first batch."""
        for column in (self._ids, *self._names):
            if batch.column(column).null_count:
                raise ConversionError(self._path, f"column {column!r}", found="nulls", expected="a value in each row")
        ids = batch.column(self._ids)
        if not pa.types.is_integer(ids.type):
            where, found = f"column {self._ids!r}", f"ids of {ids.type}"
            raise ConversionError(self._path, where, found=found, expected="integers", remedy=ID_REMEDY)
        columns = [self._values(batch.column(n), slot) for n, slot in zip(self._names, self.slots, strict=True)]
        return SourceRows(int64_ids(ids.to_numpy(zero_copy_only=False), self._path, f"column {self._ids!r}"), columns)

    def _slot(self, slot: str, field: pa.Field, first: pa.Array) -> SlotSpec:
        kind: pa.DataType = field.type
        shape: tuple[int, ...] = ()
        if isinstance(kind, pa.FixedShapeTensorType):
            kind, shape = kind.value_type, tuple(kind.shape)
            if field.type.permutation not in (None, list(range(len(shape)))):
                raise self._wrong(field, "a tensor in row-major order")
        elif pa.types.is_fixed_size_list(kind):
            kind, shape = kind.value_type, (kind.list_size,)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            if not first[0].is_valid:
                raise self._wrong(field, "a first row whose lists are not empty")
            kind, shape = kind.value_type, (len(first[0]),)
        dtype = _DTYPES.get(str(kind), str(kind))
        if (field.metadata or {}).get(DTYPE_KEY) == b"bfloat16":
            dtype = "bfloat16"
        if dtype not in ITEM_BYTES or 0 in shape:
            raise self._wrong(field, f"numbers of {', '.join(ITEM_BYTES)}, or lists of them of one length")
        spec = SlotSpec(slot, dtype, shape)
        if spec.row_bytes >= 2**31:
            raise self._wrong(field, "rows below 2 GiB")
        return spec

    def _wrong(self, field: pa.Field, expected: str) -> ConversionError:
        where, remedy = f"column {field.name!r}", "choose other columns by slots"
        return ConversionError(self._path, where, found=f"{field.type}", expected=expected, remedy=remedy)

    def _values(self, column: pa.Array, slot: SlotSpec) -> Array:
        flat, n_rows = column, len(column)
        if isinstance(flat, pa.ExtensionArray):
            flat = flat.storage
        if pa.types.is_list(flat.type) or pa.types.is_large_list(flat.type):
            lengths = np.diff(flat.offsets.to_numpy())
            if (lengths != slot.shape[0]).any():
                odd = int(lengths[lengths != slot.shape[0]][0])
                where = f"column {slot.name!r}"
                raise ConversionError(self._path, where, found=f"a list of {odd}", expected=f"{slot.shape[0]} in each")
        if flat.type.num_fields:
            flat = flat.flatten()
        if flat.null_count:
            raise ConversionError(self._path, f"column {slot.name!r}", found="nulls", expected="a value in each place")
        values: Array = flat.to_numpy(zero_copy_only=False)
        if slot.dtype == "bfloat16" and values.dtype == np.float32:  # an export widens bfloat16 to float32
            values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return values.reshape(n_rows, *slot.shape)


def file_rows(
    format: str, files: SourceFiles, names: Sequence[str], batches: Batches, options: ImportOptions, *, n_rows: int
) -> ImportSource:
    """Return a source of one table in files of rows that share one schema and have ``n_rows`` rows in total.

    ConversionError if there is no row to show the types of the columns, or a table cannot have these columns.
    """
    with whole(files, names[0]):
        first = next((batch for name in names for batch in batches(name) if batch.num_rows), None)
    if first is None:
        raise ConversionError(files.url, "", found="no rows", expected="one at least", remedy="")
    columns = Columns(first, options, files.url)

    def rows(table: SourceTable) -> Iterator[SourceRows]:
        for name in names:
            with whole(files, name):
                for batch in batches(name):
                    if not batch.schema.equals(columns.schema):
                        found, expected = batch.schema.names, columns.schema.names
                        if found == expected:
                            found, expected = batch.schema.types, columns.schema.types
                        path, remedy = files.path(name), "make all files of a table alike"
                        raise ConversionError(path, "its columns", found=found, expected=expected, remedy=remedy)
                    if batch.num_rows:
                        yield columns.rows(batch)

    left = [LeftOut(f"column {name}", "a name that slots cannot have") for name in columns.left_out]
    left += [LeftOut(f"column {name}", "not asked for") for name in columns.unasked]
    left += files.beside(names, format)
    table = SourceTable(options.table or files.stem, n_rows, columns.slots)
    return ImportSource(SourceContents(format, (table,), left_out=tuple(left)), rows)


@contextmanager
def whole(files: SourceFiles, name: str, kind: str = "file") -> Iterator[None]:
    """Turn an error of Arrow in the block into a ConversionError that names the file."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, EOFError) as error:
        found = f"what Arrow cannot read ({error!s:.200})"
        raise ConversionError(files.path(name), "", found=found, expected=f"a whole {kind}") from error


def recognises(files: SourceFiles) -> bool:
    return bool(files.ending(*_SUFFIXES))


def open_source(files: SourceFiles, options: ImportOptions) -> ImportSource:
    names = list(files.names) if files.is_file else files.ending(*_SUFFIXES)

    def batches(name: str) -> Iterator[pa.RecordBatch]:
        with files.open(name) as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - len(_END)))
                if not file.read().endswith(_END):  # cut between two batches, it reads as whole
                    raise pa.ArrowInvalid("a stream without an end marker: cut short, or its writer was not closed")
                file.seek(0)
                batches = iter(pa.ipc.open_stream(file))
            yield from (batch.replace_schema_metadata(None) for batch in batches)

    check_is_one_table(files, names)
    n_rows = 0
    for name in names:
        with whole(files, name, "Arrow file"):
            n_rows += sum(batch.num_rows for batch in batches(name))
    return file_rows("arrow", files, names, batches, options, n_rows=n_rows)
