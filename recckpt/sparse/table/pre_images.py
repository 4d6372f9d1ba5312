"""Columns as they were at one moment: the live ones, and what was copied aside before it changed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recckpt.sparse.table import changes
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import pick_marked, unmarked_rows
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Log:
    """Rows that were copied aside, each at the next place, on the CPU; its memory may serve one snapshot after another.

    Args:
        specs: what is copied of a row.
    """

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
    have read of a row while that was changing is overwritten. Thread-safe.

    Args:
        n_rows: rows of this moment.
        columns: the live columns.
        log: an empty one of the same columns.
    """

    def __init__(self, n_rows: int, columns: Mapping[str, Column], log: Log) -> None:
        self.n_kept = 0
        self._n_rows = n_rows
        self._open: tuple[dict[str, Column], Log] | None = {n: c.frozen() for n, c in columns.items()}, log
        self._marks = np.zeros(-(-n_rows // 8), np.uint8)  # a bit a row: copied aside, or read for good
        self._failure: MemoryError | None = None
        self._lock = threading.Lock()

    def keep(self, rows: Int64s) -> None:
        """Copy aside those of ``rows``, all different, that somebody still needs; they are about to change."""
        with self._lock:
            if self._open is None:
                return
            columns, log = self._open
            rows = unmarked_rows(rows, self._n_rows, self._marks)
            try:
                log.places.settle()  # what somebody who was interrupted here has claimed
                log.copy(rows, columns, self._n_rows)
                log.places.claim(rows)
                changes.keep(log.places, rows, self._marks)
            except MemoryError as error:  # the snapshot is lost, but training goes on
                self._failure, self._open = error, None
            self.n_kept = len(log.places)

    def read(self, rows: npt.NDArray[Any], targets: Sequence[Bytes], *, for_good: bool) -> None:
        """Copy rows into a target a column.

        Args:
            rows: of this moment.
            targets: contiguous bytes.
            for_good: nobody reads these rows again, so they may change from now on.

        Raises:
            RuntimeError: they have been read for good already, or this is closed.
            MemoryError: there was none to copy rows to.
        """
        columns, _ = self._opened()
        for column, target in zip(columns.values(), targets, strict=True):
            column.gather_into(rows, target)
        with self._lock:  # what is not copied aside by now has not been written either
            _, log = self._opened()
            if not (for_good or len(log.places)):
                return
            at = pick_marked(rows, self._marks, for_good)
            places = log.places.find(rows[at].astype(np.int64))
            kept = [column.frozen() for column in log.columns.values()]
        if len(places) and places.min() < 0:
            raise RuntimeError(f"row {rows[at[places.argmin()]]} of a snapshot is read for the second time")
        for column, target in zip(kept, targets, strict=True):
            column.lay_over(places, at, target)
        self._opened()  # once this is closed, the memory of the log is another's

    def close(self) -> None:
        """Let go of all memory; nothing is copied aside any more, and nothing can be read."""
        with self._lock:
            self._open = None

    def _opened(self) -> tuple[dict[str, Column], Log]:
        if self._failure is not None:
            raise self._failure
        if self._open is None:
            raise RuntimeError("the snapshot is closed: it cannot be read any more")
        return self._open
