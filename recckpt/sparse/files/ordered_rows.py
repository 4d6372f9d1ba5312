"""The rows of a table that is saved, in the order of their buckets: where each part of a save comes from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.errors import StateMismatchError
from recckpt.sparse.files.part_plan import TableBytes, row_bytes
from recckpt.sparse.files.part_writer import ColumnBytes, RowBatch
from recckpt.sparse.files.table_rows import BucketOrder, TableSource
from recckpt.sparse.table.column import aligned_bytes
from recckpt.sparse.table.kernels import first_repeat

LEAST_BATCH_BYTES = 1 << 20  # of a delta, whose batches are the smaller the fewer rows have changed: each has its cost
PIECE_BYTES = 512 << 10  # of a column, copied, hashed and written: it stays in the second cache of a core meanwhile


class RepeatFinder:
    """Looks for equal ids among those that it is given piece by piece, in bucket order."""

    def __init__(self) -> None:
        self._open = np.empty(0, np.int64)  # of the bucket in which the last piece ended

    def find(self, ids: npt.NDArray[np.int64]) -> int | None:
        """Return an id that came before, None where there is not one."""
        ids = np.concatenate([self._open, ids])
        repeat, begin = first_repeat(ids)
        self._open = ids[begin:].copy()
        return None if repeat < 0 else int(ids[repeat])


class PieceBuffers:
    """Memory for pieces of columns, one buffer a thread; they are kept, since the first touch of memory is slow."""

    def __init__(self) -> None:
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, row_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Lend a buffer that has room for a piece of rows of so many bytes."""
        n_bytes = max(PIECE_BYTES, row_bytes)
        with self._lock:
            buffer = self._spare.pop() if self._spare else None
        if buffer is None or len(buffer) < n_bytes:
            buffer = aligned_bytes(n_bytes)
        try:
            yield buffer
        finally:
            with self._lock:
                self._spare.append(buffer)


class OrderedRows:
    """The rows of a table that is saved, in the order of their buckets; each id is looked for twice."""

    def __init__(self, source: TableSource, batch_bytes: int, order_rows: int, buffers: PieceBuffers) -> None:
        self._source, self._buffers, self._row_bytes = source, buffers, row_bytes(source.slots)
        self._order = BucketOrder(source.ids, source.n_rows, order_rows)
        # Of a delta a batch has as many fewer rows as rows have changed, so it has as many buckets.
        share = min(source.n_rows, source.n_all) * batch_bytes // max(1, source.n_all)
        self._batch_rows = max(1, max(share, min(LEAST_BATCH_BYTES, batch_bytes)) // self._row_bytes)

    @property
    def size(self) -> TableBytes:
        """How large they are."""
        source, size = self._source, self._row_bytes
        return TableBytes(source.name, source.slots, source.n_rows * size, lambda: self._order.rows_up_to() * size)

    def batches(self, begin: int, end: int) -> Iterator[RowBatch]:
        """Yield the rows in buckets [begin, end); the slots are copied when they are written.

        Raises:
            StateMismatchError: an id is there twice: nothing could load what would be written.
        """
        repeats = RepeatFinder()
        with self._buffers.lent(self._row_bytes) as buffer:
            for ordered in self._order.rows(begin, end):
                for first in range(0, len(ordered), self._batch_rows):
                    rows = ordered[first : first + self._batch_rows]
                    ids = np.empty(len(rows), np.int64)
                    self._source.read(0, rows, ids.view(np.uint8), is_last=False)
                    self._check_ids(ids, repeats)
                    yield RowBatch(self._source.name, ids, self._slots(rows, buffer))

    def _check_ids(self, ids: npt.NDArray[np.int64], repeats: RepeatFinder) -> None:
        id_ = repeats.find(ids)
        if id_ is not None:
            raise StateMismatchError(
                f"table {self._source.name!r}",
                mismatched={"id": (f"{id_} more than once", "every id once")},
                remedy="nothing was saved; restore the last checkpoint, since the rows of the table are not what they "
                "were",
            )

    def _slots(self, rows: npt.NDArray[Any], buffer: npt.NDArray[np.uint8]) -> list[ColumnBytes]:
        return [
            ColumnBytes(spec, len(rows), self._pieces(number, spec.row_bytes, rows, buffer))
            for number, spec in enumerate(self._source.slots, start=1)
        ]

    def _pieces(
        self, column: int, row_bytes: int, rows: npt.NDArray[Any], buffer: npt.NDArray[np.uint8]
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Copy rows of one column into the buffer, as many at a time as fit."""
        piece_rows = len(buffer) // row_bytes
        is_last = column == len(self._source.slots)
        for begin in range(0, len(rows), piece_rows):
            some = rows[begin : begin + piece_rows]
            piece = buffer[: len(some) * row_bytes]
            self._source.read(column, some, piece, is_last=is_last)
            yield piece
