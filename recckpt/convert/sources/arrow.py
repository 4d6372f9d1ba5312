"""Arrow: IPC files (Feather), IPC streams, and a directory of them; also those of a checkpoint's own parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from recckpt.convert.exported import check_is_one_table
from recckpt.convert.file_rows import FileRows
from recckpt.convert.source import ImportOptions
from recckpt.convert.source_files import SourceFiles
from recckpt.errors import ConversionError

_SUFFIXES = (".arrow", ".feather", ".ipc", ".arrows")
_MAGIC = b"ARROW1"
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream


def recognises(files: SourceFiles) -> bool:
    """Say whether these are files of this format."""
    return bool(files.ending(*_SUFFIXES))


def open_source(files: SourceFiles, options: ImportOptions) -> FileRows:
    """Open the files; ConversionError where one is damaged or has no such columns."""
    names = list(files.names) if files.is_file else files.ending(*_SUFFIXES)

    def batches(name: str) -> Iterator[pa.RecordBatch]:
        with files.open(name) as file:
            if file.read(len(_MAGIC)) == _MAGIC:
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                _check_end(file)
                file.seek(0)
                batches = iter(pa.ipc.open_stream(file))
            yield from (batch.replace_schema_metadata(None) for batch in batches)

    check_is_one_table(files, names)
    n_rows = 0
    for name in names:
        try:
            n_rows += sum(batch.num_rows for batch in batches(name))
        except pa.ArrowException as error:
            found = f"what Arrow does not read ({error!s:.200})"
            raise ConversionError(files.path(name), "", found=found, expected="a whole Arrow file") from error
    return FileRows("arrow", files, names, batches, options, n_rows=n_rows, most_rows=n_rows, left_out=())


def _check_end(file: BinaryIO) -> None:
    """Refuse a stream without its end mark: cut between two batches, it reads as a whole one of fewer rows."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(_END)))
    if not file.read().endswith(_END):
        raise pa.ArrowInvalid("a stream without the mark of its end: cut, or its writer was not closed")
