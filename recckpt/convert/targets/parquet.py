"""Parquet: a directory a table, with ``id`` and a column a slot; of an increment, the deleted ids in one beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pyarrow as pa

from recckpt.convert.source import LeftOut, SourceRows
from recckpt.convert.target_files import DELETES, RECORDS, TargetFiles, file_name
from recckpt.convert.view import Export, TableView
from recckpt.format.dtypes import widened
from recckpt.sparse.files.arrow_format import DTYPE_KEY, column_array, slot_field
from recckpt.storage import SinkFile
from recckpt.text import Progress
from recckpt.types import SlotSpec

ALL_SLOTS, INCREMENTS, DTYPES = False, True, ("float16", "int8")  # Parquet has no bfloat16
METADATA_KEY = "recckpt"  # part of the format
_FILE_BYTES = 1 << 30


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write all tables."""
    for table in export.tables:
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *map(_field, table.slots)])
        record = {**export.checkpoint, "table": table.name, **table.description()}
        _write(files, schema, file_name(table.name), _batches(table, schema, progress), record)
        if table.deletes is not None:
            ids = pa.schema([pa.field("id", pa.int64(), nullable=False)])
            gone = (pa.RecordBatch.from_arrays([pa.array(each)], schema=ids) for each in table.deletes())
            _write(files, ids, file_name(table.name + DELETES), gone, export.checkpoint)
    files.put_json(export.metadata(), RECORDS["parquet"])
    return export.no_dense("Parquet is for rows; use safetensors")


def _write(
    files: TargetFiles,
    schema: pa.Schema,
    directory: str,
    batches: Iterator[pa.RecordBatch],
    record: Mapping[str, object],
) -> None:
    """Write files of about a gigabyte, one at least, so that who reads them finds the columns."""
    from pyarrow import parquet  # which takes its time

    described = schema.with_metadata({METADATA_KEY: json.dumps(record)})
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


def _batches(table: TableView, schema: pa.Schema, progress: Progress) -> Iterator[pa.RecordBatch]:
    for rows in table.rows():
        progress.advance(sum(column.nbytes for column in rows.columns) + rows.ids.nbytes)
        progress.add_rows(len(rows.ids))
        yield pa.RecordBatch.from_arrays(list(_arrays(rows, table.slots)), schema=schema)


def _arrays(rows: SourceRows, slots: tuple[SlotSpec, ...]) -> Iterator[pa.Array]:
    yield pa.array(rows.ids)
    for slot, column in zip(slots, rows.columns, strict=True):
        is_bfloat = slot.dtype == "bfloat16"
        values = widened(column) if is_bfloat else column
        yield column_array(_in_parquet(slot), pa.py_buffer(values.tobytes()), len(rows.ids))


def _field(slot: SlotSpec) -> pa.Field:
    field = slot_field(_in_parquet(slot))
    return field.with_metadata({DTYPE_KEY: b"bfloat16"}) if slot.dtype == "bfloat16" else field


def _in_parquet(slot: SlotSpec) -> SlotSpec:
    """Return bfloat16 as float32, which holds it exactly."""
    return SlotSpec(slot.name, "float32", slot.shape) if slot.dtype == "bfloat16" else slot
