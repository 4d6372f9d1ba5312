"""A writer of a snapshot that goes on only when it is told to, and an optimizer whose steps are easy to foretell."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from recckpt.sparse.optim.optimizer import SparseOptimizer
from recckpt.sparse.table.column import Column

_writers = threading.local()


class Stepped:
    """Runs work on a thread that halts where columns are read."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._go, self._halted = threading.Semaphore(0), threading.Semaphore(0)
        self._is_free = self._is_done = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Let the work go on to where it halts next, or to its end."""
        if not self._is_done:
            self._go.release()
            self._halted.acquire()

    def finish(self) -> BaseException | None:
        """Let the work go on to its end, and return the error in which it ended, if it did."""
        self._is_free = True
        self.step()
        self._thread.join()
        return self._error

    def halt(self) -> None:
        """Wait to be told to go on; called by the work."""
        if not self._is_free:
            self._halted.release()
            self._go.acquire()

    def _run(self) -> None:
        _writers.current = self
        self._go.acquire()
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._is_done = True
        self._halted.release()


def halt_where_columns_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each read of a column halt the work that does it, before; and of a slot, in the middle too."""
    gather_into = Column.gather_into

    def in_halves(column: Column, rows: Any, target: np.ndarray) -> None:
        writer = getattr(_writers, "current", None)
        if writer is None:
            gather_into(column, rows, target)
            return
        writer.halt()
        half = 0 if column.spec.name == "id" else len(rows) // 2
        gather_into(column, rows[:half], target[: half * column.spec.row_bytes])
        if half:
            writer.halt()
        gather_into(column, rows[half:], target[half * column.spec.row_bytes :])

    monkeypatch.setattr(Column, "gather_into", in_halves)


class Counting(SparseOptimizer):
    """Sets a row to its gradient and counts how often: exact in every dtype."""

    slot_names = ("count",)

    def __init__(self, tables):
        super().__init__(tables, {})

    def _check(self, group):
        """Nothing to check."""

    def _add_slots(self, table, group):
        table.add_slot("count", ())

    def _update(self, weights, grads, slots, step, group):
        weights.copy_(grads)
        slots[0].add_(1)
