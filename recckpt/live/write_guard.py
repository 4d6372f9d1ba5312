"""Notices writes to tensors that were not announced, by the versions that torch counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from recckpt.live.dtensor import version_of

Versions = Mapping[str, tuple[int, int]]  # slot -> where it lies, and how often it was written in place


class WriteGuard:
    """Compares the versions of tensors between writes that were announced: torch counts each change in place.

    It does not count what goes past autograd: ``weight.data.mul_(2)``, the steps of fused optimizers, and of a DTensor
    those with ``foreach``. Those of the optimizer that trains a table are announced all the same; for the former,
    docs/your-tables.md says what to do.
    Thread-safe.

    Args:
        tensors: returns those of now.
        on_unseen: is called where they were written to.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], on_unseen: Callable[[], object]) -> None:
        self._tensors, self._on_unseen = tensors, on_unseen
        self._lock = threading.RLock()
        self._is_writing = False
        self._versions = self._now()

    def begin(self) -> None:
        """Look once more before a write that was announced; one that has not ended was ended by an exception."""
        with self._lock:
            self.settle()
            self._is_writing = True

    def end(self) -> None:
        """Take what is there after that write for known."""
        with self._lock:
            self._is_writing, self._versions = False, self._now()

    def look(self) -> None:
        """Call ``on_unseen`` where something wrote since the last look; not while a write is under way."""
        with self._lock:
            if self._is_writing:
                return
            before, self._versions = self._versions, self._now()
            # Tensors that lie elsewhere are others: the store compares the places itself.
            if any(there[0] == now[0] and there != now for there, now in _both(before, self._versions)):
                self._on_unseen()

    def settle(self) -> None:
        """Look in the thread that trains: a write that is still under way there was ended by an exception.

        What it wrote itself is not told from what came after it, so that counts as not announced either.
        """
        with self._lock:
            self._is_writing = False
            self.look()

    def _now(self) -> Versions:
        return {slot: version_of(tensor) for slot, tensor in self._tensors().items()}


def _both(one: Versions, other: Versions) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [(one[slot], other[slot]) for slot in one.keys() & other.keys()]
