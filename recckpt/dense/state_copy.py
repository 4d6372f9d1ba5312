"""State made portable and copied for a save, and the state of the random generators."""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recckpt.dense.by_value import MAPPINGS

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_MAX_INT_BITS = 255 * 8 - 1  # what the safe loader of torch takes
_CONTAINERS: dict[type, Any] = {list: list, tuple: tuple, set: set}
Place = tuple[Any, ...]
Copy = Callable[[Place, Any], Any]


class _EmptyBytes(bytes):
    """Pickles as other bytes do; plain empty ones would name a function that the safe loader does not know."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return codecs.encode, ("", "latin1")


def portable(name: str, value: Any) -> Any:
    """Return ``value`` as data that loads back without running code; a ValueError names the place of what does not.

    Tensors come detached, on the CPU, in row-major order and without the rest of the storage they are a view of; numpy
    arrays and scalars become tensors and numbers. Beside these there may be numbers, strings, bytes, None, and lists,
    tuples, sets and dicts.
    """
    try:
        return _portable(name, value)
    except RecursionError:
        raise ValueError(f"{name[:200]}: it holds itself, or is nested too deep to be saved") from None


def _portable(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return _portable_tensor(name, value)
    if isinstance(value, np.generic | np.ndarray):
        return _portable_numpy(name, value)
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise ValueError(
            f"{name}: an int of {value.bit_length()} bits cannot be loaded back safely; save it as a string"
        )
    if type(value) in _PLAIN:
        return _EmptyBytes() if type(value) is bytes and not value else value
    if type(value) in MAPPINGS:
        return type(value)({_portable_key(name, k): _portable(f"{name}[{k!r}]", v) for k, v in value.items()})
    if type(value) in _CONTAINERS:
        if set(map(type, value)) == {int} and max(map(int.bit_length, value)) <= _MAX_INT_BITS:
            return _CONTAINERS[type(value)](value)  # at once: Python's random state is 625 of them, in every save
        return _CONTAINERS[type(value)](_portable(f"{name}[{i}]", item) for i, item in enumerate(value))
    raise ValueError(
        f"{name}: a {type(value).__module__}.{type(value).__qualname__} cannot be loaded back safely; a state may hold "
        "tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of these"
    )


def _portable_key(name: str, key: Any) -> Any:
    if type(key) in (str, int, float, bool, bytes, type(None)):
        return _portable(name, key)
    if isinstance(key, np.generic):
        return key.item()
    if type(key) is tuple:
        return tuple(_portable_key(name, item) for item in key)
    raise ValueError(
        f"{name}: a key of type {type(key).__qualname__} cannot be loaded back safely; use a string or number"
    )


def plain_tensor(name: str, value: Tensor) -> Tensor:
    """Return a tensor detached, or raise ValueError where it is of a kind that has no one block of values."""
    if torch.nn.parameter.is_lazy(value):
        raise ValueError(f"{name}: a parameter of a lazy module has no values before its first batch; run one first")
    tensor = value.detach()
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise ValueError(
            f"{name}: a {type(tensor).__qualname__} of layout {tensor.layout} on {tensor.device} cannot be saved in "
            "one file; save its plain local tensor"
        )
    return tensor


def _portable_tensor(name: str, value: Tensor) -> Tensor:
    tensor = plain_tensor(name, value).cpu().resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size() or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _portable_numpy(name: str, value: Any) -> Any:
    item_bytes = value.dtype.itemsize // (2 if value.dtype.kind == "c" else 1)
    if value.dtype.kind not in "biufc" or item_bytes > 8 or isinstance(value, np.ma.MaskedArray):
        kind = f"{type(value).__name__} of {value.dtype}"
        raise ValueError(f"{name}: a numpy {kind} cannot be saved; convert it to a plain array of numbers")
    if isinstance(value, np.generic):
        return value.item()
    native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
    return torch.from_numpy(native.copy()).view(value.shape)


def as_it_is(place: Place, state: Any) -> Any:
    """Return a state as it is: it does not change while it is written."""
    return state


def without_values(place: Place, state: Any) -> Any:
    """Return a state without the values of its tensors, to check what another rank writes."""
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
        self._copied: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # with the original, to keep its address taken

    def copy(self, place: Place, state: Any) -> Any:
        try:
            return self._copy(place, state)
        except RecursionError:
            return state  # portable() refuses it by name

    def _copy(self, place: Place, value: Any) -> Any:
        if type(value) in MAPPINGS:
            return type(value)({key: self._copy((*place, key), item) for key, item in value.items()})
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
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda, device="cpu")
        buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            self.devices.add(tensor.device)
        self._copied[same] = tensor, buffer
        self.used[place] = buffer
        return buffer


class _Hollow(_Copies):
    def _copy_tensor(self, place: Place, tensor: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")


def _lazy_bits(tensor: Tensor) -> tuple[bool, bool]:
    """Return what makes other values of the same memory."""
    return tensor.is_conj(), tensor.is_neg()


def _is_plain(value: Any) -> bool:
    """Say whether a value is a tensor of one block of values; others are refused by name elsewhere."""
    if type(value) not in (Tensor, torch.nn.Parameter) or torch.nn.parameter.is_lazy(value):
        return False
    return value.layout == torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)


def dump_rng() -> dict[str, Any]:
    """Return the state of the random generators of this process: torch, CUDA, numpy and Python."""
    kind, keys, *rest = np.random.get_state()
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # asking must not start CUDA
    cuda = torch.cuda.get_rng_state_all() if initialized else []
    states = {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": [kind, keys, *rest],
        "python": random.getstate(),
    }
    return {name: portable(f"random state of {name}", state) for name, state in states.items()}


def check_rng(states: Mapping[str, Any]) -> None:
    """Raise ValueError where :func:`load_rng` could not take the states; the generators are left alone."""
    try:
        torch.Generator().set_state(states["torch"])
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        for number, state in enumerate(states["cuda"]):
            if state.dtype != torch.uint8:
                raise TypeError(f"the state of CUDA device {number} is of {state.dtype}")
            for device in devices[number : number + 1]:
                torch.Generator(device).set_state(state)
        kind, keys, *rest = states["numpy"]
        np.random.RandomState().set_state((kind, keys.numpy(), *rest))
        random.Random().setstate(states["python"])
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def load_rng(states: Mapping[str, Any]) -> None:
    """Give the random generators of this process back their state; those of absent devices are left out."""
    torch.set_rng_state(states["torch"])
    for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    random.setstate(states["python"])
