"""Random values that are a function of (stream, id, position): compiled, without the GIL and without a state.

Each id has its own splitmix64 generator (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), whose output ``n`` is ``mix64(key + n * GAMMA)``: nothing has to be drawn in order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from recckpt.sparse.kernels import mix64

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_S12 = np.uint64(12)
_STEP, _HALF_STEP = 2.0**-52, 2.0**-53

# The three rational functions of AS 241: numerator and denominator, lowest power first.
# fmt: off
_CENTRE = (
    (3.387132872796366608, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.871870074920579083e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.930789580009271061e4, 2.8729085735721942674e4, 5.226495278852854561e3),
)
_MIDDLE = (
    (1.42343711074968357734, 4.6303378461565452959, 5.7694972214606914055, 3.64784832476320460504,
     1.27045825245236838258, 2.4178072517745061177e-1, 2.27238449892691845833e-2, 7.7454501427834140764e-4),
    (1.0, 2.05319162663775882187, 1.6763848301838038494, 6.8976733498510000455e-1,
     1.4810397642748007459e-1, 1.51986665636164571966e-2, 5.475938084995344946e-4, 1.05075007164441684324e-9),
)
_TAIL = (
    (6.6579046435011037772, 5.4637849111641143699, 1.7848265399172913358, 2.9656057182850489123e-1,
     2.6532189526576123093e-2, 1.2426609473880784386e-3, 2.71155556874348757815e-5,
     2.01033439929228813265e-7),
    (1.0, 5.9983220655588793769e-1, 1.3692988092273580531e-1, 1.48753612908506148525e-2,
     7.868691311456132591e-4, 1.8463183175100546818e-5, 1.4215117583164458887e-7,
     2.04426310338993978564e-15),
)
# fmt: on


@njit(nogil=True, inline="always")
def _key(stream: Any, id_: Any) -> Any:
    return mix64(mix64(np.uint64(id_)) ^ stream)


@njit(nogil=True, inline="always")
def _uniform(key: Any, position: int) -> float:
    """Return a value of the open interval (0, 1), of 52 bits; all of them are exact in float64."""
    bits = mix64(key + np.uint64(position + 1) * _GAMMA)  # all uint64: numba makes uint64 + int64 a float64
    return np.float64(bits >> _S12) * _STEP + _HALF_STEP


@njit(nogil=True, cache=True)
def fill_uniform(stream: Any, ids: Any, low: float, width: float, out: Any) -> None:
    """Fill ``out``, shape (len(ids), n), with values of [low, low + width)."""
    for i in range(len(ids)):
        key = _key(stream, ids[i])
        for j in range(out.shape[1]):
            out[i, j] = low + width * _uniform(key, j)


@njit(nogil=True, cache=True)
def fill_normal(  # noqa: PLR0917  # compiled functions take positions only
    stream: Any, ids: Any, low: float, width: float, mean: float, std: float, out: Any
) -> None:
    """Fill ``out``, shape (len(ids), n), with the quantiles of N(mean, std) of [low, low + width)."""
    for i in range(len(ids)):
        key = _key(stream, ids[i])
        for j in range(out.shape[1]):
            out[i, j] = mean + std * normal_quantile(low + width * _uniform(key, j))


@njit(nogil=True, cache=True)
def normal_quantile(p: float) -> float:
    """Return x with P(N(0, 1) < x) = p: Wichura, algorithm AS 241 (PPND16), Applied Statistics 37, 1988."""
    q = p - 0.5
    if abs(q) <= 0.425:
        return q * _ratio(0.180625 - q * q, _CENTRE)
    r = math.sqrt(-math.log(min(p, 1.0 - p)))
    x = _ratio(r - 1.6, _MIDDLE) if r <= 5.0 else _ratio(r - 5.0, _TAIL)
    return -x if q < 0.0 else x


@njit(nogil=True, inline="always")
def _ratio(r: float, polynomials: Any) -> float:
    """Return the quotient of two polynomials of degree 7."""
    above, below = polynomials
    a, b = above[7], below[7]
    for k in range(6, -1, -1):
        a = a * r + above[k]
        b = b * r + below[k]
    return a / b
