"""Parquet: one file, or all of a directory; a column of ids, one of vectors, and others as slots."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa

from recckpt.convert.exported import FORMAT, check_is_one_table, check_is_whole
from recckpt.convert.file_rows import FileRows
from recckpt.convert.source import ImportOptions
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError

_SUFFIXES = (".parquet", ".pq")
METADATA_KEY = b"recckpt"  # part of the format: what an export says of a file
_BATCH_ROWS = 16_384


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return bool(files.ending(*_SUFFIXES))


def open_source(files: SourceFiles, options: ImportOptions) -> FileRows:
    """Open the files; ConversionError where one is damaged or has no such columns."""
    from pyarrow import parquet  # which takes its time

    names = list(files.names) if files.is_file else files.ending(*_SUFFIXES)

    def batches(name: str) -> Iterator[pa.RecordBatch]:
        with files.open(name) as file:
            yield from (clean(batch) for batch in parquet.ParquetFile(file).iter_batches(_BATCH_ROWS))

    check_is_one_table(files, names)
    n_rows, tables = 0, set[str]()
    for name in names:
        try:
            with files.open(name) as file:
                opened = parquet.ParquetFile(file)
                n_rows += opened.metadata.num_rows
                tables.add(_exported_table(opened.schema_arrow, files.path(name)))
        except pa.ArrowException as error:
            found = f"what Arrow does not read ({error!s:.200})"
            raise ConversionError(files.path(name), "", found=found, expected="a whole Parquet file") from error
    if len(tables) > 1:
        found, remedy = f"tables {sorted(tables)}", "name the directory of one table"
        raise ConversionError(files.url, "", found=found, expected="one table", remedy=remedy)
    return FileRows("parquet", files, names, batches, options, n_rows=n_rows, most_rows=n_rows, left_out=())


def _exported_table(schema: pa.Schema, path: str) -> str:
    """Return the table that an export of recckpt says a file is of, "" for a file of others."""
    try:
        record = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
    except ValueError:
        return ""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return ""
    check_is_whole(record, path)
    return str(record.get("table", ""))


def clean(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose schema has no metadata of its own, which differs from file to file."""
    return batch.replace_schema_metadata(None)
