"""Ranks that act as one: what fails on one of them fails on all, with the same error."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar, cast

import numpy as np

from recckpt.errors import PartlyLoadedError, RankLostError, RecckptError
from recckpt.parallel.process_group import Parcel, ProcessGroup, ReusedBuffer, group_of
from recckpt.text.foreign_words import answers_by

_T = TypeVar("_T")
Failed = Callable[[int, str], RecckptError]
Reason = RecckptError | str  # an error of ours as it is, the text of any other
_GOES_ON, _FAILED = 0, 1  # the mark of a rank at a meeting
DEFAULT_TIMEOUT_SEC = 1800.0
VISIBLE_SEC = 90.0  # to look for files of other ranks: an NFS client may use a listing for 60
_R = TypeVar("_R")
Lost = Callable[[RankLostError], RecckptError]


class OtherCallError(RecckptError):
    """Ranks have met in different calls, so that whatever they do next together would go on in the wrong order."""


def outcome_of(work: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def sendable(failure: Exception | None) -> Reason | None:
    """Return an error as it is sent to other ranks: ours as they are, others as text."""
    if failure is None or isinstance(failure, RecckptError):
        return failure
    return f"{type(failure).__name__}: {failure}"


def error_of(rank: int, reason: Reason, failed: Failed | None) -> RecckptError:
    """Return what a rank raises for the failure of another; ``failed`` makes errors of text, None for a plain one."""
    if isinstance(reason, RecckptError):
        return reason
    return RecckptError(f"rank {rank} failed: {reason}") if failed is None else failed(rank, reason)


def _gathered(group: ProcessGroup, value: _T) -> list[_T]:
    """Return the values of all ranks; each sends with it in which call it is. Collective."""
    of_ranks = group.all_gather((*_call(), value))
    place, call, _ = of_ranks[0]
    for rank, (other_place, other_call, _) in enumerate(of_ranks):
        if other_place != place:
            raise OtherCallError(
                f"rank {rank} is in {other_call}() ({other_place}), and rank 0 in {call}() ({place}): ranks have taken "
                "different numbers of steps; let all make the same calls, in a loop that ends for all at the same step"
            )
    return [value for _, _, value in of_ranks]


def _call() -> tuple[str, str]:
    """Return which function meets the other ranks, and in which call of recckpt, as the stack has them."""
    names = list[tuple[str, str]]()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if names and not module.startswith("recckpt."):
            break
        if module not in (__name__, answers_by.__module__):  # the latter wraps calls
            names.append((module.rpartition(".")[2], frame.f_code.co_name))
        frame = frame.f_back
    return ".".join(names[0]), names[-1][1]


class Meetings:
    """Meetings of ranks that do the same work: all come to the same meetings in the same order.

    All meetings have one form, so a rank that fails comes to one more, which may be any for the others: they raise its
    error there, and no further meetings follow. Not thread-safe.

    Args:
        group: how the ranks reach each other; None for a rank that is alone.
        failed: makes the error that ranks raise if another had one that is not ours; None for a plain one.

    Raises:
        RecckptError: in all methods: another rank has failed.
        RankLostError: in all methods: another rank is missing.
    """

    def __init__(self, group: ProcessGroup | None = None, failed: Failed | None = None) -> None:
        self.rank, self.size = (group.rank, group.size) if group is not None else (0, 1)
        self._group, self._failed = group, failed
        self._nothing: list[Parcel] = [np.empty(0, np.uint8)] * self.size  # for each rank
        self._is_over = False

    def exchange(self, parcels: Sequence[Parcel], into: ReusedBuffer | None = None) -> list[Parcel]:
        """Send bytes to each rank, and return what each has sent; nothing from itself. Collective.

        Received bytes are in the buffer ``into``; with None in new memory.
        """
        marks, received = self._meet(_GOES_ON, parcels, into)
        if _FAILED in marks:
            raise self._first_failure(None)
        return received

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in order of rank. Collective."""
        if self.size == 1:
            self.wait()
            return [value]
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        received = self.exchange([data] * self.size)
        return [value if rank == self.rank else pickle.loads(parcel.data) for rank, parcel in enumerate(received)]

    def wait(self) -> None:
        """Return once all ranks are here. Collective."""
        self.exchange(self._nothing)

    def end(self, failure: Exception | None) -> None:
        """Come to the last meeting, unless it is over; ``failure`` is this rank's own. Collective.

        Raises RecckptError if another rank has failed since, and this one has not.
        """
        if failure is not None:
            self._fail(failure)
        elif not self._is_over:
            self.wait()

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """Let the other ranks raise an error of the block as it is, before this rank handles it."""
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


class Connection:
    """Two groups of the same ranks, made on first use: for the caller and for a thread. Thread-safe.

    ``connect`` makes the caller's; it is collective if there are several ranks.
    """

    def __init__(self, connect: Callable[[], ProcessGroup]) -> None:
        self._connect, self._lock = connect, threading.Lock()
        self._groups: tuple[ProcessGroup, ProcessGroup] | None = None

    @property
    def groups(self) -> tuple[ProcessGroup, ProcessGroup]:
        """The group of the caller, and one for a thread, so that the two never meet each other's collectives."""
        with self._lock:
            if self._groups is None:
                front = self._connect()
                self._groups = front, front.twin()
            return self._groups

    @property
    def is_lost(self) -> bool:
        return self._groups is not None and self._groups[0].is_lost

    @property
    def is_over(self) -> bool:
        return self._groups is not None and self._groups[0].is_over


@dataclass(frozen=True)
class Ranks:
    """This rank and those that work with it; they all call the same methods in the same order.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        connection: how they reach each other; None for a rank that is alone.
        failed: makes the error that all ranks raise if one had an error that is not ours: (rank, text) -> error; with
            None a rank raises its own as it is.
        lost: makes the error that is raised if a rank is missing; None for RankLostError as it is.
        is_background: whether they act in a thread of their own.
    """

    rank: int
    size: int
    connection: Connection | None = None
    failed: Failed | None = None
    lost: Lost | None = None
    is_background: bool = False

    def raising(self, failed: Failed, lost: Lost | None = None) -> Ranks:
        return replace(self, failed=failed, lost=lost)

    @property
    def background(self) -> Ranks:
        """The same ranks for a thread, which may act beside the caller."""
        return replace(self, is_background=True)

    @property
    def has_lost(self) -> bool:
        """Whether a rank is known to be missing, so that all collective methods raise at once. Not collective."""
        return self.connection is not None and self.connection.is_lost

    @property
    def is_over(self) -> bool:
        """Whether the process group that they belong to has been destroyed. Not collective."""
        return self.connection is not None and self.connection.is_over

    def gather(self, own: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank. Collective.

        As in all methods, a missing rank raises RankLostError, or what ``lost`` makes of it; where ranks
        are in different calls that gather or do work, as here and in :meth:`on_all`, all raise OtherCallError.
        """
        if self.connection is None:
            return [own]
        with self._group(self.connection) as group:
            return _gathered(group, own)

    def on_all(self, work: Callable[[], _T]) -> list[_T]:
        """Do work on every rank and return all results, in order of rank; all raise the first failure. Collective."""
        if self.connection is None:
            return [self._alone(work)]

        with self._group(self.connection) as group:
            result, failure = outcome_of(work)
            outcomes: list[Any] = _gathered(group, (result, sendable(failure)))
            for rank, (_, reason) in enumerate(outcomes):
                self._raise_alike(rank, reason, failure if rank == group.rank else None)
            return [result for result, _ in outcomes]

    def on_each(self, work: Callable[[], _T]) -> _T:
        """Do work on every rank, as :meth:`on_all`, and return this rank's result; results are not sent. Collective."""
        results: list[_T] = []
        self.on_all(lambda: results.append(work()))
        return results[0]

    def on_first(self, work: Callable[[], _T]) -> _T:
        """Do work on rank 0, and return its result on all ranks; all raise its failure. Collective."""
        if self.connection is None:
            return self._alone(work)

        with self._group(self.connection) as group:
            own, failure = outcome_of(work) if group.rank == 0 else (None, None)
            result, reason = group.broadcast((own, sendable(failure)))
            self._raise_alike(0, reason, failure)
            return cast(_T, result)

    def concluded(self, work: Callable[[], _T], conclude: Callable[[list[_T]], _R]) -> _R:
        """Do work on every rank, send the results to rank 0, and return its conclusion from them on all. Collective.

        Traffic grows with the number of ranks; with :meth:`on_all` it grows with its square. ``conclude`` gets all
        results, in order of rank, unless work failed on a rank. All raise the first failure, or that of ``conclude``.
        """
        if self.connection is None:
            return self._alone(lambda: conclude([work()]))

        with self._group(self.connection) as group:
            result, failure = outcome_of(work)
            outcomes = group.gather_to_first((result, sendable(failure)))
            rank, own, conclusion = 0, failure, None
            reason: Reason | None = None
            if outcomes is not None:
                failed = ((at, reason) for at, (_, reason) in enumerate(outcomes) if reason is not None)
                rank, reason = next(failed, (0, None))
                if reason is None:
                    conclusion, own = outcome_of(lambda: conclude([result for result, _ in outcomes]))
                    reason = sendable(own)
            rank, reason, conclusion = group.broadcast((rank, reason, conclusion))
            self._raise_alike(rank, reason, own if rank == group.rank else None)
            return cast(_R, conclusion)

    def in_meetings(self, work: Callable[[Meetings], _T]) -> _T:
        """Do work on every rank, in which all come to the same meetings; return this rank's result. Collective.

        Raises:
            RecckptError: work failed on a rank. Ranks that are at a meeting, or come to one, raise the failure there,
                and in the end all raise the same error; if tables have changed, a PartlyLoadedError.
        """
        if self.connection is None:
            return self._alone(lambda: work(Meetings()))

        with self._group(self.connection) as group:
            meetings = Meetings(group, self.failed)
            result, failure = outcome_of(lambda: work(meetings))
            _, failure_elsewhere = outcome_of(lambda: meetings.end(failure))
            failure = failure or failure_elsewhere
            if failure is None:
                return cast(_T, result)
            reasons = group.all_gather(sendable(failure))
            changed = (rank for rank, reason in enumerate(reasons) if isinstance(reason, PartlyLoadedError))
            rank = next(changed, 0)
            if rank == group.rank:
                self._raise_alike(rank, reasons[rank], failure)
            own = None if isinstance(failure, RecckptError) else failure
            raise error_of(rank, reasons[rank], self.failed) from own

    def _alone(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except RecckptError:
            raise
        except Exception as error:
            if self.failed is None:
                raise
            raise self.failed(0, f"{type(error).__name__}: {error}") from error

    @contextmanager
    def _group(self, connection: Connection) -> Iterator[ProcessGroup]:
        try:
            yield connection.groups[self.is_background]
        except RankLostError as error:
            if self.lost is None:
                raise
            raise self.lost(error) from error

    def _raise_alike(self, rank: int, reason: Reason | None, own: Exception | None) -> None:
        """Raise the failure of a rank, if there is one; on that rank, with its own error as the cause."""
        if reason is None:
            return
        if isinstance(reason, str) and self.failed is not None:
            raise self.failed(rank, reason) from own
        raise own or error_of(rank, reason, None)


class RanksNow(dict[tuple[int, int], Ranks]):
    """The ranks of a saver by (rank, size), as the process group is now; they connect on first use."""

    def __init__(self, timeout_sec: float) -> None:
        super().__init__()
        self._timeout_sec = timeout_sec

    def of(self, shard_id: int | None, shard_num: int | None) -> Ranks:
        """Return the ranks that act together. Not collective.

        Raises ValueError if the numbers do not fit each other.
        """
        rank, size = key = this_rank(shard_id, shard_num)
        if key not in self or self[key].is_over:
            connection = Connection(lambda: group_of(rank, size, self._timeout_sec)) if size > 1 else None
            self[key] = Ranks(rank, size, connection)
        return self[key]

    @property
    def has_lost(self) -> bool:
        """Whether a rank is known to be missing, so that everything collective raises."""
        return any(ranks.has_lost for ranks in self.values())


def this_rank(shard_id: int | None = None, shard_num: int | None = None) -> tuple[int, int]:
    """Return the number of this rank and of all: as given, else by :func:`rank_and_size`.

    Raises ValueError if the numbers do not fit each other, or the environment is needed and has no valid numbers.
    """
    is_given = shard_num == 1 or None not in (shard_id, shard_num)
    rank, size = (0, 1) if is_given else rank_and_size()
    size = size if shard_num is None else shard_num
    rank = (0 if size == 1 else rank) if shard_id is None else shard_id
    if not (type(size) is int and type(rank) is int and 0 <= rank < size):
        raise ValueError(f"shard_id must be 0 to shard_num - 1, found shard_id={rank!r}, shard_num={size!r}")
    return rank, size


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, by the process group, else by RANK and WORLD_SIZE.

    Raises ValueError if one of the two variables is not a number, or is missing although the other means several ranks.
    """
    dist = sys.modules.get("torch.distributed")  # without which there is no process group
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    text = ", ".join(f"{name}={value!r}" for name, value in found.items())
    try:
        rank, size = int(found.get("RANK", 0)), int(found.get("WORLD_SIZE", 1))
    except ValueError as error:
        raise ValueError(f"{text}: expected a number each, or neither") from error
    if len(found) == 1 and (rank, size) != (0, 1):
        raise ValueError(
            f"found {text} in the environment without {'RANK' if 'RANK' not in found else 'WORLD_SIZE'}, and no "
            "process group: this may be one of several processes, which would fight over one output dir; set both, as "
            "torchrun does, or call init_process_group, or give shard_id and shard_num (0 and 1 where this one works "
            "for itself)"
        )
    return rank, size
