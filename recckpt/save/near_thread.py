"""Work beside training, one at a time, whose errors are its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from recckpt.parallel.threads import give_way
from recckpt.parallel.waiting import Latch, start


class NearThread:
    """Does one thing at a time in a thread. Not thread-safe."""

    def __init__(self) -> None:
        self._over = Latch()
        self._over.set()

    @property
    def is_running(self) -> bool:
        """Whether something is under way."""
        return not self._over.is_set()

    def begin(self, work: Callable[[], object]) -> None:
        """Do work in a thread; it raises nothing.

        Raises:
            RuntimeError: there is no room for a thread.
        """
        over = Latch()

        def run() -> None:
            try:
                give_way()
                work()
            finally:
                over.set()

        start(threading.Thread(target=run, name="recckpt-near"))
        self._over = over

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for what is under way, and say whether it has ended."""
        return self._over.wait(timeout_sec)
