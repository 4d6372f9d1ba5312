"""Random values that are a function of (stream, id, position): compiled, without the GIL and without a state.

Each id has its own splitmix64 generator (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), whose output ``n`` is ``mix64(key + n * GAMMA)``: nothing has to be drawn in order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from recckpt.sparse.table.kernels import compiled, mix64

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_S12 = np.uint64(12)
_STEP, _HALF_STEP = 2.0**-52, 2.0**-53


@njit(nogil=True, inline="always")
def _key(stream: Any, id_: Any) -> Any:
    return mix64(mix64(np.uint64(id_)) ^ stream)


@njit(nogil=True, inline="always")
def _uniform(key: Any, position: int) -> float:
    """Return a value of the open interval (0, 1), of 52 bits; all of them are exact in float64."""
    bits = mix64(key + np.uint64(position + 1) * _GAMMA)  # all uint64: numba makes uint64 + int64 a float64
    return np.float64(bits >> _S12) * _STEP + _HALF_STEP


@compiled
def fill_uniform(stream: Any, ids: Any, low: float, width: float, out: Any) -> None:
    """Fill ``out``, shape (len(ids), n), with values of [low, low + width)."""
    for i in range(len(ids)):
        key = _key(stream, ids[i])
        for j in range(out.shape[1]):
            out[i, j] = low + width * _uniform(key, j)


@compiled
def fill_normal(  # noqa: PLR0917  # compiled functions take positions only
    stream: Any, ids: Any, low: float, width: float, mean: float, std: float, out: Any
) -> None:
    """Fill ``out``, shape (len(ids), n), with the quantiles of N(mean, std) of [low, low + width)."""
    for i in range(len(ids)):
        key = _key(stream, ids[i])
        for j in range(out.shape[1]):
            out[i, j] = mean + std * normal_quantile(low + width * _uniform(key, j))


@njit(nogil=True, cache=True, error_model="numpy")
def normal_quantile(p: float) -> float:
    """Return x with P(N(0, 1) < x) = p, to 7 digits.

    Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37,
    1988 (PPND7). Part of what a table is reproduced from: another algorithm would start ids differently.
    """
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        above = ((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179
        below = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0
        return q * above / below
    r = math.sqrt(-math.log(min(p, 1.0 - p)))
    if r <= 5.0:
        r -= 1.6
        above = ((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777
        below = (0.12021132975 * r + 0.73700164250) * r + 1.0
    else:
        r -= 5.0
        above = ((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150
        below = (0.012258202635 * r + 0.24197894225) * r + 1.0
    return -above / below if q < 0.0 else above / below
