"""Communication between the ranks of a job; no other module uses ``torch.distributed``."""

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
_made = count()  # number of groups so far; the same on all ranks, because ranks make groups together


class ReusedBuffer:
    """A buffer that grows as needed and is reused. Not thread-safe."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Return ``n_bytes`` of memory with arbitrary content, valid until the next call."""
        if len(self._bytes) < n_bytes:
            self._bytes = np.empty(n_bytes, np.uint8)
        return self._bytes[:n_bytes]


class GlooGroup:
    """A gloo group. A finalizer closes it when its :class:`ProcessGroup` is deleted, or when the interpreter ends.

    A thread of gloo deletes the tensors of a collective after the collective has returned, and needs the interpreter
    for this. If the interpreter is ending, CPython ends the thread inside a destructor, and the process aborts
    (https://github.com/pytorch/pytorch/issues/190489). A closed group has no threads.

    Closing waits for the threads of this process, never for other ranks. The group stays open in two cases: a
    collective may still be running, in a daemon thread or after an interrupt; or this process was forked after the
    group was made, so that the threads of the group do not exist. No other object may refer to the group.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._is_idle, self._made_by = group, True, os.getpid()

    def run(self, work: Callable[[Any], _T]) -> _T:
        """Return ``work(group)``; only one thread may call this at a time. RecckptError if the group is closed."""
        if self._group is None:
            raise RecckptError("the interpreter is ending, so ranks can no longer communicate: save before it ends")
        self._is_idle = False
        try:
            result = work(self._group)
        except RuntimeError:  # from gloo: the collective has failed and no longer runs
            self._is_idle = True
            raise
        self._is_idle = True
        return result

    def close(self) -> None:
        """Close the group unless a collective may be running; call at most once."""
        import torch.distributed as dist

        if not self._is_idle or os.getpid() != self._made_by:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))  # never delete it, because its destructor waits
            return
        group, self._group = self._group, None
        with suppress(Exception):  # already destroyed
            dist.destroy_process_group(group)


class ProcessGroup:
    """The ranks of ``torch.distributed``, in a gloo group of their own, separate from the collectives of training.

    The constructor is collective. If this group finds a rank lost, the rank is lost for the twins of this group too.
    ``call`` finds out which rank is missing. A rank waits ``timeout_sec`` for the others.

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
            if group is None:  # the store does not answer if its host was stopped
                raise RuntimeError("Timed out while the ranks formed a group")
            return group

        self._group = GlooGroup(self._found_out(formed))
        self._close = weakref.finalize(self, self._group.close)  # without it, torch keeps the group and its threads

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank, to all of them. Collective."""
        values: list[Any] = [None] * self.size
        self._collective(lambda group: self._dist.all_gather_object(values, value, group=group))
        return values

    def gather_to_first(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in order of rank, on rank 0, and None on other ranks. Collective.

        No rank returns before all ranks have called this, so the next collective has the whole timeout. This does not
        use ``gather_object``, because that sends the sizes of all values to all ranks.
        """
        import torch

        own = bytearray(pickle.dumps(value)) if self.rank else bytearray()  # rank 0 need not send its value
        longest = torch.tensor([len(own)], device="cpu")  # explicit, because the default device may be another

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
        return [value, *(pickle.loads(each.numpy()) for each in received[1:])]  # loads() ignores the padding

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks. Collective."""
        values = [value]
        self._collective(lambda group: self._dist.broadcast_object_list(values, src=0, group=group))
        return values[0]

    def exchange(
        self, mark: int, parcels: Sequence[Parcel], into: ReusedBuffer | None = None
    ) -> tuple[list[int], list[Parcel]]:
        """Send the mark to all ranks and one parcel to each; return (marks, parcels) by sending rank. Collective.

        A rank's parcel to itself is dropped. Received bytes are in the buffer ``into``, or in new memory if it is None.
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
        """Do collective work with the group; if it fails, raise RankLostError with the ranks that did not take part."""
        return self._found_out(lambda: self._group.run(work), self._close)

    def _found_out(self, work: Callable[[], _T], close: Callable[[], object] = lambda: None) -> _T:
        """Do work; if it fails, raise RankLostError with the missing ranks.

        First ``close`` closes the group, so that ranks that still wait in it fail too.
        """
        self.call.check()
        begin = time.monotonic()
        try:
            return work()
        except RuntimeError as error:  # from gloo
            cause = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". This is typically")[0]
            traceback.clear_frames(error.__traceback__)  # because frames refer to the group
            close()
            lost = self.call.take(begin, timed_out="imed out" in cause, cause=cause)
            raise lost from error

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be missing, so that all collective methods raise immediately."""
        return self.call.is_lost

    @property
    def is_over(self) -> bool:
        """Whether the process group has been destroyed."""
        return self._world is not self._dist.group.WORLD


def group_of(shard_id: int, shard_num: int, timeout_sec: float) -> ProcessGroup:
    """Return the group of all ranks. Collective.

    Raises ValueError if there is no process group or if the arguments do not match its rank and size; RankLostError if
    not all ranks call this in time.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{shard_num} ranks need torch.distributed to save together: first call init_process_group on every rank, "
            "such as init_process_group('gloo') under torchrun; if this process saves alone, to an output dir of its "
            "own, pass shard_id=0, shard_num=1"
        )
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    if (rank, n_ranks) != (shard_id, shard_num):
        raise ValueError(
            f"shard_id={shard_id}, shard_num={shard_num} do not match this process: it is rank {rank} of {n_ranks}"
        )
    return ProcessGroup(timeout_sec)


def _joined(parcels: Sequence[Parcel]) -> Parcel:
    """Return the concatenated bytes of all parcels; no copy if only one is not empty and its memory is writable."""
    filled = [parcel for parcel in parcels if len(parcel)]
    return filled[0] if len(filled) == 1 and filled[0].flags.writeable else np.concatenate(parcels)


def shared_store(name: str) -> Any:
    """Return the key-value store of the process group, with a prefix ``name`` for all keys."""
    import torch.distributed as dist

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # because torchrun's store survives restarts of ranks
    return dist.distributed_c10d.PrefixStore(f"{name}/{attempt}", dist.distributed_c10d._get_default_store())
