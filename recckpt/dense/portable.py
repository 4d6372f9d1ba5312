"""State that ``torch.load(weights_only=True)`` gives back: made so where that is possible, refused where not."""

from __future__ import annotations

import codecs
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_MAX_INT_BITS = 255 * 8 - 1  # what the safe loader of torch takes
_CONTAINERS: dict[type, Any] = {list: list, tuple: tuple, set: set}


class _EmptyBytes(bytes):
    """Pickles as other bytes do; plain empty ones would name a function that the safe loader does not know."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return codecs.encode, ("", "latin1")


def portable(name: str, value: Any) -> Any:
    """Return ``value`` as data that loads back without running code.

    Tensors come detached, on the CPU, in row-major order and without the rest of the storage they are a view of; numpy
    arrays and scalars become tensors and numbers.

    Args:
        name: what it is called, for messages.
        value: tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of these.

    Raises:
        ValueError: something else is in it; names the place.
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
        return value if value != b"" else _EmptyBytes()
    if type(value) in (dict, OrderedDict):
        return type(value)((_portable_key(name, k), _portable(f"{name}[{k!r}]", v)) for k, v in value.items())
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
        found = f"{type(value).__name__} of {value.dtype}"
        raise ValueError(f"{name}: a numpy {found} cannot be saved; convert it to a plain array of numbers")
    if isinstance(value, np.generic):
        return value.item()
    native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
    return torch.from_numpy(native.copy()).view(value.shape)
