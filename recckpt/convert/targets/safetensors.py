"""safetensors: one file with the dense tensors, and of each table ``<table>.id`` and ``<table>.<slot>``."""

from __future__ import annotations

import json
from functools import partial

from recckpt.convert.safetensors_out import dense_tensors, header_of, table_tensors, write_file
from recckpt.convert.source import LeftOut
from recckpt.convert.sources.safetensors import METADATA
from recckpt.convert.target_files import TargetFiles
from recckpt.convert.view import Export
from recckpt.errors import ConversionError
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.text import Progress

ALL_SLOTS, INCREMENTS, DTYPES = False, False, ("float16", "bfloat16", "int8")


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write one file, whose header says what the tables are."""
    tensors = list(dense_tensors(export, files.url))
    for table in export.tables:
        tensors += table_tensors(table, partial("{}.{}".format, table.name))
    # As the library has them, so that values are aligned.
    tensors.sort(key=lambda tensor: (-NUMPY_DTYPES[tensor.dtype].itemsize, tensor.name))
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConversionError(files.url, repr(twice), found="a dense tensor and a column", expected="different names")
    slots = {table.name: [slot.name for slot in table.slots] for table in export.tables}
    record = json.dumps({"tables": slots, "export": export.metadata()})
    with files.create() as sink:
        write_file(sink, header_of(tensors, {"format": "pt", METADATA: record}), tensors, progress)
    progress.add_rows(sum(table.n_rows for table in export.tables))
    return []
