"""Registered values that are their own state: filled in place by a load, so that whoever holds them sees it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CONTAINERS = (list, dict, OrderedDict, set)


def is_filled(live: Any) -> bool:
    """Say whether a load can change a value in place; of a number or a string it cannot."""
    if isinstance(live, np.ndarray):
        return live.flags.writeable
    if isinstance(live, Tensor):  # several values may lie in one place, as those of expand() do
        return not live.is_inference() and all(n < 2 or step for n, step in zip(live.shape, live.stride(), strict=True))
    return type(live) in _CONTAINERS


def misfit(live: Any, saved: Any) -> tuple[str, str] | None:
    """Return (found, expected) where a saved value cannot be filled into a live one, None where it can."""
    found, expected = _kind(saved), _kind(live)
    return None if found == expected else (found, expected)


def fill(live: Any, saved: Any) -> None:
    """Give a live value what was saved; what it holds itself is filled in place too, as far as it fits."""
    if isinstance(live, np.ndarray):
        live[...] = saved.numpy()
    elif isinstance(live, Tensor):
        with torch.no_grad():
            live.copy_(saved)
    elif isinstance(live, dict):
        filled = {key: _filled(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(filled)
    elif isinstance(live, list):
        inside = [*live, *[None] * (len(saved) - len(live))]
        live[:] = [_filled(item, value) for item, value in zip(inside, saved, strict=False)]
    else:
        live.clear()
        live.update(saved)


def _filled(live: Any, saved: Any) -> Any:
    if is_filled(live) and misfit(live, saved) is None:
        fill(live, saved)
        return live
    return saved.numpy() if isinstance(live, np.ndarray) and isinstance(saved, Tensor) else saved


def _kind(value: Any) -> str:
    """Name what must agree: dtype and shape of tensors, which arrays are saved as; the type of all else."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype.newbyteorder('=').name} {value.shape}"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "dict" if isinstance(value, dict) else type(value).__name__
