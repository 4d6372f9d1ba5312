"""Rows copied aside before they change: columns of one moment, in the memory of the columns of now and a log.

A reader takes the live values first, and lays over them what was copied aside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import pick_marked, unmarked_rows
from recckpt.sparse.table.rows import keep_rows
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Log:
    """Rows that were copied aside, each at the next place, on the CPU; its memory serves one snapshot after another."""

    def __init__(self, specs: Sequence[SlotSpec]) -> None:
        self.columns = {spec.name: Column(spec, torch.device("cpu")) for spec in specs}
        self.places = IdIndex()  # row -> place

    @property
    def specs(self) -> tuple[SlotSpec, ...]:
        """What is copied of a row."""
        return tuple(column.spec for column in self.columns.values())

    def copy(self, rows: Int64s, columns: Mapping[str, Column], n_rows: int) -> None:
        """Copy rows of other columns, of which there are ``n_rows``, to the next places."""
        begin = len(self.places)
        for name, column in self.columns.items():
            # The first block as large as it can get: growing would copy it, and what is not touched costs nothing.
            column.reserve(max(begin + len(rows), min(n_rows, 1 << column.shift)))
            columns[name].copy_rows(rows, column, begin)

    def forget(self, keep_bytes: int) -> None:
        """Drop all rows, and memory beyond ``keep_bytes``."""
        n_rows = keep_bytes // max(1, sum(spec.row_bytes for spec in self.specs))
        for column in self.columns.values():
            column.shrink(-(-n_rows >> column.shift))
        self.places.clear(n_rows)


class PreImages:
    """Columns of one moment. Training copies aside before it writes; readers lay that over what they read.

    A reader takes the live values first, and only then looks which of its rows were copied aside: whatever it may
    have read of a row while that was changing is overwritten. Thread-safe. The log is empty and of the same columns.
    """

    def __init__(self, n_rows: int, columns: Mapping[str, Column], log: Log) -> None:
        self.n_kept = 0
        self._n_rows = n_rows
        self._open: tuple[dict[str, Column], Log] | None = {n: c.frozen() for n, c in columns.items()}, log
        self._marks = np.zeros(-(-n_rows // 8), np.uint8)  # a bit a row: copied aside, or read for the last time
        self._needed = np.zeros(0, np.uint8)  # a bit a row, once not all are
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def keep(self, rows: Int64s) -> None:
        """Copy aside those of ``rows``, all different, that are still needed; they are about to change."""
        with self._lock:
            if self._open is None:
                return
            columns, log = self._open
            rows = unmarked_rows(rows, self._n_rows, self._marks, self._needed)
            try:
                log.places.settle()  # what was claimed here before an interrupt
                log.copy(rows, columns, self._n_rows)
                log.places.claim(rows)
                keep_rows(log.places, rows, self._marks)
            except MemoryError as error:  # the snapshot is lost, but training goes on
                self._fail(error)
            self.n_kept = len(log.places)

    def fail(self, error: Exception) -> None:
        """Let whoever reads from now on get this error: rows changed before they were copied aside."""
        with self._lock:
            if self._open is not None:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure, self._open = error, None

    def check(self) -> None:
        """Raise what :meth:`fail` was given, or RuntimeError where this is closed."""
        self._opened()

    def read(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy rows of columns into a target each; after ``is_last`` they may change, and are not read again.

        Raises RuntimeError where they were read for the last time before, or this is closed; MemoryError where keeping
        rows failed; or what :meth:`fail` was given.
        """
        columns, _ = self._opened()
        for name, target in targets.items():
            columns[name].gather_into(rows, target)
        with self._lock:  # what is not copied aside by now has not been written either
            _, log = self._opened()
            if not (is_last or len(log.places)):
                return
            at = pick_marked(rows, self._marks, self._needed, is_last)
            if len(at) == 0:  # as nearly always, where few rows change meanwhile
                return
            places = log.places.find(rows[at].astype(np.int64))
            kept = {name: log.columns[name].frozen() for name in targets}
        if places.min() < 0:
            raise RuntimeError(f"row {rows[at[places.argmin()]]} of a snapshot is read for the second time")
        for name, target in targets.items():
            kept[name].lay_over(places, at, target)
        self._opened()  # once this is closed, the memory of the log is another's

    @property
    def is_on_cpu(self) -> bool:
        """Whether all columns lie on the CPU."""
        columns, _ = self._opened()
        return all(column.is_on_cpu for column in columns.values())

    def memory(self, name: str, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the bytes of the rows [begin, end) of a column where they lie, which change with the table."""
        columns, _ = self._opened()
        columns[name].memory.check_unmoved()
        columns[name].wait_for_writes()
        for piece in columns[name].pieces(begin, end):
            yield piece.reshape(-1).view(torch.uint8)

    def kept_among(self, begin: int, end: int) -> Int64s:
        """Return which of the rows [begin, end), none of which was read for the last time, were copied aside."""
        with self._lock:
            columns, log = self._opened()
            for column in columns.values():  # what was read of them before
                column.memory.check_unmoved()
            if not len(log.places):
                return np.empty(0, np.int64)
            kept: Int64s = begin + pick_marked(np.arange(begin, end), self._marks, self._needed, False)
            return kept

    def narrow(self, bits: Bytes) -> None:
        """Copy aside from now on, and let be read, only rows whose bit is 1; ``bits`` do not change any more."""
        with self._lock:
            self._needed = bits

    def close(self) -> None:
        """Release all memory; nothing is copied aside any more, and nothing can be read."""
        with self._lock:
            self._open = None

    def _opened(self) -> tuple[dict[str, Column], Log]:
        if self._failure is not None:
            raise self._failure
        if self._open is None:
            raise RuntimeError("the snapshot is closed: it cannot be read any more")
        return self._open
