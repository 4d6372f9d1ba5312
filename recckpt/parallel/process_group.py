"""The processes of a job, and how they reach each other: the only place that uses ``torch.distributed``."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from recckpt.errors import RecckptError
from recckpt.parallel.roll_call import RollCall, within

_T = TypeVar("_T")
Parcel = npt.NDArray[np.uint8]  # bytes from one rank to another
_made = count()  # the same on all ranks, which make groups together


class ReusedBuffer:
    """A buffer that grows as needed and is reused. Not thread-safe."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Return ``n_bytes`` of arbitrary content, valid until the next call."""
        if len(self._bytes) < n_bytes:
            self._bytes = np.empty(n_bytes, np.uint8)
        return self._bytes[:n_bytes]


class GlooGroup:
    """A gloo group, closed by a finalizer when its :class:`ProcessGroup` is gone, and at the end of the interpreter.

    A thread of gloo drops the tensors of a collective after the collective has returned, and needs the interpreter to
    do so. If the interpreter is ending, CPython ends the thread inside a destructor, and the process aborts
    (https://github.com/pytorch/pytorch/issues/190489). A closed group has no threads.

    Closing waits for the threads of this process, never for other ranks. So a group is left open if a collective may
    still be running in it, as in a daemon thread or after an interrupt, or if it was made before this process was
    forked: its threads do not exist here. Nothing else may hold the group.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._is_idle, self._made_by = group, True, os.getpid()

    def run(self, work: Callable[[Any], _T]) -> _T:
        """Return what work makes of the group. One thread at a time.

        Raises RecckptError if the interpreter is ending, and the group is closed.
        """
        if self._group is None:
            raise RecckptError("the interpreter is ending, and ranks no longer reach each other: save before it ends")
        self._is_idle = False
        try:
            result = work(self._group)
        except RuntimeError:  # gloo's: the collective has failed, and is over
            self._is_idle = True
            raise
        self._is_idle = True
        return result

    def close(self) -> None:
        """Close it; call at most once."""
        import torch.distributed as dist

        if not self._is_idle or os.getpid() != self._made_by:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # else its destructor waits, at the end too
            return
        group, self._group = self._group, None
        with suppress(Exception):  # gone already
            dist.destroy_process_group(group)


class ProcessGroup:
    """The ranks of ``torch.distributed``, over their own gloo group, so that training's collectives are never met.

    Making one is collective. A rank that one of its groups finds lost is lost for its twins too. ``call`` finds out
    which rank is missing; a rank waits ``timeout_sec`` for the others.

    Raises:
        RankLostError: here as in all methods: a rank is dead or did not answer in time.
    """

    def __init__(self, timeout_sec: float, call: RollCall | None = None) -> None:
        import torch.distributed as dist

        self._dist, self.timeout_sec, self._world = dist, timeout_sec, dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.call = call or RollCall(shared_store(f"recckpt/ranks/{next(_made)}"), self.rank, self.size, timeout_sec)

        def formed() -> Any:
            timeout = timedelta(seconds=timeout_sec)
            group = within(timeout_sec, lambda: dist.new_group(backend="gloo", timeout=timeout))
            if group is None:  # the store of a stopped host would never answer
                raise RuntimeError("Timed out while the ranks formed a group")
            return group

        self._group = GlooGroup(self._found_out(formed))
        self._close = weakref.finalize(self, self._group.close)  # torch would keep the group, its threads and files

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank, to all of them. Collective."""
        values: list[Any] = [None] * self.size
        self._collective(lambda group: self._dist.all_gather_object(values, value, group=group))
        return values

    def gather_to_first(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in order of rank, to rank 0, and None to the others. Collective.

        No rank returns before all have come, so the next wait has the whole timeout. ``gather_object`` would send the
        sizes of all values to all ranks.
        """
        import torch

        own = bytearray(pickle.dumps(value)) if self.rank else bytearray()  # that of rank 0 stays where it is
        longest = torch.tensor([len(own)], device="cpu")  # whatever device is the default

        def gather(group: Any) -> list[Any] | None:
            self._dist.all_reduce(longest, op=self._dist.ReduceOp.MAX, group=group)
            size = max(1, int(longest))
            sent = torch.zeros(size, dtype=torch.uint8, device="cpu")
            sent[: len(own)] = torch.frombuffer(own, dtype=torch.uint8) if own else 0
            received = [torch.empty_like(sent) for _ in range(self.size)] if self.rank == 0 else None
            self._dist.gather(sent, received, dst=0, group=group)
            return received

        received = self._collective(gather)
        if received is None:
            return None
        return [value, *(pickle.loads(each.numpy()) for each in received[1:])]  # pickles end before the padding

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value to all. Collective."""
        values = [value]
        self._collective(lambda group: self._dist.broadcast_object_list(values, src=0, group=group))
        return values[0]

    def exchange(
        self, mark: int, parcels: Sequence[Parcel], into: ReusedBuffer | None = None
    ) -> tuple[list[int], list[Parcel]]:
        """Send a mark to all ranks and a parcel to each; return the marks and parcels of all. Collective.

        What a rank sends itself is dropped. What it receives is in the buffer ``into``, or in new memory.
        """
        import torch

        sent = [parcel if to != self.rank else parcel[:0] for to, parcel in enumerate(parcels)]
        header = torch.tensor([[mark, len(parcel)] for parcel in sent], dtype=torch.int64, device="cpu")
        message = torch.from_numpy(_joined(sent))
        answer = torch.empty_like(header)

        def exchange(group: Any) -> tuple[list[int], list[Parcel]]:
            self._dist.all_to_all_single(answer, header, group=group)
            marks, sizes = answer.T.tolist()
            received = (into or ReusedBuffer()).take(sum(sizes))
            sent_sizes = list(map(len, sent))
            self._dist.all_to_all_single(torch.from_numpy(received), message, sizes, sent_sizes, group=group)
            return marks, np.split(received, np.cumsum(sizes)[:-1])

        return self._collective(exchange)

    def twin(self) -> ProcessGroup:
        """Return another group of the same ranks, for another thread. Collective."""
        return ProcessGroup(self.timeout_sec, self.call)

    def _collective(self, work: Callable[[Any], _T]) -> _T:
        """Do collective work with the group, or find out which rank does not take part."""
        return self._found_out(lambda: self._group.run(work), self._close)

    def _found_out(self, work: Callable[[], _T], close: Callable[[], object] = lambda: None) -> _T:
        """Do work, or find out which rank does not, after closing this group for ranks that still wait for it."""
        self.call.check()
        begin = time.monotonic()
        try:
            return work()
        except RuntimeError as error:  # gloo's
            cause = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". This is typically")[0]
            traceback.clear_frames(error.__traceback__)  # they hold the group
            close()
            lost = self.call.take(begin, timed_out="imed out" in cause, cause=cause)
            raise lost from error

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be missing, so that all collective methods raise at once."""
        return self.call.is_lost

    @property
    def is_over(self) -> bool:
        """Whether the process group has been destroyed."""
        return self._world is not self._dist.group.WORLD


def group_of(shard_id: int, shard_num: int, timeout_sec: float) -> ProcessGroup:
    """Return the group of several ranks, including this one. Collective.

    Raises ValueError without a process group or with wrong numbers, RankLostError if not all ranks came in time.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{shard_num} ranks need torch.distributed to save together: call init_process_group on every rank before, "
            "such as init_process_group('gloo') under torchrun; a process that saves for itself, to an output dir of "
            "its own, says so by shard_id=0, shard_num=1"
        )
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    if (rank, n_ranks) != (shard_id, shard_num):
        raise ValueError(
            f"shard_id={shard_id}, shard_num={shard_num} is not this process: it is rank {rank} of {n_ranks}"
        )
    return ProcessGroup(timeout_sec)


def _joined(parcels: Sequence[Parcel]) -> Parcel:
    """Return the bytes of all parcels; without copying if only one is filled and torch takes it."""
    filled = [parcel for parcel in parcels if len(parcel)]
    return filled[0] if len(filled) == 1 and filled[0].flags.writeable else np.concatenate(parcels)


def shared_store(name: str) -> Any:
    """Return a part, with this name, of the key-value store that the ranks of the process group met at."""
    import torch.distributed as dist

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the ranks it starts again
    return dist.distributed_c10d.PrefixStore(f"{name}/{attempt}", dist.distributed_c10d._get_default_store())
