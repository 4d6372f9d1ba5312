"""Makes checkpointers from their parts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from recckpt.checkpointer.barrier import Alone, Barrier, StoreBarrier
from recckpt.checkpointer.checkpointer import AsyncCheckpointer, SyncCheckpointer
from recckpt.checkpointer.process import CheckpointProcess
from recckpt.checkpointer.reader import StateReader
from recckpt.checkpointer.stager import SharedMemoryStager
from recckpt.checkpointer.writer import CheckpointWriter, RankInfo, WriterHook
from recckpt.parallel.process_group import shared_store
from recckpt.parallel.ranks import rank_and_size
from recckpt.types import positive_number

BARRIER_TIMEOUT_SEC = 600.0
_made = count()  # the same on all ranks, which make their checkpointers in the same order


def make_sync_checkpointer(
    *,
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
    barrier_timeout_sec: float = BARRIER_TIMEOUT_SEC,
) -> SyncCheckpointer:
    """Return a checkpointer whose ``save`` returns when all is written.

    Args:
        rank_info: this rank; that of ``torch.distributed``, or one alone, where it is not given.
        commit_hook: called before and after each commit.
        barrier_timeout_sec: how long a rank waits for the others, at each of three barriers, before all raise.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``rank_info`` speaks of several ranks, and ``torch.distributed`` does not know them; or
            ``barrier_timeout_sec`` is not a number above 0.
    """
    rank_info = _rank(rank_info, commit_hook)
    writer = CheckpointWriter(rank_info, barrier=_barrier(rank_info, barrier_timeout_sec), commit_hook=commit_hook)
    return SyncCheckpointer(writer, StateReader(rank_info))


def make_async_checkpointer(
    *,
    rank_info: RankInfo | None = None,
    commit_hook: WriterHook | None = None,
    barrier_timeout_sec: float = BARRIER_TIMEOUT_SEC,
    subprocess_init_fn: Callable[..., object] | None = None,
    subprocess_init_args: tuple[Any, ...] = (),
    start_timeout_sec: float = 60.0,
    close_timeout_sec: float = 60.0,
) -> AsyncCheckpointer:
    """Return a checkpointer whose ``save`` returns when the state is copied; a process of its own writes.

    Args:
        rank_info: as in :func:`make_sync_checkpointer`.
        commit_hook: called in the writer process before and after each commit, so defined in a module.
        barrier_timeout_sec: as in :func:`make_sync_checkpointer`.
        subprocess_init_fn: called first in every writer process, to set up what the hook needs.
        subprocess_init_args: its arguments.
        start_timeout_sec: how long a writer process may take to be ready.
        close_timeout_sec: how long it may take to end, once nothing is left to write, before it is killed.

    Raises:
        TypeError: an argument is of another type, or the function does not take its arguments.
        ValueError: as in :func:`make_sync_checkpointer`, or what the process gets cannot be sent to it.
    """
    rank_info = _rank(rank_info, commit_hook)
    process = CheckpointProcess(
        rank_info,
        barrier=_barrier(rank_info, barrier_timeout_sec),
        commit_hook=commit_hook,
        subprocess_init_fn=subprocess_init_fn,
        subprocess_init_args=subprocess_init_args,
        start_timeout_sec=start_timeout_sec,
        close_timeout_sec=close_timeout_sec,
    )
    return AsyncCheckpointer(SharedMemoryStager(), process, StateReader(rank_info))


def _rank(rank_info: RankInfo | None, commit_hook: WriterHook | None) -> RankInfo:
    """Check what all checkpointers are given, and return the rank; raises TypeError."""
    if not isinstance(rank_info, RankInfo | None):
        raise TypeError(f"rank_info must be a RankInfo or None, found {rank_info!r}; such as RankInfo(0, 1)")
    if not isinstance(commit_hook, WriterHook | None):
        hint = ": pass an object of it" if isinstance(commit_hook, type) else ""
        raise TypeError(f"commit_hook must be a WriterHook or None, found {commit_hook!r}{hint}")
    return rank_info or _own_rank()


def _own_rank() -> RankInfo:
    return RankInfo(*rank_and_size())


def _barrier(rank_info: RankInfo, timeout_sec: float) -> Barrier:
    positive_number("barrier_timeout_sec", timeout_sec)
    if rank_info.global_world_size == 1:
        return Alone()
    if rank_info != _own_rank():
        raise ValueError(
            f"{rank_info} is not this process for torch.distributed, over which ranks agree: call "
            "init_process_group on every rank, and leave rank_info away"
        )
    store = shared_store(f"recckpt/checkpointer/{next(_made)}")
    return StoreBarrier(store, rank_info.global_rank, rank_info.global_world_size, timeout_sec)
