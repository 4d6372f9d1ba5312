"""Copies from CUDA devices to pinned shared memory, beside training and in order with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


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
