"""The ranks that save together: the only place that talks to ``torch.distributed``."""

from __future__ import annotations

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


def group_of(shard_id: int, shard_num: int) -> Group:
    """Return the group for a save of ``shard_num`` shards. Collective where there are several.

    Raises:
        ValueError: the numbers do not fit each other, or not the process group.
    """
    if not (type(shard_num) is int and type(shard_id) is int and 0 <= shard_id < shard_num):
        raise ValueError(f"shard_id must be 0 to shard_num - 1, found shard_id={shard_id}, shard_num={shard_num}")
    if shard_num == 1:
        return SoloGroup()
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"shard_num={shard_num} needs torch.distributed: call init_process_group on every rank, then save on all"
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


def world_size() -> int:
    """Return the number of ranks of this job; 1 without a process group."""
    return rank_and_size()[1]


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) without a process group."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def shared_store(name: str) -> Any:
    """Return a part of the key-value store that the ranks of the process group met at, kept apart by its name."""
    import torch.distributed as dist

    return dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
