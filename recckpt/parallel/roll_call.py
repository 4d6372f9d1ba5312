"""Finds out which rank is missing after communication between ranks has failed. Imports no torch."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, TypeVar

from recckpt.errors import RankLostError
from recckpt.parallel.threads import Errand, start

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SHORTEST_SLEEP_SEC, _LONGEST_SLEEP_SEC = 0.001, 0.05
GRACE_SEC = 2.0  # once for the other ranks and once for the store; together less than the 5 s a timeout may be late
_T = TypeVar("_T")


class Attendance:
    """The ranks that have reported so far, in a store that all ranks share; its keys begin with ``prefix``."""

    def __init__(self, store: Store, rank: int, size: int, prefix: str = "") -> None:
        self._store, self._rank, self._size, self._prefix = store, rank, size, prefix

    def come(self) -> None:
        self._store.set(f"{self._prefix}here/{self._rank}", "1")

    def all_here(self) -> bool:
        """Return whether all ranks have reported; needs one request."""
        return self._store.check([f"{self._prefix}here/{rank}" for rank in range(self._size)])

    def missing(self, ranks: range | None = None) -> list[int]:
        """Return the ranks that have not reported, by binary search: few requests if few ranks are missing."""
        ranks = range(self._size) if ranks is None else ranks
        if self._store.check([f"{self._prefix}here/{rank}" for rank in ranks]):
            return []
        half = len(ranks) // 2
        return [*self.missing(ranks[:half]), *self.missing(ranks[half:])] if half else list(ranks)

    def leave(self, timeout_sec: float, lost: Collection[int] = ()) -> bool:
        """Record that this rank leaves, and on rank 0, wait until all ranks that are not lost have left.

        Returns False if the wait timed out. Rank 0 leaves last, because its process may hold the store and may end
        after this call.
        """
        self._store.set(f"{self._prefix}gone/{self._rank}", "1")
        gone = [f"{self._prefix}gone/{rank}" for rank in range(self._size) if rank not in lost]
        return self._rank != 0 or any(self._store.check(gone) for _ in moments(timeout_sec))

    def forget(self) -> None:
        self._store.delete_key(f"{self._prefix}here/{self._rank}")
        self._store.delete_key(f"{self._prefix}gone/{self._rank}")


def moments(timeout_sec: float) -> Iterator[None]:
    """Yield until the timeout, at growing intervals; once more after it."""
    deadline, pause = time.monotonic() + timeout_sec, _SHORTEST_SLEEP_SEC
    while True:
        left = deadline - time.monotonic()
        yield
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(pause * 2, _LONGEST_SLEEP_SEC)


class RollCall:
    """Finds the missing ranks. The answer is the same on all ranks and does not change later. Thread-safe.

    No other object may use the same keys of the store. A rank waits ``timeout_sec`` for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_sec: float) -> None:
        self._store, self._rank, self._timeout_sec = store, rank, timeout_sec
        self._ranks = Attendance(store, rank, size)
        self._lock = threading.Lock()
        self._lost: RankLostError | None = None

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        if self._lost is not None:
            raise RankLostError(self._lost.ranks, self._lost.cause)

    def take(self, waited_since: float, *, timed_out: bool, cause: str) -> RankLostError:
        """Return the error that names the missing ranks; all ranks that call this get the same error.

        The other ranks call this too, as soon as their communication fails or they have finished their own work.

        Args:
            waited_since: when this rank began to wait, in ``time.monotonic``; ranks that have not called this
                ``timeout_sec`` later are missing.
            timed_out: whether communication failed by a timeout; False for a closed connection.
            cause: text of the failure.
        """
        with self._lock:
            if self._lost is None:
                end = GRACE_SEC + max(time.monotonic(), 0.0 if timed_out else waited_since + self._timeout_sec)
                verdict = within(end - time.monotonic() + GRACE_SEC, lambda: self._agree(end, timed_out, cause))
                silent = [0], f"{cause}; the store of the process group, usually in rank 0, does not answer either"
                ranks, text = verdict or silent
                self._lost = RankLostError(ranks, text)
        return RankLostError(self._lost.ranks, self._lost.cause)

    def _agree(self, end: float, timed_out: bool, cause: str) -> tuple[list[int], str]:
        """Wait until at most one rank is missing, another rank has decided, or the time is up; return the decision."""
        self._ranks.come()
        for _ in moments(end - time.monotonic()):
            missing = self._ranks.missing()
            if len(missing) <= 1 or self._store.check(["missing"]):
                break
        reason = f"it did not answer within {self._timeout_sec:g} s" if timed_out else "its connection was closed"
        verdict = (missing, f"{reason} ({cause})") if missing else ([self._rank], f"all ranks are there, but {cause}")
        ranks, text = json.loads(self._store.compare_set("missing", "", json.dumps(verdict)))
        self._ranks.leave(0.75 * GRACE_SEC, lost=ranks)
        return list(ranks), str(text)


def in_time(seconds: float, work: Callable[[], _T], what: str) -> _T:
    """Return what ``work`` returns, or raise its error; TimeoutError if ``work`` takes longer than ``seconds``.

    After a timeout, ``work`` keeps running in its thread. The limit lets this rank answer before other ranks consider
    it lost.
    """
    errand = Errand(work)
    start(threading.Thread(target=errand.run, name="recckpt-in-time", daemon=True))
    if not errand.over.wait(seconds):
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {seconds:g} s", what)
    return errand.result()


def within(seconds: float, work: Callable[[], _T]) -> _T | None:
    """Return what ``work`` returns; None if ``work`` raises RuntimeError or takes longer than ``seconds``."""
    errand = Errand(work)
    start(threading.Thread(target=errand.run, name="recckpt-roll-call", daemon=True))
    try:
        return errand.result() if errand.over.wait(seconds) else None
    except RuntimeError:  # from torch's stores
        return None
