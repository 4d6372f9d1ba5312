"""Where ranks meet in the midst of work that may fail on any of them, so that none waits for one that has failed."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from recckpt.errors import RecckptError
from recckpt.parallel.outcomes import Failed, error_of, sendable
from recckpt.parallel.process_group import Group, Parcel
from recckpt.parallel.reused_buffer import ReusedBuffer

_T = TypeVar("_T")
_GOES_ON, _FAILED = 0, 1  # the mark of a rank at a meeting


class Meetings:
    """Meetings of ranks that do the same work, and come to them in the same order and equally often.

    All of them have one form, so a rank that fails comes to one more, whichever that is for the others: they raise its
    error there, and there are no further ones. Not thread-safe.

    Attributes:
        rank: number of this rank.
        size: number of ranks.

    Args:
        group: how the ranks reach each other; None for a rank that is alone.
        failed: makes the error that ranks raise where another had one that is not ours; None for a plain one.

    Raises:
        RecckptError: in all methods: another rank has failed.
        RankLostError: in all methods: another rank is missing.
    """

    def __init__(self, group: Group | None = None, failed: Failed | None = None) -> None:
        self.rank, self.size = (group.rank, group.size) if group is not None else (0, 1)
        self._group, self._failed = group, failed
        self._is_over = False

    def exchange(self, parcels: Sequence[Parcel], into: ReusedBuffer | None = None) -> list[Parcel]:
        """Send bytes to each rank, by its number, and return what each has sent; nothing from itself. Collective.

        Args:
            parcels: for each rank.
            into: the buffer for what is received; None for memory of its own.
        """
        marks, received = self._meet(_GOES_ON, parcels, into)
        if _FAILED in marks:
            raise self._first_failure(None)
        return received

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in their order. Collective."""
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        received = self.exchange([data] * self.size)
        return [value if rank == self.rank else pickle.loads(parcel.data) for rank, parcel in enumerate(received)]

    def wait(self) -> None:
        """Return once all ranks are here. Collective."""
        self.exchange(self._nothing)

    def end(self, failure: Exception | None) -> None:
        """Come to the last meeting, unless one before has been the last; ``failure`` is that of this rank. Collective.

        Raises:
            RecckptError: another rank has failed since, and this one has not.
        """
        if failure is not None:
            self._fail(failure)
        elif not self._is_over:
            self.wait()

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """Let the other ranks raise an error of the block as it is, before this rank makes up for it."""
        try:
            yield
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        if not self._is_over:
            self._meet(_FAILED, self._nothing)
            self._first_failure(error)

    def _meet(
        self, mark: int, parcels: Sequence[Parcel], into: ReusedBuffer | None = None
    ) -> tuple[list[int], list[Parcel]]:
        if self._group is None:
            self._is_over = mark == _FAILED
            return [mark], self._nothing
        try:
            marks, received = self._group.exchange(mark, parcels, into)
        except BaseException:  # a rank is missing, or this one was interrupted
            self._is_over = True
            raise
        self._is_over = _FAILED in marks
        return marks, received

    def _first_failure(self, own: Exception | None) -> RecckptError:
        reasons = [sendable(own)] if self._group is None else self._group.all_gather(sendable(own))
        return next(error_of(rank, reason, self._failed) for rank, reason in enumerate(reasons) if reason is not None)

    @property
    def _nothing(self) -> list[Parcel]:
        return [np.empty(0, np.uint8)] * self.size
