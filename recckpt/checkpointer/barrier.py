"""Where the ranks of one save wait for each other, and all learn at once that one has failed (no torch here)."""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from recckpt.checkpointer.failures import RankFailedError

_log = logging.getLogger(__name__)
_SHORTEST_SLEEP_SEC, _LONGEST_SLEEP_SEC = 0.001, 0.05
_GOOD = b"good"


class Store(Protocol):
    """A key-value store that all ranks share, such as one of ``torch.distributed``."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Say whether all of the keys are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that is not there, where ``expected`` is empty; return what it is then."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""


class Barrier(ABC):
    """Lets the ranks of a save agree, several times a save."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a save. Every rank begins every save, whatever became of the one before."""

    @abstractmethod
    def agree(self, *, last: bool = False) -> None:
        """Wait until all ranks are here. Collective.

        Args:
            last: this is the last time in this save.

        Raises:
            RankFailedError: on all ranks alike: one of them refused, or did not come in time.
        """

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """Make the next agreement fail on all ranks, and do not wait for them."""


class Alone(Barrier):
    """One rank, which agrees with itself."""

    def begin(self) -> None:
        """Do nothing."""

    def agree(self, *, last: bool = False) -> None:
        """Do nothing."""

    def refuse(self, reason: str) -> None:
        """Do nothing."""


class StoreBarrier(Barrier):
    """Agrees over a key-value store, in which each question is decided once, by whoever is first to write the answer.

    So a rank that comes late finds the others gone and fails like them, and the next save begins anew: nothing of a
    failed one stays behind, as it would in a process group whose collective timed out. Not thread-safe.

    Args:
        store: this barrier's own, or own part of one.
        rank: this rank.
        size: number of ranks.
        timeout_sec: how long a rank waits for the others each time.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_sec: float) -> None:
        self._store, self._rank, self._size, self._timeout_sec = store, rank, size, timeout_sec
        self._save = self._question = 0
        self._before = ""

    def begin(self) -> None:
        """Begin a save."""
        self._save, self._question = self._save + 1, 0

    def agree(self, *, last: bool = False) -> None:
        """Wait for the others."""
        place = self._next_place()
        try:
            self._store.set(f"{place}/here/{self._rank}", "1")
            answer = self._wait(place)
            if answer == _GOOD:
                self._leave(place, last=last)
        except RuntimeError as error:  # what torch's stores raise
            raise RankFailedError(self._rank, f"the store that the ranks share failed: {error}") from error
        if answer != _GOOD:
            raise RankFailedError(*json.loads(answer))

    def refuse(self, reason: str) -> None:
        """Tell the others, those too that come later."""
        try:
            self._decide(self._next_place(), self._rank, reason)
        except RuntimeError:  # they will notice by themselves; this rank has its own error to raise
            _log.exception("the other ranks could not be told that this one failed: %s", reason)

    def _next_place(self) -> str:
        self._question += 1
        return f"{self._save}/{self._question}"

    def _decide(self, place: str, rank: int, reason: str) -> bytes:
        return self._store.compare_set(f"{place}/answer", "", json.dumps([rank, reason]))

    def _wait(self, place: str) -> bytes:
        """Return the answer, which the first rank gives when all are here, and any rank when its patience ends."""
        answer, here = f"{place}/answer", [f"{place}/here/{rank}" for rank in range(self._size)]
        for _ in self._moments():
            if self._store.check([answer]):
                return self._store.get(answer)
            if self._rank == 0 and self._store.check(here):
                return self._store.compare_set(answer, "", _GOOD.decode())
        late = [rank for rank, key in enumerate(here) if not self._store.check([key])] or [0]  # it has not answered
        names = ", ".join(map(str, late))
        return self._decide(place, late[0], f"rank {names} did not come to the barrier within {self._timeout_sec:g} s")

    def _leave(self, place: str, *, last: bool) -> None:
        """Forget the question before, which nobody reads any more; at the last one, the first rank leaves last."""
        for key in (f"here/{self._rank}", f"gone/{self._rank}", *(["answer"] if self._rank == 0 else [])):
            if self._before:
                self._store.delete_key(f"{self._before}/{key}")
        self._before = place
        if not last:
            return
        self._store.set(f"{place}/gone/{self._rank}", "1")
        if self._rank == 0:  # the store may live in its process, which may end after this
            gone = [f"{place}/gone/{rank}" for rank in range(self._size)]
            if not any(self._store.check(gone) for _ in self._moments()):
                _log.warning("save %d is committed, but not all ranks have seen that", self._save)

    def _moments(self) -> Iterator[None]:
        """Yield until the timeout, ever less often; the last time after it."""
        deadline, pause = time.monotonic() + self._timeout_sec, _SHORTEST_SLEEP_SEC
        while True:
            left = deadline - time.monotonic()
            yield
            if left <= 0:
                return
            time.sleep(min(pause, max(left, 0)))
            pause = min(pause * 2, _LONGEST_SLEEP_SEC)
