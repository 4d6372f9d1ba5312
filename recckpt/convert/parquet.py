"""Reads and writes Parquet: columns of ids, vectors, and other slots; an export has one directory per table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pyarrow as pa

from recckpt.convert.arrow import file_rows, whole
from recckpt.convert.source import ImportOptions, ImportSource, LeftOut
from recckpt.convert.source_files import SourceFiles
from recckpt.convert.target_files import (
    DELETES,
    FORMAT,
    TargetFiles,
    check_is_one_table,
    check_is_whole,
    file_name,
)
from recckpt.convert.view import Export, TableView, in_float32, numbers
from recckpt.errors import ConversionError
from recckpt.sparse.files.arrow_format import DTYPE_KEY, column_array, slot_field
from recckpt.storage import SinkFile
from recckpt.text import Progress

ALL_SLOTS, INCREMENTS, DTYPES = False, True, ("float16", "int8")  # Parquet has no bfloat16
_SUFFIXES = (".parquet", ".pq")
_KEY = b"recckpt"  # key of an export's metadata in a file; part of the format
_BATCH_ROWS, _FILE_BYTES = 16_384, 1 << 30


def recognises(files: SourceFiles) -> bool:
    return bool(files.ending(*_SUFFIXES))


def open_source(files: SourceFiles, options: ImportOptions) -> ImportSource:
    from pyarrow import parquet  # slow import

    names = list(files.names) if files.is_file else files.ending(*_SUFFIXES)

    def batches(name: str) -> Iterator[pa.RecordBatch]:
        with files.open(name) as file:
            for batch in parquet.ParquetFile(file).iter_batches(_BATCH_ROWS):
                yield batch.replace_schema_metadata(None)  # metadata differs from file to file

    check_is_one_table(files, names)
    n_rows, tables = 0, set[str]()
    for name in names:
        with whole(files, name, "Parquet file"), files.open(name) as file:
            opened = parquet.ParquetFile(file)
            n_rows += opened.metadata.num_rows
            tables.add(_exported_table(opened.schema_arrow, files.path(name)))
    if len(tables) > 1:
        found, remedy = f"tables {sorted(tables)}", "name the directory of one table"
        raise ConversionError(files.url, "", found=found, expected="one table", remedy=remedy)
    return file_rows("parquet", files, names, batches, options, n_rows=n_rows)


def _exported_table(schema: pa.Schema, path: str) -> str:
    """Return the name of the table that recckpt exported to this file; "" for files of other programs."""
    try:
        record = json.loads((schema.metadata or {}).get(_KEY, b"{}"))
    except ValueError:
        return ""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return ""
    check_is_whole(record, path)
    return str(record.get("table", ""))


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write all tables; for an increment, also a directory with each table's deleted ids."""
    of_ids = pa.field("id", pa.int64(), nullable=False)
    for table in export.tables:
        fields = [of_ids]
        for slot in table.slots:
            field = slot_field(in_float32(slot))
            fields.append(field.with_metadata({DTYPE_KEY: b"bfloat16"}) if slot.dtype == "bfloat16" else field)
        schema = pa.schema(fields)
        record = {**export.checkpoint, "table": table.name, **table.description()}
        _write(files, schema, file_name(table.name), _batches(table, schema, progress), record)
        if table.deletes is not None:
            schema = pa.schema([of_ids])
            gone = (pa.RecordBatch.from_arrays([pa.array(each)], schema=schema) for each in table.deletes())
            _write(files, schema, file_name(table.name + DELETES), gone, export.checkpoint)
    return export.no_dense("Parquet has only rows; use safetensors")


def _batches(table: TableView, schema: pa.Schema, progress: Progress) -> Iterator[pa.RecordBatch]:
    for rows in table.rows(progress):
        arrays = [pa.array(rows.ids)]
        for slot, column in zip(table.slots, rows.columns, strict=True):
            values = pa.py_buffer(numbers(column, slot).tobytes())
            arrays.append(column_array(in_float32(slot), values, len(rows.ids)))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _write(
    files: TargetFiles,
    schema: pa.Schema,
    directory: str,
    batches: Iterator[pa.RecordBatch],
    record: Mapping[str, object],
) -> None:
    """Write files of about a gigabyte each; at least one file, so that readers find the columns."""
    from pyarrow import parquet  # slow import

    described = schema.with_metadata({_KEY: json.dumps(record)})
    number, batch = 0, next(batches, None)
    while batch is not None or not number:
        with ExitStack() as stack:
            sink = stack.enter_context(files.create(directory, f"part-{number:05d}.parquet"))
            to = pa.PythonFile(SinkFile(sink), "w")
            writer = stack.enter_context(parquet.ParquetWriter(to, described))
            while batch is not None and sink.n_bytes < _FILE_BYTES:
                writer.write_batch(batch)
                batch = next(batches, None)
        number += 1
