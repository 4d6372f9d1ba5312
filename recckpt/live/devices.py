"""What CUDA does beside the threads of Python: streams run on after a call, and graphs are replayed without hooks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def is_capturing() -> bool:
    """Say whether what this thread does on a device is recorded in a CUDA graph, and must not wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def runs_apart(tensor: Tensor) -> bool:
    """Say whether what is asked of a tensor is queued on a device, so that reading it here would wait for that."""
    return tensor.is_cuda


def wait_for_devices(tensors: Iterable[Tensor]) -> None:
    """Wait until all streams of the devices of some tensors have done what was asked of them; not for the CPU."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
