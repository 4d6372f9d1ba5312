"""CSV with a header: a column of ids, and every other column is a value of the vector, in the order of the file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from recckpt.convert.file_rows import FileRows
from recckpt.convert.source import Wish
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError

_SUFFIXES = (".csv", ".csv.gz")
_LEAST_ROW_BYTES = 4  # an id, a comma, a value and the end of the line
_UNPACKED = 20  # times as many bytes as a packed file has, at most


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return bool(files.ending(*_SUFFIXES))


def open_source(files: SourceFiles, wish: Wish) -> FileRows:
    """Open the files; ConversionError where an id is no int64, a value no number, or a line has other fields."""
    names = list(files.names) if files.is_file else files.ending(*_SUFFIXES)

    def batches(name: str) -> Iterator[pa.RecordBatch]:
        from pyarrow import csv  # which takes its time

        with files.open(name) as file:
            packed = pa.CompressedInputStream(file, "gzip") if name.endswith(".gz") else file
            head = csv.open_csv(packed).schema.names
        if wish.ids not in head or len(head) < 2 or len(set(head)) < len(head):
            expected = f"a header with {wish.ids!r} and the values of the vector, each name once"
            raise ConversionError(files.path(name), "line 1", found=f"{head!s:.200}", expected=expected)
        types = {each: pa.int64() if each == wish.ids else pa.float32() for each in head}
        options = csv.ConvertOptions(column_types=types, null_values=[""])
        with files.open(name) as file:
            packed = pa.CompressedInputStream(file, "gzip") if name.endswith(".gz") else file
            yield from (_joined(batch, wish) for batch in csv.open_csv(packed, convert_options=options))

    sizes = [files.size(name) * (_UNPACKED if name.endswith(".gz") else 1) for name in names]
    most_rows = max(1, sum(sizes) // _LEAST_ROW_BYTES)
    return FileRows("csv", files, names, batches, wish, n_rows=None, most_rows=most_rows)


def _joined(batch: pa.RecordBatch, wish: Wish) -> pa.RecordBatch:
    """Put the values of a row into one vector."""
    values = [batch.column(name) for name in batch.schema.names if name != wish.ids]
    for column in values:
        if column.null_count:
            raise pa.ArrowInvalid("a value is missing")
    matrix = (
        np.stack([column.to_numpy() for column in values], axis=1) if batch.num_rows else np.empty((0, len(values)))
    )
    flat = pa.array(matrix.astype(np.float32, copy=False).reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, len(values))
    return pa.RecordBatch.from_arrays([batch.column(wish.ids), vectors], [wish.ids, wish.embedding])
