"""CSV: a directory a table, with a header and a line a row: the id, and a column a value of each slot."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.convert.source import LeftOut, SourceRows
from recckpt.convert.target_files import DELETES, RECORDS, TargetFiles, file_name
from recckpt.convert.view import Export, TableView
from recckpt.errors import ConversionError
from recckpt.format.dtypes import widened
from recckpt.storage import SinkFile
from recckpt.text import Progress
from recckpt.types import SlotSpec

ALL_SLOTS, INCREMENTS, DTYPES = False, True, ("float16", "int8")  # as which numbers are written shorter
_FILE = "rows.csv"


def write(export: Export, files: TargetFiles, progress: Progress) -> list[LeftOut]:
    """Write all tables; numbers have as many digits as bring back the same bits."""
    for table in export.tables:
        _write(files, file_name(table.name), _columns(table), _batches(table, progress))
        if table.deletes is not None:
            _write(files, file_name(table.name + DELETES), ["id"], ([pa.array(ids)] for ids in table.deletes()))
    files.put_json(export.metadata(), RECORDS["csv"])
    return export.no_dense("CSV is for rows; use safetensors")


def _write(files: TargetFiles, directory: str, names: list[str], batches: Iterator[list[pa.Array]]) -> None:
    from pyarrow import csv  # which takes its time

    is_first = True
    with files.create(directory, _FILE) as sink:
        to = pa.PythonFile(SinkFile(sink), "w")
        for columns in batches:
            csv.write_csv(
                pa.RecordBatch.from_arrays(columns, names=names), to, csv.WriteOptions(include_header=is_first)
            )
            is_first = False
        if is_first:
            sink.write(",".join(f'"{name}"' for name in names).encode() + b"\n")


def _columns(table: TableView) -> list[str]:
    """Return the names of the columns: of a slot of one number its own, of others with the place of each value."""
    names = ["id"]
    for slot in table.slots:
        n_values = int(np.prod(slot.shape))
        names += [f"{slot.name}_{n}" for n in range(n_values)] if slot.shape else [slot.name]
    if len(set(names)) < len(names) or any('"' in name or not name.isprintable() for name in names):
        found = f"columns {', '.join(names)!s:.200}"
        remedy = "name the slots to export, or export to parquet"
        raise ConversionError(f"table {table.name!r}", "", found=found, expected="a name for each", remedy=remedy)
    return names


def _batches(table: TableView, progress: Progress) -> Iterator[list[pa.Array]]:
    for rows in table.rows():
        progress.advance(rows.ids.nbytes + sum(column.nbytes for column in rows.columns))
        progress.add_rows(len(rows.ids))
        yield [pa.array(rows.ids), *_arrays(rows, table.slots)]


def _arrays(rows: SourceRows, slots: tuple[SlotSpec, ...]) -> Iterator[pa.Array]:
    for slot, column in zip(slots, rows.columns, strict=True):
        values = _printed(column, slot).reshape(len(rows.ids), -1)
        yield from (pa.array(np.ascontiguousarray(values[:, n])) for n in range(values.shape[1]))


def _printed(column: npt.NDArray[np.generic], slot: SlotSpec) -> npt.NDArray[np.generic]:
    """Return numbers that Arrow can print."""
    if slot.dtype == "bfloat16":
        return widened(column)
    return column.astype(np.float32) if slot.dtype == "float16" else column
