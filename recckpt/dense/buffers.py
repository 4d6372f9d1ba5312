"""Copies of dense state, in memory that is kept from one save to the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Place = tuple[Any, ...]
Copy = Callable[[Place, Any], Any]


def as_it_is(place: Place, state: Any) -> Any:
    """Return a state that nobody changes while it is written, without copying it."""
    return state


def without_values(place: Place, state: Any) -> Any:
    """Return the form of a state that another rank writes: to be checked, and of no more use."""
    return _Hollow({}).copy(place, state)


class DenseBuffers:
    """Copies tensors to buffers on the CPU, each at its place in the state. Not thread-safe."""

    def __init__(self) -> None:
        self._buffers: dict[Place, Tensor] = {}

    @contextmanager
    def copying(self) -> Iterator[Copy]:
        """Give a function (place, state) -> state with all tensors copied.

        The copies are complete at the end of the block and hold until the next one begins. Tensors that are one in
        the state are one in the copy.
        """
        copies = _Copies(self._buffers)
        yield copies.copy
        for device in copies.devices:  # copies to pinned memory run behind what was enqueued before them
            torch.cuda.current_stream(device).synchronize()
        self._buffers = copies.used


class _Copies:
    def __init__(self, buffers: dict[Place, Tensor]) -> None:
        self._buffers = buffers
        self.used: dict[Place, Tensor] = {}
        self.devices: set[torch.device] = set()
        self._copied: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # with the original: nobody gets its address

    def copy(self, place: Place, state: Any) -> Any:
        try:
            return self._copy(place, state)
        except RecursionError:
            return state  # which is refused by its name elsewhere

    def _copy(self, place: Place, value: Any) -> Any:
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._copy((*place, key), item)) for key, item in value.items())
        if type(value) in (list, tuple, set):
            return type(value)(self._copy((*place, number), item) for number, item in enumerate(value))
        return self._copy_tensor(place, value) if _is_plain(value) else value

    def _copy_tensor(self, place: Place, tensor: Tensor) -> Tensor:
        same = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *_lazy_bits(tensor)
        if tensor.numel() and same in self._copied:
            return self._copied[same][1]
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            with torch.inference_mode(False):  # it outlives the mode in which it happened to be made
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            self.devices.add(tensor.device)
        self._copied[same] = tensor, buffer
        self.used[place] = buffer
        return buffer


class _Hollow(_Copies):
    def _copy_tensor(self, place: Place, tensor: Tensor) -> Tensor:
        return torch.empty(0)


def _lazy_bits(tensor: Tensor) -> tuple[bool, bool]:
    """Return what makes other values of the same memory."""
    return tensor.is_conj(), tensor.is_neg()


def _is_plain(value: Any) -> bool:
    """Say whether a value is a tensor of one block of values; others are refused by name elsewhere."""
    if type(value) not in (Tensor, torch.nn.Parameter) or torch.nn.parameter.is_lazy(value):
        return False
    return value.layout == torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
