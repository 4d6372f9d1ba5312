"""The arithmetic of averages whose rows are brought up when they are read.

An update makes of an average ``e`` and a value ``w`` of the model ``kept * e + (1 - kept) * w``. Where ``w`` stays as
it is, many updates are one, which keeps the product of their shares. So a row has its average and the model's value as
of the update at which that changed last, and the time of it on a clock that runs by ``-log(kept)`` with each update.

The clock is an integer: differences of it are exact, so a row saved by its distance to the clock goes on bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.kernels import compiled

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

UNKNOWN = -(1 << 63)  # in place of a time: the row is its average, and what it drifts to is not known
_TICKS = 1 << 40  # of the clock in a factor of e
_NOTHING = 750  # exp(-750) is 0.0
_COMPILED = {torch.float32, torch.float64}


def ticks(kept: float) -> int:
    """Return by how much the clock moves at an update that keeps such a share."""
    return round(min(-math.log(kept), _NOTHING) * _TICKS) if kept > 0 else _NOTHING * _TICKS


def weights(times: Int64s, clock: int) -> Float64s:
    """Return which share of the average each row still has at a time of the clock."""
    is_known = times != UNKNOWN
    ages = np.where(is_known, np.maximum(clock - np.where(is_known, times, clock), 0), 0)
    return np.exp(ages / -_TICKS)


def mixed(averages: Tensor, values: Tensor, shares: Float64s, dtype: torch.dtype) -> Tensor:
    """Return ``share * average + (1 - share) * value`` for each row, in float64 and rounded once to ``dtype``.

    It is exact for shares of 0 and 1.
    """
    if averages.device.type == "cpu" and {averages.dtype, values.dtype, dtype} <= _COMPILED:
        out = torch.empty(averages.shape, dtype=dtype, device="cpu")
        rows, others = averages.contiguous().flatten(1), values.contiguous().flatten(1)
        _mix(rows.numpy(), others.numpy(), shares, out.flatten(1).numpy())
        return out
    share = torch.from_numpy(shares).to(averages.device).view(-1, *[1] * (averages.dim() - 1))
    wide, other = averages.to(torch.float64), values.to(torch.float64)
    out = torch.where(share == 1, wide, torch.where(share == 0, other, wide * share + other * (1 - share)))
    return out.to(dtype) if dtype.is_floating_point else out.round().to(dtype)


@compiled
def _mix(averages: Any, values: Any, shares: Any, out: Any) -> None:
    """Mix row by row: what a row comes to does not depend on those beside it."""
    for i in range(len(shares)):
        share, rest = shares[i], 1.0 - shares[i]
        for j in range(out.shape[1]):
            if share == 1.0:
                out[i, j] = averages[i, j]
            elif share == 0.0:
                out[i, j] = values[i, j]
            else:
                out[i, j] = share * averages[i, j] + rest * values[i, j]
