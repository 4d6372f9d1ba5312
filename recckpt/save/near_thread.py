"""Work beside training, one at a time, whose errors are its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

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

    def begin(self, work: Callable[[], object], called_off: Callable[[], object]) -> None:
        """Do work in a thread; it raises nothing.

        Args:
            work: what to do.
            called_off: called where it is not done, since the thread could not be started or that was interrupted.

        Raises:
            RuntimeError: there is no room for a thread.
        """
        over, may_begin = Latch(), SimpleQueue[bool]()

        def run() -> None:
            try:
                if may_begin.get():
                    give_way()
                    work()
            finally:
                over.set()

        is_started = False
        try:
            start(threading.Thread(target=run, name="recckpt-near"))
            self._over, is_started = over, True
        finally:  # where this was interrupted, the thread may be there all the same: what it would read is closed
            may_begin.put(is_started)
            if not is_started:
                called_off()

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for what is under way, and say whether it has ended."""
        return self._over.wait(timeout_sec)
