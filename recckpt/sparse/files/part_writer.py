"""Batches of rows to a part: an Arrow file, and its entry in the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from recckpt.format.catalog import Batch, Part
from recckpt.sparse.files.arrow_columns import TABLE, column_array, part_schema
from recckpt.storage import Sink, SinkFile
from recckpt.types import SlotSpec


@dataclass(frozen=True)
class ColumnBytes:
    """Values of one column of a batch, in memory that the caller may reuse after the write."""

    spec: SlotSpec
    values: npt.NDArray[np.uint8]


class PartWriter:
    """Writes one part into a sink; :meth:`finish` returns its catalog entry. Not thread-safe."""

    def __init__(self, sink: Sink, file: str, tables: Sequence[str], slots: Sequence[SlotSpec]) -> None:
        self._file, self._tables = file, tuple(tables)
        self._numbers = {name: number for number, name in enumerate(tables)}
        self._dictionary = pa.array(self._tables, pa.utf8())
        self._schema = part_schema(slots)
        self._framed = _FrameSink(sink)
        self._batches: list[Batch] = []
        self._arrow = pa.ipc.new_file(pa.PythonFile(self._framed, "w"), self._schema)

    def write(self, table: str, buckets: tuple[int, int], columns: Sequence[ColumnBytes]) -> None:
        """Write rows of one table; the first column is the ids, the others are in the order of the slots."""
        n_rows = len(columns[0].values) // 8
        numbers = np.full(n_rows, self._numbers[table], np.int16)
        buffers = {TABLE: pa.py_buffer(numbers), **{c.spec.name: pa.py_buffer(c.values) for c in columns}}
        xxh3 = {name: xxhash.xxh3_64_intdigest(buffer) for name, buffer in buffers.items()}
        indices = pa.Array.from_buffers(pa.int16(), n_rows, [None, buffers[TABLE]])
        arrays = [pa.DictionaryArray.from_arrays(indices, self._dictionary)]
        arrays += [column_array(column.spec, buffers[column.spec.name], n_rows) for column in columns]
        self._framed.values = {buffer.address for buffer in buffers.values()}
        self._arrow.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._framed.values = set()
        self._batches.append(Batch(table, n_rows, buckets, xxh3))

    def finish(self) -> Part:
        """Write the footer; the sink is still the caller's to close."""
        self._arrow.close()
        frame = self._framed.frame.intdigest()
        return Part(self._file, self._framed.n_bytes, frame, self._tables, tuple(self._batches))


class _FrameSink(SinkFile):
    """The file object that Arrow writes to; hashes what no column checksum covers."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.frame = xxhash.xxh3_64()
        self.values: set[int] = set()  # addresses of the column values that are being written

    def write(self, data: Any) -> int:
        if not (isinstance(data, pa.Buffer) and data.address in self.values):
            self.frame.update(data)
        return super().write(data)
