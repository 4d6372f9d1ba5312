"""Finds out which rank is missing when ranks that work together no longer reach each other (no torch here)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from recckpt.errors import RankLostError
from recckpt.parallel.attendance import Attendance, KeyValueStore, moments
from recckpt.parallel.waiting import Latch, start

GRACE_SEC = 2.0  # twice of it, for those who answer and for the store, is less than the 5 s that a timeout may be late
_T = TypeVar("_T")


class RollCall:
    """Says which rank is missing: the same answer on all ranks, now and from then on. Thread-safe.

    Its keys need a part of the store of their own; a rank waits ``timeout_sec`` for the others.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int, timeout_sec: float) -> None:
        self._store, self._rank, self._timeout_sec = store, rank, timeout_sec
        self._ranks = Attendance(store, rank, size)
        self._lock = threading.Lock()
        self._lost: RankLostError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether a rank is missing."""
        return self._lost is not None

    def check(self) -> None:
        """Raise RankLostError if a rank is known to be missing."""
        if self._lost is not None:
            raise RankLostError(self._lost.ranks, self._lost.cause)

    def take(self, waited_since: float, *, timed_out: bool, cause: str) -> RankLostError:
        """Return the error that names the missing ranks, on which all others agree.

        The other ranks call this too: at once if they were waiting, else when they have finished their own work. This
        rank waits for them until the timeout is up, counted from ``waited_since`` (``time.monotonic``); those that have
        not come by then are missing. ``timed_out`` distinguishes a timeout from a closed connection.
        """
        with self._lock:
            if self._lost is None:
                end = GRACE_SEC + max(time.monotonic(), 0.0 if timed_out else waited_since + self._timeout_sec)
                verdict = within(end - time.monotonic() + GRACE_SEC, lambda: self._agree(end, timed_out, cause))
                silent = [0], f"{cause}; the store by which ranks find each other, mostly held by rank 0, is silent too"
                ranks, text = verdict or silent
                self._lost = RankLostError(ranks, text)
        return RankLostError(self._lost.ranks, self._lost.cause)

    def _agree(self, end: float, timed_out: bool, cause: str) -> tuple[list[int], str]:
        """Wait until all but one have come, another rank has given the answer, or the time is up; then answer."""
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


def within(seconds: float, work: Callable[[], _T]) -> _T | None:
    """Return what ``work`` returns; None if it fails or takes longer, as with a store whose host was stopped."""
    done: list[_T] = []

    def run() -> None:
        try:
            done.append(work())
        except RuntimeError:  # what torch's stores raise
            return
        finally:
            over.set()

    over = Latch()
    start(threading.Thread(target=run, name="recckpt-roll-call", daemon=True))
    over.wait(seconds)
    return done[0] if done else None
