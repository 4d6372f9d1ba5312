"""Work that all ranks do together: if it fails on one rank, all ranks raise the same error."""

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
Reason = RecckptError | str  # an error of recckpt itself, or the text of any other error
_GOES_ON, _FAILED = 0, 1  # marks that a rank sends at a meeting
DEFAULT_TIMEOUT_SEC = 1800.0
VISIBLE_SEC = 90.0  # how long to look for files of other ranks, because an NFS client may cache a listing for 60 s
_R = TypeVar("_R")
Lost = Callable[[RankLostError], RecckptError]


class OtherCallError(RecckptError):
    """Ranks are in different calls, so that their next collectives would not match."""


def outcome_of(work: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def sendable(failure: Exception | None) -> Reason | None:
    """Return what to send to other ranks for an error: an error of recckpt itself, the text of any other error."""
    if failure is None or isinstance(failure, RecckptError):
        return failure
    return f"{type(failure).__name__}: {failure}"


def error_of(rank: int, reason: Reason, failed: Failed | None) -> RecckptError:
    """Return the error that a rank raises if another rank failed.

    If the reason is a text, ``failed(rank, text)`` makes the error; if ``failed`` is None, it is a RecckptError.
    """
    if isinstance(reason, RecckptError):
        return reason
    return RecckptError(f"rank {rank} failed: {reason}") if failed is None else failed(rank, reason)


def _gathered(group: ProcessGroup, value: _T) -> list[_T]:
    """Return the values of all ranks; OtherCallError if ranks are in different calls. Collective."""
    of_ranks = group.all_gather((*_call(), value))
    place, call, _ = of_ranks[0]
    for rank, (other_place, other_call, _) in enumerate(of_ranks):
        if other_place != place:
            raise OtherCallError(
                f"rank {rank} is in {other_call}() ({other_place}), and rank 0 in {call}() ({place}): ranks have taken "
                "different numbers of steps; make the same calls on all ranks, and end the loop at the same step on all"
            )
    return [value for _, _, value in of_ranks]


def _call() -> tuple[str, str]:
    """Return (the function that communicates, the public recckpt function that was called), from the stack."""
    names = list[tuple[str, str]]()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module not in (__name__, answers_by.__module__, "contextlib"):  # skip the wrappers of public calls
            if names and not module.startswith("recckpt."):
                break
            names.append((module.rpartition(".")[2], frame.f_code.co_name))
        frame = frame.f_back
    return ".".join(names[0]), names[-1][1]


class Meetings:
    """Collective calls of ranks that do the same work; all ranks make the same calls in the same order.

    A meeting is one such call, and all meetings exchange the same kind of data. So a rank that fails sends its failure
    in one more meeting, whatever the next meeting of the other ranks is. The other ranks raise the error there, and no
    further meetings follow. Not thread-safe.

    Args:
        group: the group for communication; None if there is only one rank.
        failed: makes the error to raise if another rank failed with an error that is not recckpt's; None for a
            RecckptError.

    Raises:
        RecckptError: in all methods: another rank has failed.
        RankLostError: in all methods: another rank is missing.
    """

    def __init__(self, group: ProcessGroup | None = None, failed: Failed | None = None) -> None:
        self.rank, self.size = (group.rank, group.size) if group is not None else (0, 1)
        self._group, self._failed = group, failed
        self._nothing: list[Parcel] = [np.empty(0, np.uint8)] * self.size  # one empty parcel per rank
        self._is_over = False

    def exchange(self, parcels: Sequence[Parcel], into: ReusedBuffer | None = None) -> list[Parcel]:
        """Send one parcel to each rank; return the received parcels by rank, an empty one for this rank. Collective.

        Received bytes are in the buffer ``into``, or in new memory if ``into`` is None.
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
        """Return once all ranks have called this. Collective."""
        self.exchange(self._nothing)

    def end(self, failure: Exception | None) -> None:
        """Join the last meeting, unless a rank has failed before; ``failure`` is this rank's error, if any. Collective.

        Raises RecckptError if another rank has failed and this rank has not.
        """
        if failure is not None:
            self._fail(failure)
        elif not self._is_over:
            self.wait()

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """If the block raises, send the error to the other ranks, which raise it, and then raise it here."""
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
        except BaseException:  # a rank is missing, or this rank was interrupted
            self._is_over = True
            raise
        self._is_over = _FAILED in marks
        return marks, received

    def _first_failure(self, own: Exception | None) -> RecckptError:
        reasons = [sendable(own)] if self._group is None else self._group.all_gather(sendable(own))
        return next(error_of(rank, reason, self._failed) for rank, reason in enumerate(reasons) if reason is not None)


class Connection:
    """Two groups of the same ranks, one for the caller and one for a background thread. Thread-safe.

    The groups are made on first use. ``connect`` makes the caller's group; it is collective if there are several ranks.
    """

    def __init__(self, connect: Callable[[], ProcessGroup]) -> None:
        self._connect, self._lock = connect, threading.Lock()
        self._groups: tuple[ProcessGroup, ProcessGroup] | None = None

    @property
    def groups(self) -> tuple[ProcessGroup, ProcessGroup]:
        """(Group of the caller, group of the background thread), so that their collectives do not mix."""
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
    """The ranks that work together; all ranks call the same methods in the same order.

    Attributes:
        rank: index of this rank.
        size: number of ranks.
        connection: the groups for communication; None if there is only one rank.
        failed: function (rank, text) -> error that all ranks raise if a rank failed with an error that is not
            recckpt's; with None, that rank raises its own error unchanged.
        lost: makes the error to raise from a RankLostError; None to raise the RankLostError.
        is_background: whether the methods are called in a background thread.
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
        """The same ranks for a background thread, which may communicate while the caller does."""
        return replace(self, is_background=True)

    @property
    def has_lost(self) -> bool:
        """Whether a rank is known to be missing, so that all collective methods raise immediately. Not collective."""
        return self.connection is not None and self.connection.is_lost

    @property
    def is_over(self) -> bool:
        """Whether the process group of these ranks has been destroyed. Not collective."""
        return self.connection is not None and self.connection.is_over

    def gather(self, own: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank. Collective.

        Raises RankLostError if a rank is missing, or the error that ``lost`` makes from it, as all methods do. If ranks
        are in different calls of recckpt, this method and :meth:`on_all` raise OtherCallError on all ranks.
        """
        if self.connection is None:
            return [own]
        with self._group(self.connection) as group:
            return _gathered(group, own)

    def on_all(self, work: Callable[[], _T]) -> list[_T]:
        """Do work on every rank and return all results by rank; all ranks raise the first failure. Collective."""
        if self.connection is None:
            return [self._alone(work)]

        with self._group(self.connection) as group:
            result, failure = outcome_of(work)
            outcomes: list[Any] = _gathered(group, (result, sendable(failure)))
            for rank, (_, reason) in enumerate(outcomes):
                self._raise_alike(rank, reason, failure if rank == group.rank else None)
            return [result for result, _ in outcomes]

    def on_each(self, work: Callable[[], _T]) -> _T:
        """Do work on every rank, like :meth:`on_all`, but return this rank's result and send no results. Collective."""
        results: list[_T] = []
        self.on_all(lambda: results.append(work()))
        return results[0]

    def on_first(self, work: Callable[[], _T]) -> _T:
        """Do work on rank 0, and return its result, or raise its failure, on all ranks. Collective."""
        if self.connection is None:
            return self._alone(work)

        with self._group(self.connection) as group:
            own, failure = outcome_of(work) if group.rank == 0 else (None, None)
            result, reason = group.broadcast((own, sendable(failure)))
            self._raise_alike(0, reason, failure)
            return cast(_T, result)

    def concluded(self, work: Callable[[], _T], conclude: Callable[[list[_T]], _R]) -> _R:
        """Do work on every rank, call ``conclude(results)`` on rank 0, and return its value on all ranks. Collective.

        Traffic is linear in the number of ranks; with :meth:`on_all` it is quadratic. ``results`` has one result per
        rank. If work fails on a rank, ``conclude`` is not called. All ranks raise the first failure.
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
        """Do work on every rank, and return this rank's result; all ranks join the same :class:`Meetings`. Collective.

        Raises:
            RecckptError: work failed on a rank. Other ranks raise the failure in their present or next meeting. Then
                all ranks raise the same error; if tables have changed, a PartlyLoadedError.
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
        """Raise the failure of a rank, if ``reason`` is not None; ``own`` is this rank's error, the cause."""
        if reason is None:
            return
        if isinstance(reason, str) and self.failed is not None:
            raise self.failed(rank, reason) from own
        raise own or error_of(rank, reason, None)


class RanksNow(dict[tuple[int, int], Ranks]):
    """(Rank, size) -> the ranks of a saver in the present process group; ranks connect on first use."""

    def __init__(self, timeout_sec: float) -> None:
        super().__init__()
        self._timeout_sec = timeout_sec

    def of(self, shard_id: int | None, shard_num: int | None) -> Ranks:
        """Return the ranks that work together. Not collective.

        Raises ValueError if ``shard_id`` and ``shard_num`` do not fit each other.
        """
        rank, size = key = this_rank(shard_id, shard_num)
        if key not in self or self[key].is_over:
            connection = Connection(lambda: group_of(rank, size, self._timeout_sec)) if size > 1 else None
            self[key] = Ranks(rank, size, connection)
        return self[key]

    @property
    def has_lost(self) -> bool:
        """Whether a rank is known to be missing, so that all collective methods raise."""
        return any(ranks.has_lost for ranks in self.values())


def this_rank(shard_id: int | None = None, shard_num: int | None = None) -> tuple[int, int]:
    """Return (rank, number of ranks): the arguments, and :func:`rank_and_size` for an argument that is None.

    Raises ValueError if the two do not fit each other, or the environment is needed and invalid.
    """
    is_given = shard_num == 1 or None not in (shard_id, shard_num)
    rank, size = (0, 1) if is_given else rank_and_size()
    size = size if shard_num is None else shard_num
    rank = (0 if size == 1 else rank) if shard_id is None else shard_id
    if not (type(size) is int and type(rank) is int and 0 <= rank < size):
        raise ValueError(f"shard_id must be 0 to shard_num - 1, found shard_id={rank!r}, shard_num={size!r}")
    return rank, size


def rank_and_size() -> tuple[int, int]:
    """Return (rank, number of ranks) from the process group, or else from the variables RANK and WORLD_SIZE.

    Raises ValueError if a variable is not a number, or if one is missing although the other implies several ranks.
    """
    dist = sys.modules.get("torch.distributed")  # if it was not imported, there is no process group
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
            "process group: this may be one of several processes, which would overwrite each other's files in the "
            "output dir; set both, as torchrun does, or call init_process_group, or pass shard_id and shard_num (0 and "
            "1 if this process works alone)"
        )
    return rank, size
