"""Parquet: one file, or all of a directory; a column of ids, one of vectors, and others as slots."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from recckpt.convert.file_rows import FileRows
from recckpt.convert.source import Wish
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError

_SUFFIXES = (".parquet", ".pq")
_BATCH_ROWS = 16_384


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return bool(files.ending(*_SUFFIXES))


def open_source(files: SourceFiles, wish: Wish) -> FileRows:
    """Open the files; ConversionError where one is damaged or has no such columns."""
    from pyarrow import parquet  # which takes its time

    names = list(files.names) if files.is_file else files.ending(*_SUFFIXES)

    def batches(name: str) -> Iterator[pa.RecordBatch]:
        with files.open(name) as file:
            yield from (clean(batch) for batch in parquet.ParquetFile(file).iter_batches(_BATCH_ROWS))

    n_rows = 0
    for name in names:
        try:
            with files.open(name) as file:
                n_rows += parquet.ParquetFile(file).metadata.num_rows
        except pa.ArrowException as error:
            found = f"what Arrow does not read ({error!s:.200})"
            raise ConversionError(files.path(name), "", found=found, expected="a whole Parquet file") from error
    return FileRows("parquet", files, names, batches, wish, n_rows=n_rows, most_rows=n_rows)


def clean(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose schema has no metadata of its own, which differs from file to file."""
    return batch.replace_schema_metadata(None)
