"""Work beside training, one at a time, whose errors are its own, and which ends before the same step on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from recckpt.parallel.ranks import Ranks
from recckpt.parallel.threads import give_way
from recckpt.parallel.waiting import Latch, start


class LeftOutNear:
    """Counts what is left out while work is under way, so that all ranks leave out the same.

    Its threads end at different moments, while the ranks train at different steps. So they meet when the work is done,
    each says how much it has left out by then, and all leave out as much as the one that has left out most. So no rank
    asks the others when something is due, and what is left out costs nothing.
    """

    def __init__(self) -> None:
        self._lock, self._is_counted = threading.Lock(), False
        self._n_left_out = self._n_of_all = 0
        self._over = Latch()

    def leaves_out(self) -> bool:
        """Say whether what is due now is left out; waits while the ranks meet. For the thread that trains."""
        with self._lock:
            if not self._is_counted:
                self._n_left_out += 1
                return True
        self._over.wait()
        is_left_out = self._n_left_out < self._n_of_all
        self._n_left_out += is_left_out
        return is_left_out

    def agree(self, ranks: Ranks) -> None:
        """Let all ranks know how much is left out. Collective.

        Raises:
            RecckptError: a rank is missing.
        """
        self._count()
        self._n_of_all = max(ranks.on_all(lambda: self._n_left_out))

    def end(self) -> None:
        """Leave out no more than all ranks have agreed on; nothing more where they have not."""
        self._count()
        self._over.set()

    def _count(self) -> None:
        with self._lock:
            self._is_counted = True


class NearThread:
    """Does one thing at a time in a thread. Not thread-safe."""

    def __init__(self) -> None:
        self._over, self._turn = Latch(), LeftOutNear()
        self._over.set()
        self._turn.end()

    def leaves_out(self) -> bool:
        """Say whether what is due now is left out, since something is under way, or was on another rank."""
        return self._turn.leaves_out()

    def begin(self, work: Callable[[LeftOutNear], object], called_off: Callable[[], object]) -> None:
        """Do work in a thread; it raises nothing.

        Args:
            work: what to do; at its end all ranks are to agree on the turn that it is given.
            called_off: called where it is not done, since the thread could not be started or that was interrupted.

        Raises:
            RuntimeError: there is no room for a thread.
        """
        over, turn, may_begin = Latch(), LeftOutNear(), SimpleQueue[bool]()

        def run() -> None:
            try:
                if may_begin.get():
                    give_way()
                    work(turn)
            finally:
                turn.end()
                over.set()

        is_started = False
        try:
            start(threading.Thread(target=run, name="recckpt-near"))
            self._over, self._turn, is_started = over, turn, True
        finally:  # where this was interrupted, the thread may be there all the same: what it would read is closed
            may_begin.put(is_started)
            if not is_started:
                called_off()

    def settle(self, timeout_sec: float | None = None) -> bool:
        """Wait for what is under way, and say whether it has ended."""
        return self._over.wait(timeout_sec)
