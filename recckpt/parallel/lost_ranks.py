"""Which rank is missing, where ranks that work together reach each other no longer (no torch here)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from recckpt.errors import RankLostError

GRACE_SEC = 2.0  # twice of it, for those who answer and for the store, is less than the 5 s that a timeout may be late
_POLL_SEC = 0.02
_T = TypeVar("_T")


class Store(Protocol):
    """A key-value store that all ranks share, such as one of ``torch.distributed``."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def check(self, keys: list[str]) -> bool:
        """Say whether all of the keys are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that is not there, where ``expected`` is empty; return what it is then."""


class RollCall:
    """Says which rank is missing, to all that ask alike, and from then on that the ranks are apart. Thread-safe.

    Args:
        store: a part of it that is this call's own.
        rank: this rank.
        size: number of ranks.
        timeout_sec: how long a rank waits for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_sec: float) -> None:
        self._store, self._rank, self._size, self._timeout_sec = store, rank, size, timeout_sec
        self._lock = threading.Lock()
        self._lost: RankLostError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether a rank is missing."""
        return self._lost is not None

    def check(self) -> None:
        """Do nothing while no rank is known to be missing.

        Raises:
            RankLostError: one is.
        """
        if self._lost is not None:
            raise RankLostError(self._lost.ranks, self._lost.cause)

    def take(self, waited_since: float, *, timed_out: bool, cause: str) -> RankLostError:
        """Return the error that names the missing rank, which all ranks that are there agree on.

        Whoever is there comes here too: at once where it waits for the others, and when it is through with its own
        work else, until this rank has waited for the timeout. The last one not to come is it.

        Args:
            waited_since: when this rank began to wait for the others, by ``time.monotonic``.
            timed_out: whether it has waited in vain, rather than a connection was closed.
            cause: what it found.
        """
        with self._lock:
            if self._lost is None:
                end = GRACE_SEC + max(time.monotonic(), 0.0 if timed_out else waited_since + self._timeout_sec)
                found = within(end - time.monotonic() + GRACE_SEC, lambda: self._agree(end, timed_out, cause))
                silent = [0], f"{cause}; the store by which ranks find each other, mostly held by rank 0, is silent too"
                ranks, text = found or silent
                self._lost = RankLostError(ranks, text)
        return RankLostError(self._lost.ranks, self._lost.cause)

    def _agree(self, end: float, timed_out: bool, cause: str) -> tuple[list[int], str]:
        self._store.set(f"here/{self._rank}", "1")
        while True:
            missing = self._missing(range(self._size))
            is_over = time.monotonic() >= end or self._store.check(["missing"])
            if is_over or len(missing) <= 1:
                break
            time.sleep(_POLL_SEC)
        said = f"it did not answer within {self._timeout_sec:g} s" if timed_out else "its connection was closed"
        verdict = (missing, f"{said} ({cause})") if missing else ([self._rank], f"all ranks are there, but {cause}")
        ranks, text = json.loads(self._store.compare_set("missing", "", json.dumps(verdict)))
        self._leave(set(ranks))
        return list(ranks), str(text)

    def _leave(self, lost: set[int]) -> None:
        """Rank 0 leaves last: the store may live in its process, which may end after this."""
        self._store.set(f"gone/{self._rank}", "1")
        gone = [f"gone/{rank}" for rank in range(self._size) if rank not in lost]
        end = time.monotonic() + 0.75 * GRACE_SEC
        while self._rank == 0 and not self._store.check(gone) and time.monotonic() < end:
            time.sleep(_POLL_SEC)

    def _missing(self, ranks: range) -> list[int]:
        """Return those that have not come, by a few questions where they are few."""
        if self._store.check([f"here/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return [*self._missing(ranks[:half]), *self._missing(ranks[half:])]


def within(seconds: float, work: Callable[[], _T]) -> _T | None:
    """Return what work returns, None where it fails, or takes longer: a store whose host was stopped never answers."""
    done: list[_T] = []

    def run() -> None:
        try:
            done.append(work())
        except RuntimeError:  # what torch's stores raise
            return

    thread = threading.Thread(target=run, name="recckpt-roll-call", daemon=True)
    thread.start()
    thread.join(seconds)
    return done[0] if done else None
