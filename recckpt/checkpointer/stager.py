"""Take the state to be saved, so that training may change it: copied into shared memory that is kept between saves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recckpt.checkpointer.child import Arena
from recckpt.checkpointer.pack import pack
from recckpt.parallel.one_process import OwnFuture
from recckpt.parallel.waiting import InOrder

_ALIGNMENT = 64
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


@dataclass(frozen=True)
class StagedState:
    """State that does not change until it is written.

    Attributes:
        pickle: the state, in which tensors refer to pieces by number.
        spans: (begin, size) in bytes of each piece in the arena.
        arena: holds them.
    """

    pickle: bytes
    spans: list[tuple[int, int]]
    arena: Arena


class CheckpointStager(ABC):
    """Copies state away from training."""

    @abstractmethod
    def stage(self, state_dict: Mapping[str, Any], **kwargs: Any) -> StagedState | Future[StagedState]:
        """Return a copy of the state as it is now, or a future of it.

        The copy before may be overwritten: one is staged only after the one before has been written.

        Args:
            state_dict: as :meth:`Checkpointer.save` takes it.
            kwargs: what was passed to ``save``.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for copies that are under way, and free what is kept."""


class SharedMemoryStager(CheckpointStager):
    """Copies tensors into one block of shared memory that the writer process maps.

    Tensors in the memory of this machine are copied before :meth:`stage` returns. Those on CUDA devices are copied
    by the devices, behind what is enqueued and before what comes next on the current stream; the future ends then.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self._arena: Arena | None = Arena()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinned: Pinned | None = None
        self._devices = DeviceCopier()
        self._waits = InOrder("recckpt-stage")

    def stage(self, state_dict: Mapping[str, Any], **kwargs: Any) -> StagedState | Future[StagedState]:
        """Return a copy of the state; a future where it comes from a CUDA device.

        Raises:
            TypeError, ValueError: there is something in it that cannot be loaded back safely.
            RuntimeError: the stager is closed.
        """
        if self._arena is None:
            raise RuntimeError("the stager is closed; make a new one")
        packed = pack(state_dict)
        sizes = [piece.numel() for piece in packed.pieces]
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        begins = [0, *ends[:-1]] if ends else []
        self._reserve(self._arena, ends[-1] if ends else 0)
        staged = StagedState(packed.pickle, list(zip(begins, sizes, strict=True)), self._arena)
        targets = [self._bytes[begin : begin + size] for begin, size in staged.spans]
        return self._copy(list(zip(targets, packed.pieces, strict=True)), staged)

    def close(self) -> None:
        """Wait for the devices and release the memory; a write that still needs it keeps it."""
        self._waits.finish()
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._arena = None

    def _reserve(self, arena: Arena, n_bytes: int) -> None:
        if n_bytes > arena.n_bytes:
            self._unpin()
            arena.reserve(n_bytes)
            self._bytes = torch.frombuffer(arena.memory, dtype=torch.uint8)

    def _unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _copy(self, copies: list[tuple[Tensor, Tensor]], staged: StagedState) -> StagedState | Future[StagedState]:
        from_cuda = [(target, piece) for target, piece in copies if piece.is_cuda and piece.numel()]
        if from_cuda and self._pinned is None:
            self._pinned = Pinned(self._bytes)
        wait = self._devices.start(from_cuda)
        for target, piece in copies:
            if not piece.is_cuda:
                target.copy_(piece)
        if not from_cuda:
            return staged
        copied: OwnFuture[StagedState] = OwnFuture()
        copied.set_running_or_notify_cancel()

        def when_copied() -> None:
            try:
                wait()
            except BaseException as error:
                copied.set_exception(error)
            else:
                copied.set_result(staged)

        self._waits.submit(when_copied)
        return copied


class Pinned:
    """A block of memory that devices copy to directly; not so any more once this is closed.

    Args:
        memory: all bytes of the block.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Unpin the block; the memory itself stays."""
        _check(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))  # type: ignore[no-untyped-call]


class DeviceCopier:
    """Copies on a stream of its own for each device.

    What training enqueued before is copied; what it enqueues afterwards on the stream that was current runs behind
    the copies. So nothing torn is read, and only the devices wait, not the caller.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Enqueue copies, (target in pinned memory, source) each; return what waits until they are done."""
        used = []
        for target, source in copies:
            stream = self._streams.get(source.device)
            if stream is None:
                stream = self._streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            if stream not in used:
                stream.wait_stream(torch.cuda.current_stream(source.device))
                used.append(stream)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            source.record_stream(stream)
        events = [stream.record_event() for stream in used]
        for stream, event in zip(used, events, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait


def _check(code: Any) -> None:
    if int(code) != 0:
        raise RuntimeError(f"pinning shared memory for CUDA failed with error {int(code)}")
