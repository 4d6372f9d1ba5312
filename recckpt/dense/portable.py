"""State that ``torch.load(weights_only=True)`` gives back: made so where that is possible, refused where not."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_CONTAINERS: dict[type, Any] = {list: list, tuple: tuple, set: set}


def portable(name: str, value: Any) -> Any:
    """Return ``value`` as data that loads back without running code.

    Tensors come detached, on the CPU and without the rest of the storage they are a view of; numpy arrays and
    scalars become tensors and numbers.

    Args:
        name: what it is called, for messages.
        value: tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of these.

    Raises:
        ValueError: something else is in it; names the place.
    """
    if isinstance(value, Tensor):
        return _portable_tensor(name, value)
    if isinstance(value, np.generic | np.ndarray):
        return _portable_numpy(name, value)
    if type(value) in _PLAIN:
        return value
    if type(value) in (dict, OrderedDict):
        return type(value)((_portable_key(name, k), portable(f"{name}[{k!r}]", v)) for k, v in value.items())
    if type(value) in _CONTAINERS:
        return _CONTAINERS[type(value)](portable(f"{name}[{i}]", item) for i, item in enumerate(value))
    raise ValueError(
        f"{name}: a {type(value).__module__}.{type(value).__qualname__} cannot be loaded back safely; a state may hold "
        "tensors, numbers, strings, bytes, None, and lists, tuples, sets and dicts of these"
    )


def _portable_key(name: str, key: Any) -> Any:
    if type(key) in (str, int, float, bool, bytes, type(None)):
        return key
    if isinstance(key, np.generic):
        return key.item()
    if type(key) is tuple:
        return tuple(_portable_key(name, item) for item in key)
    raise ValueError(
        f"{name}: a key of type {type(key).__qualname__} cannot be loaded back safely; use a string or number"
    )


def _portable_tensor(name: str, value: Tensor) -> Tensor:
    tensor = value.detach()
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{name}: a {type(tensor).__qualname__} of layout {tensor.layout} cannot be saved in one file; save "
            "its plain local tensor"
        )
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _portable_numpy(name: str, value: Any) -> Any:
    if value.dtype.hasobject or value.dtype.kind not in "biufc":
        raise ValueError(f"{name}: a numpy array of {value.dtype} cannot be saved; convert it to numbers")
    if isinstance(value, np.generic):
        return value.item()
    native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
    return torch.from_numpy(native.copy()).view(value.shape)
