"""Writes one dense matrix per table, for ``nn.Embedding``: row i has id i; rows without an id are zeros."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from recckpt.convert.npy import write_header
from recckpt.convert.source import LeftOut
from recckpt.convert.target_files import TargetFiles, file_name, scratch
from recckpt.convert.view import Export, TableView, in_float32, numbers
from recckpt.errors import ConversionError
from recckpt.text import Progress
from recckpt.types import EMBEDDING

ALL_SLOTS, INCREMENTS, DTYPES = False, False, ("float16", "int8")  # numpy has no bfloat16
_SPARE = 1_000_000  # rows of a matrix that may always be empty
_SPARSE = 100  # most rows of a matrix, as a multiple of the table's rows
_STEP_BYTES = 8 << 20


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write ``<table>.npy`` of each table, and ``<table>.<slot>.npy`` of each chosen slot."""
    for table in export.tables:
        n_matrix = _rows_of_matrix(table)
        for slot in table.slots:
            name = table.name if slot.name == EMBEDDING else f"{table.name}.{slot.name}"
            with ExitStack() as stack:
                matrix = scratch(stack, np.dtype(in_float32(slot).dtype), (n_matrix, *slot.shape))
                for ids, column in table.column(slot.name):
                    matrix[ids] = numbers(column, slot)
                    progress.advance(column.nbytes)
                with files.create(f"{file_name(name)}.npy") as sink:
                    write_header(sink, slot, n_matrix)
                    step = max(1, _STEP_BYTES // max(1, matrix[:1].nbytes))
                    for begin in range(0, n_matrix, step):
                        sink.write(matrix[begin : begin + step].tobytes())
        progress.add_rows(table.n_rows)
    return export.no_dense("a matrix has only rows; use safetensors")


def _rows_of_matrix(table: TableView) -> int:
    """Return 1 + the highest id; ConversionError for negative ids and nearly empty matrices."""
    n_rows, lowest, highest = 0, 0, -1
    for ids in table.ids():
        n_rows += len(ids)
        lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
    path, remedy = f"table {table.name!r}", "export it to npy, which stores ids beside rows"
    if lowest < 0:
        raise ConversionError(path, "", found=f"the id {lowest}", expected="ids from 0 on", remedy=remedy)
    if highest >= _SPARSE * n_rows + _SPARE:
        found = f"the id {highest} among {n_rows} rows"
        raise ConversionError(path, "", found=found, expected="a matrix that is not nearly empty", remedy=remedy)
    return highest + 1
