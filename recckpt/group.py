"""The ranks that save together: the only place that talks to ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from recckpt.errors import RecckptError

DEFAULT_TIMEOUT_SEC = 1800.0
_T = TypeVar("_T")


class Group(Protocol):
    """Ranks that all call the same things in the same order."""

    rank: int
    size: int

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in order of rank, to all of them. Collective."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value to all. Collective."""


class SoloGroup:
    """One rank, alone."""

    rank, size = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        """Return the one value."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return the value."""
        return value


class ProcessGroup:
    """The ranks of ``torch.distributed``, over a gloo group of their own, so that no training collective is met.

    Making one is collective.

    Args:
        timeout_sec: how long a rank waits for the others before it raises.
    """

    def __init__(self, timeout_sec: float = DEFAULT_TIMEOUT_SEC) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_sec))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every rank."""
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""
        values = [value]
        self._dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]


def this_rank(shard_id: int | None = None, shard_num: int | None = None) -> tuple[int, int]:
    """Return the number of this rank and of all: as given, else of the process group, else of RANK and WORLD_SIZE.

    Args:
        shard_id: None for that of this process; 0 where it is one of one.
        shard_num: None for those of this job; 1 for a process that works for itself.

    Raises:
        ValueError: the numbers do not fit each other, or the environment has no numbers.
    """
    rank, size = rank_and_size()
    size = size if shard_num is None else shard_num
    rank = (0 if size == 1 else rank) if shard_id is None else shard_id
    if not (type(size) is int and type(rank) is int and 0 <= rank < size):
        raise ValueError(f"shard_id must be 0 to shard_num - 1, found shard_id={rank}, shard_num={size}")
    return rank, size


def group_of(shard_id: int, shard_num: int) -> Group:
    """Return the group for a save of ``shard_num`` shards. Collective where there are several.

    Raises:
        ValueError: the numbers do not fit each other, or not the process group.
    """
    shard_id, shard_num = this_rank(shard_id, shard_num)
    if shard_num == 1:
        return SoloGroup()
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{shard_num} ranks need torch.distributed to save together: call init_process_group on every rank before, "
            "such as init_process_group('gloo') under torchrun; a process that saves for itself, to an output dir of "
            "its own, says so by shard_id=0, shard_num=1"
        )
    found = (dist.get_rank(), dist.get_world_size())
    if found != (shard_id, shard_num):
        raise ValueError(
            f"shard_id={shard_id}, shard_num={shard_num} is not this process: it is rank {found[0]} of {found[1]}"
        )
    return ProcessGroup()


def together(group: Group, work: Callable[[], _T], failed: Callable[[int, str], RecckptError]) -> list[_T]:
    """Do work on every rank and return all results, in order of rank. Collective.

    Args:
        group: the ranks.
        work: what each of them does.
        failed: makes the error that all ranks raise where one had an error that is not ours: (rank, text) -> error.

    Raises:
        RecckptError: work failed on a rank; all raise the failure of the first.
    """
    result: _T | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    outcomes = group.all_gather((result, _sendable(failure)))
    for rank, (_, reason) in enumerate(outcomes):
        if isinstance(reason, RecckptError):
            raise failure if failure is not None and rank == group.rank else reason
        if reason is not None:
            raise failed(rank, reason) from (failure if rank == group.rank else None)
    return [result for result, _ in outcomes]


def _sendable(failure: Exception | None) -> RecckptError | str | None:
    """Return what other ranks are told of an error: ours as they are, others by their text."""
    if failure is None or isinstance(failure, RecckptError):
        return failure
    return f"{type(failure).__name__}: {failure}"


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, by the process group, else by RANK and WORLD_SIZE.

    Raises:
        ValueError: one of the two variables is no number.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or size is None:
        return 0, 1
    try:
        return int(rank), int(size)
    except ValueError as error:
        raise ValueError(f"RANK={rank!r}, WORLD_SIZE={size!r}: expected a number each, or neither") from error


def shared_store(name: str) -> Any:
    """Return a part of the key-value store that the ranks of the process group met at, kept apart by its name."""
    import torch.distributed as dist

    return dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
