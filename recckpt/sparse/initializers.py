"""What a new row starts with (first cut, to be finished)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]


class Initializer(Protocol):
    """Gives new rows their values."""

    unseen: float

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the first values of ``ids``, shape (len(ids), *spec.shape)."""


InitializerLike = Initializer | Callable[[Tensor], object]


class Constant:
    """Every new row starts at ``value``."""

    def __init__(self, value: float = 0.0) -> None:
        self.unseen = value

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the first values of ``ids``."""
        return torch.full((len(ids), *spec.shape), self.unseen, dtype=getattr(torch, spec.dtype))


def as_initializer(initializer: InitializerLike | None, dtype: torch.dtype) -> Initializer:
    """Return the initializer that stands for what a user gave."""
    return Constant(0.0)
