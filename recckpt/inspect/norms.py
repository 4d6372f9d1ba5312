"""Sums of squares of rows, exact where they under- or overflow (no torch here)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST = 1e-30  # sums of squares from this on are as exact as float32 is
_WITHIN = (1e-240, 1e300)  # what stands for sums that float64 cannot hold either

Array = npt.NDArray[Any]


def squares(values: Array) -> Array:
    """Return the sum of squares of each row, exactly 0 of zeros alone; NaN where a value is not finite.

    Args:
        values: shape (rows, values), one row at least.
    """
    if values.dtype.kind != "f":
        values = values.astype(np.float64)
    elif values.dtype == np.float16:
        values = values.astype(np.float32)
    with np.errstate(all="ignore"):
        sums: Array = np.einsum("ij,ij->i", values, values)
        if sums.min() > _LEAST and sums.max() < np.inf:
            return sums
        # Values whose squares over- or underflow are not those that are infinite or zero.
        sums = sums.astype(np.float64)
        rest = np.flatnonzero(~((sums > _LEAST) & (sums < np.inf)))
        exact = values[rest].astype(np.float64)
        of_rest = np.clip(np.square(exact).sum(axis=1), *_WITHIN)
        of_rest[(exact == 0).all(axis=1)] = 0.0
        of_rest[~np.isfinite(exact).all(axis=1)] = np.nan
        sums[rest] = of_rest
    return sums
