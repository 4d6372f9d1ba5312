"""numpy: a directory a table, with ``id.npy`` and a matrix a slot, ready for faiss, hnswlib and usearch."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from recckpt.convert.source import LeftOut
from recckpt.convert.target_files import DELETES, RECORDS, TargetFiles, file_name
from recckpt.convert.view import Export, TableView
from recckpt.format.dtypes import widened
from recckpt.storage import Sink, SinkFile
from recckpt.text import Progress
from recckpt.types import SlotSpec

ALL_SLOTS, INCREMENTS, DTYPES = False, True, ("float16", "int8")  # numpy has no bfloat16


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write all tables."""
    for table in export.tables:
        _write_table(table, files, progress)
        if table.deletes is not None:
            count = sum(map(len, table.deletes()))
            with files.create(file_name(table.name + DELETES), "id.npy") as sink:
                write_header(sink, np.dtype(np.int64), (count,))
                for ids in table.deletes():
                    sink.write(ids.data)
    files.put_json(export.metadata(), RECORDS["npy"])
    return export.no_dense("a directory of numpy is for rows; use safetensors")


def write_header(sink: Sink, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
    """Write the head of an ``.npy`` file."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(SinkFile(sink), header)


def in_numpy(slot: SlotSpec) -> np.dtype[np.generic]:
    """Return the dtype of a slot; of bfloat16 float32, which holds it exactly."""
    return np.dtype("float32" if slot.dtype == "bfloat16" else slot.dtype)


def _write_table(table: TableView, files: TargetFiles, progress: Progress) -> None:
    directory = file_name(table.name)
    with ExitStack() as stack:
        names = ["id", *(slot.name for slot in table.slots)]
        sinks = [stack.enter_context(files.create(directory, f"{file_name(name)}.npy")) for name in names]
        write_header(sinks[0], np.dtype(np.int64), (table.n_rows,))
        for slot, sink in zip(table.slots, sinks[1:], strict=True):
            write_header(sink, in_numpy(slot), (table.n_rows, *slot.shape))
        for rows in table.rows():
            sinks[0].write(rows.ids.tobytes())
            for slot, column, sink in zip(table.slots, rows.columns, sinks[1:], strict=True):
                sink.write((widened(column) if slot.dtype == "bfloat16" else column).tobytes())
            progress.advance(rows.ids.nbytes + sum(column.nbytes for column in rows.columns))
            progress.add_rows(len(rows.ids))
