"""Lets the ranks of one save wait for each other, and fail together when one has failed (no torch here)."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod

from recckpt.parallel.attendance import Attendance, KeyValueStore, moments

_log = logging.getLogger(__name__)
_GOOD = b"good"


class RankFailedError(Exception):
    """A rank failed, or did not come, at a barrier.

    Attributes:
        rank: the first that is known of.
        reason: its error, in words.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason = rank, reason


def describe(error: BaseException) -> str:
    """Return an error as one text, for other ranks and for messages."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Barrier(ABC):
    """Lets the ranks of a save agree, several times a save."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a save. Every rank begins every save, however the one before ended."""

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
        """Make the next agreement fail on all ranks, without waiting for them."""


class Alone(Barrier):
    """One rank, which agrees with itself."""

    def begin(self) -> None:
        """Do nothing."""

    def agree(self, *, last: bool = False) -> None:
        """Do nothing."""

    def refuse(self, reason: str) -> None:
        """Do nothing."""


class StoreBarrier(Barrier):
    """Agrees over a key-value store: the first rank to write an answer decides, and all ranks read that answer.

    A rank that comes late finds the answer and fails like the others. Each save has keys of its own, so the failure of
    one leaves nothing behind for the next, as it would in a process group whose collective timed out. Not thread-safe.

    Args:
        store: this barrier's own, or own part of one.
        rank: this rank.
        size: number of ranks.
        timeout_sec: how long a rank waits for the others each time.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int, timeout_sec: float) -> None:
        self._store, self._rank, self._size, self._timeout_sec = store, rank, size, timeout_sec
        self._save = self._question = 0
        self._before: str | None = None

    def begin(self) -> None:
        """Begin a save."""
        self._save, self._question = self._save + 1, 0

    def agree(self, *, last: bool = False) -> None:
        """Wait for the others."""
        place = self._next_place()
        try:
            self._ranks(place).come()
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
            _log.exception("the failure of this rank could not be sent to the others: %s", reason)

    def _next_place(self) -> str:
        self._question += 1
        return f"{self._save}/{self._question}/"

    def _ranks(self, place: str) -> Attendance:
        return Attendance(self._store, self._rank, self._size, place)

    def _decide(self, place: str, rank: int, reason: str) -> bytes:
        return self._store.compare_set(f"{place}answer", "", json.dumps([rank, reason]))

    def _wait(self, place: str) -> bytes:
        """Return the answer: rank 0 gives it once all ranks are here, and any rank once its timeout is up."""
        answer, ranks = f"{place}answer", self._ranks(place)
        for _ in moments(self._timeout_sec):
            if self._store.check([answer]):
                return self._store.get(answer)
            if self._rank == 0 and ranks.all_here():
                return self._store.compare_set(answer, "", _GOOD.decode())
        late = ranks.missing() or [0]  # which has not answered
        names = ", ".join(map(str, late))
        return self._decide(place, late[0], f"rank {names} did not come to the barrier within {self._timeout_sec:g} s")

    def _leave(self, place: str, *, last: bool) -> None:
        """Forget the question before, whose answer all have read; after the last question, rank 0 leaves last."""
        if self._before is not None:
            self._ranks(self._before).forget()
            if self._rank == 0:
                self._store.delete_key(f"{self._before}answer")
        self._before = place
        if last and not self._ranks(place).leave(self._timeout_sec):
            _log.warning("save %d is committed, but not all ranks have seen that", self._save)
