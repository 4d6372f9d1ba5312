"""The state of the random generators of this process, taken and given back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from recckpt.dense.portable import portable


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
