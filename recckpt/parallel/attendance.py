"""Which ranks are at a place, by the keys that each writes into a store that all of them share (no torch here)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Protocol

_SHORTEST_SLEEP_SEC, _LONGEST_SLEEP_SEC = 0.001, 0.05


class KeyValueStore(Protocol):
    """A key-value store that all ranks share, such as one of ``torch.distributed``."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Say whether all of the keys are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it is not there, where ``expected`` is empty; return its value."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""


class Attendance:
    """One place where ranks meet; its keys in the store begin with ``prefix``."""

    def __init__(self, store: KeyValueStore, rank: int, size: int, prefix: str = "") -> None:
        self._store, self._rank, self._size, self._prefix = store, rank, size, prefix

    def come(self) -> None:
        """Say that this rank is here."""
        self._store.set(self._here(self._rank), "1")

    def all_here(self) -> bool:
        """Say whether all ranks have come, by one request."""
        return self._store.check([self._here(rank) for rank in range(self._size)])

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return self._missing(range(self._size))

    def leave(self, timeout_sec: float, lost: Collection[int] = ()) -> bool:
        """Say that this rank leaves; rank 0 waits until all but the lost ones have, and says whether they did.

        Rank 0 leaves last because the store may live in its process, which may end after this.
        """
        self._store.set(self._gone(self._rank), "1")
        gone = [self._gone(rank) for rank in range(self._size) if rank not in lost]
        return self._rank != 0 or any(self._store.check(gone) for _ in moments(timeout_sec))

    def forget(self) -> None:
        """Remove the keys of this rank."""
        self._store.delete_key(self._here(self._rank))
        self._store.delete_key(self._gone(self._rank))

    def _missing(self, ranks: range) -> list[int]:
        """Halve the ranks until the missing ones are found: few requests where few are missing."""
        if self._store.check([self._here(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return [*self._missing(ranks[:half]), *self._missing(ranks[half:])]

    def _here(self, rank: int) -> str:
        return f"{self._prefix}here/{rank}"

    def _gone(self, rank: int) -> str:
        return f"{self._prefix}gone/{rank}"


def moments(timeout_sec: float) -> Iterator[None]:
    """Yield until the timeout, ever less often; the last time after it."""
    deadline, pause = time.monotonic() + timeout_sec, _SHORTEST_SLEEP_SEC
    while True:
        left = deadline - time.monotonic()
        yield
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(pause * 2, _LONGEST_SLEEP_SEC)
