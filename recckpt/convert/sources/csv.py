"""CSV with a header: a column of ids, and every other column is a value of the vector, in the order of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from recckpt.convert.file_rows import FileRows
from recckpt.convert.source import ImportOptions, LeftOut
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError

_SUFFIXES = (".csv", ".csv.gz")
_LEAST_ROW_BYTES = 4  # an id, a comma, a value and the end of the line
_UNPACKED = 20  # times as many bytes as a packed file has, at most


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return bool(files.ending(*_SUFFIXES))


def open_source(files: SourceFiles, options: ImportOptions) -> FileRows:
    """Open the files; ConversionError where an id is no int64, a value no number, or a line has other fields."""
    names = list(files.names) if files.is_file else files.ending(*_SUFFIXES)
    first = _header(files, names[0], options)
    for name in names[1:]:
        header = _header(files, name, options)
        if header != first:
            expected, remedy = f"those of {names[0]}: {first!s:.200}", "make all files of a table alike"
            raise ConversionError(
                files.path(name), "line 1", found=f"{header!s:.200}", expected=expected, remedy=remedy
            )

    def batches(name: str) -> Iterator[pa.RecordBatch]:
        from pyarrow import csv  # which takes its time

        types = {each: pa.int64() if each == options.ids else pa.float32() for each in first}
        conversion = csv.ConvertOptions(column_types=types, null_values=[""])
        n_read = 0
        with _opened(files, name) as file, _as_numbers(files.path(name), options):
            for batch in csv.open_csv(file, convert_options=conversion):
                yield _joined(batch, options, files.path(name), n_read)
                n_read += batch.num_rows

    sizes = [files.size(name) * (_UNPACKED if name.endswith(".gz") else 1) for name in names]
    most_rows = max(1, sum(sizes) // _LEAST_ROW_BYTES)
    columns = ", ".join(name for name in first if name != options.ids)
    joined = LeftOut(f"columns {columns:.200}", f"are, in this order, the values of {options.embedding}")
    return FileRows("csv", files, names, batches, options, n_rows=None, most_rows=most_rows, left_out=[joined])


@contextmanager
def _opened(files: SourceFiles, name: str) -> Iterator[Any]:
    """Open a file, unpacked; ConversionError where it does not unpack."""
    with files.open(name) as file:
        try:
            yield pa.CompressedInputStream(file, "gzip") if name.endswith(".gz") else file
        except OSError as error:
            if error.errno is not None:  # of the storage, not of Arrow
                raise
            found = f"damage ({error!s:.100})"
            raise ConversionError(files.path(name), "", found=found, expected="a whole file of gzip") from error


def _header(files: SourceFiles, name: str, options: ImportOptions) -> list[str]:
    """Return the names of the columns; ConversionError where they are not an id's and a vector's, each with a name."""
    from pyarrow import csv  # which takes its time

    try:
        with _opened(files, name) as file:
            head: list[str] = csv.open_csv(file).schema.names
    except (pa.ArrowException, UnicodeDecodeError, EOFError) as error:
        found = f"what Arrow does not read ({error!s:.200})"
        raise ConversionError(files.path(name), "", found=found, expected="lines of CSV") from error
    if options.ids not in head or len(head) < 2 or len(set(head)) < len(head) or not all(head):
        expected = f"a header with {options.ids!r} and the values of the vector, each name once and none empty"
        remedy = "name the column of ids, and save without an index (pandas: to_csv(index=False))"
        raise ConversionError(files.path(name), "line 1", found=f"{head!s:.200}", expected=expected, remedy=remedy)
    return head


@contextmanager
def _as_numbers(path: str, options: ImportOptions) -> Iterator[None]:
    """Say of a field that is no number what it was to be."""
    try:
        yield
    except pa.ArrowInvalid as error:
        expected = f"{options.ids!r} an int64 (1, not 1.0), all else numbers of float32, as many in each line"
        raise ConversionError(path, "", found=f"{error!s:.200}", expected=expected) from error


def _joined(batch: pa.RecordBatch, options: ImportOptions, path: str, n_before: int) -> pa.RecordBatch:
    """Put the values of a row into one vector."""
    names = [name for name in batch.schema.names if name != options.ids]
    for name in batch.schema.names:
        column = batch.column(name)
        if column.null_count:
            row = n_before + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False))) + 1
            where = f"row {row}, column {name!r}"
            raise ConversionError(path, where, found="an empty field: a value is missing", expected="a number")
    values = [batch.column(name).to_numpy() for name in names]
    matrix = np.stack(values, axis=1) if batch.num_rows else np.empty((0, len(values)))
    for row, column in np.argwhere(np.isinf(matrix))[:1]:
        where, expected = f"row {n_before + row + 1}, column {names[column]!r}", "what float32 holds"
        raise ConversionError(path, where, found="infinity, or a number beyond float32", expected=expected)
    flat = pa.array(matrix.astype(np.float32, copy=False).reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, len(values))
    return pa.RecordBatch.from_arrays([batch.column(options.ids), vectors], [options.ids, options.embedding])
