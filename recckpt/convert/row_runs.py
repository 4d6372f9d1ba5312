"""Sorts rows by bucket, in bounded memory, through a file on disk.

Rows are collected up to the memory bound, sorted by the hash of their ids, and written to a file as a *run*. In each
run, the rows of a range of buckets are consecutive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.convert.source import Array, Int64s, SourceRows, SourceTable
from recckpt.errors import ConversionError
from recckpt.format.buckets import N_BUCKETS, mix64, repeated
from recckpt.sparse.files.arrow_format import ID_SPEC
from recckpt.sparse.files.part_writer import RowBatch, TableBytes, row_bytes
from recckpt.sparse.files.pieces import row_of
from recckpt.types import SlotSpec

Hashes = npt.NDArray[np.uint64]
BATCH_BYTES = 8 << 20
_RANGE_BYTES = 32 << 20  # bytes of rows to sort at once


class _SortedRun(NamedTuple):
    hashes: Hashes
    columns: Sequence[npt.NDArray[np.void]]  # column of ids, then the slots

    def at(self, bucket: int) -> int:
        """Return the index of the first row at or after a bucket."""
        if bucket == N_BUCKETS:
            return len(self.hashes)
        return int(np.searchsorted(self.hashes, np.uint64(bucket << 48)))


class RowRuns:
    """The rows of one table, added in any order and read in bucket order. Not thread-safe.

    ``budget_bytes`` is the approximate memory for rows that are not yet in the file; ``new_file`` opens a temporary
    file that is deleted on close.
    """

    def __init__(self, table: SourceTable, budget_bytes: int, new_file: Callable[[], IO[bytes]]) -> None:
        self.table = table
        self._specs: tuple[SlotSpec, ...] = (ID_SPEC, *table.slots)
        self._budget_bytes, self._new_file = budget_bytes, new_file
        self._file: IO[bytes] | None = None
        self._waiting: list[SourceRows] = []
        self._n_waiting = self._at = self.n_rows = 0
        self._places: list[tuple[int, Sequence[int]]] = []  # of each run: rows, and offsets of columns
        self._runs: list[_SortedRun] = []

    def add(self, rows: SourceRows) -> None:
        """Add rows; their arrays must not change, because they are copied only when a run is written."""
        self._waiting.append(rows)
        self._n_waiting += len(rows.ids)
        self.n_rows += len(rows.ids)
        if self._n_waiting * self.table.row_bytes >= self._budget_bytes:
            self._write_run()

    def finish(self) -> None:
        """Write the remaining rows; ConversionError if an id occurs twice."""
        if self._n_waiting:
            self._write_run()
        self._runs = [] if self._file is None else self._mapped(np.memmap(self._file, np.uint8, "r"))
        for begin, end in self._ranges(0, N_BUCKETS, 8):
            hashes = np.concatenate([run.hashes[run.at(begin) : run.at(end)] for run in self._runs])
            if len(twice := repeated(hashes)):
                run = next(run for run in self._runs if twice[0] in run.hashes)
                id_ = run.columns[0].view(np.int64)[np.searchsorted(run.hashes, twice[0])]
                path, remedy = f"table {self.table.name!r}", "keep one row per id"
                raise ConversionError(path, "", found=f"id {id_} twice", expected="every id once", remedy=remedy)

    def close(self) -> None:
        self._runs = []
        if self._file is not None:
            self._file.close()

    @property
    def size(self) -> TableBytes:
        table, n_bytes = self.table, row_bytes(self.table.slots)
        return TableBytes(table.name, table.slots, self.n_rows * n_bytes, lambda: self._rows_up_to() * n_bytes)

    def batches(self, begin: int, end: int) -> Iterator[RowBatch]:
        table = self.table
        batch_rows = max(1, BATCH_BYTES // row_bytes(table.slots))
        for cut in self._ranges(begin, end, table.row_bytes):
            columns = self._between(*cut)
            for first in range(0, len(columns[0]), batch_rows):
                yield RowBatch.of(table.name, table.slots, [column[first : first + batch_rows] for column in columns])

    def _rows_up_to(self) -> Int64s:
        ends = np.arange(1, N_BUCKETS, dtype=np.uint64) << np.uint64(48)
        up_to = sum((np.searchsorted(run.hashes, ends) for run in self._runs), start=np.zeros(N_BUCKETS - 1, np.int64))
        return np.append(up_to, self.n_rows)

    def _between(self, begin: int, end: int) -> list[npt.NDArray[np.void]]:
        """Return the rows of buckets [begin, end) in order: one array of bytes for the ids, and one for each slot."""
        places = [(run, slice(run.at(begin), run.at(end))) for run in self._runs]
        order = np.argsort(np.concatenate([run.hashes[place] for run, place in places]), kind="stable")
        of_runs = [[column[place] for column in run.columns] for run, place in places]
        return [np.concatenate(parts)[order] for parts in zip(*of_runs, strict=True)]

    def _ranges(self, begin: int, end: int, row_bytes: int) -> Iterator[tuple[int, int]]:
        n_bytes = sum(run.at(end) - run.at(begin) for run in self._runs) * row_bytes
        count = min(end - begin, -(-n_bytes // min(_RANGE_BYTES, self._budget_bytes)))
        for number in range(count):
            yield begin + (end - begin) * number // count, begin + (end - begin) * (number + 1) // count

    def _write_run(self) -> None:
        ids = np.concatenate([rows.ids for rows in self._waiting])
        hashes: Hashes = mix64(ids.view(np.uint64))
        order = np.argsort(hashes, kind="stable")
        if self._file is None:
            self._file = self._new_file()
        places = [self._put(hashes[order]), self._put(ids[order])]
        for number, spec in enumerate(self.table.slots):
            columns = (rows.columns[number].reshape(len(rows.ids), -1) for rows in self._waiting)
            values = np.concatenate([column.view(row_of(spec)).reshape(-1) for column in columns])
            places.append(self._put(values[order]))
        self._places.append((len(ids), places))
        self._waiting, self._n_waiting = [], 0

    def _put(self, values: Array) -> int:
        assert self._file is not None
        begin, data = self._at, values.view(np.uint8).reshape(-1).data
        while data:
            n_bytes = self._file.write(data)
            self._at, data = self._at + n_bytes, data[n_bytes:]
        return begin

    def _mapped(self, data: npt.NDArray[np.uint8]) -> list[_SortedRun]:
        runs = []
        for n_rows, (first, *places) in self._places:
            parts = zip(self._specs, places, strict=True)
            columns = [data[at : at + n_rows * spec.row_bytes].view(row_of(spec)) for spec, at in parts]
            runs.append(_SortedRun(data[first : first + n_rows * 8].view(np.uint64), columns))
        return runs
