"""Values in a narrower dtype than they have, and how far off they are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recckpt.types import SlotSpec

Bytes = npt.NDArray[np.uint8]
_PIECE = 1 << 15  # values: they stay in the cache, and torch makes no threads for them


def narrow(table: str, values: Bytes, slot: SlotSpec, target: Bytes, stored: SlotSpec) -> float:
    """Put the values of a slot into a target as another dtype, to the nearest, and return the largest error.

    What is not finite stays so.

    Raises:
        ValueError: a number is beyond the dtype.
    """
    wide = torch.from_numpy(values).view(getattr(torch, slot.dtype))
    narrowed = torch.from_numpy(target).view(getattr(torch, stored.dtype))
    worst = 0.0
    for begin in range(0, len(wide), _PIECE):
        piece, to = wide[begin : begin + _PIECE], narrowed[begin : begin + _PIECE]
        to.copy_(piece)
        error = (to.to(piece.dtype) - piece).abs_()
        largest = float(error.max())
        if not math.isfinite(largest):
            largest = _finite(table, piece, error, slot, stored)
        worst = max(worst, largest)
    return worst


def _finite(table: str, piece: Any, error: Any, slot: SlotSpec, stored: SlotSpec) -> float:
    """Return the largest error of values that are finite; ValueError where one of them is not any more."""
    beyond = piece[torch.isfinite(piece) & ~torch.isfinite(error)]
    if len(beyond):
        raise ValueError(
            f"table {table!r}, {slot.name!r}: found {float(beyond[0]):g}, expected numbers that {stored.dtype} holds, "
            f"in which 'store' puts them: store the slot as "
            f"{'bfloat16' if stored.dtype == 'float16' else 'float32'}, or as it is"
        )
    return float(torch.where(torch.isfinite(piece), error, 0.0).max())
