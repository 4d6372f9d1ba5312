"""Initial values of new rows.

Random initializers are a function of (table seed, initializer seed, id, position in the row), so the initial values of
an id do not depend on the order of arrival, batch, rank or resume. Each id has its own splitmix64 generator (Steele,
Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014); its output ``n`` is
``mix64(key + n * GAMMA)``, so numbers can be drawn in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from recckpt.format.buckets import mix64
from recckpt.sparse.table.kernels import compiled
from recckpt.sparse.table.kernels import mix64 as mix64_of_one
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_S12 = np.uint64(12)
_STEP, _HALF_STEP = 2.0**-52, 2.0**-53


@runtime_checkable
class Initializer(Protocol):
    """Returns the initial values of new rows."""

    @property
    def unseen(self) -> float:
        """The value that a look-up returns for an id without a row."""

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the initial values of ``ids``, shape (len(ids), *spec.shape), on the CPU.

        Args:
            ids: the new ids, all distinct.
            seed: the seed of the table, a function of its name.
            spec: the slot to fill.
        """


InitializerLike = Initializer | Callable[[Tensor], object]


@dataclass(frozen=True)
class Constant:
    """Every new row starts at ``value``."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_parameters(self, is_finite=False)

    @property
    def unseen(self) -> float:
        """The value that a look-up returns for an id without a row."""
        return self.value

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the initial values of ``ids``."""
        return torch.full((len(ids), *spec.shape), self.value, dtype=getattr(torch, spec.dtype), device="cpu")


@dataclass(frozen=True)
class Normal:
    """New rows are drawn from the normal distribution.

    Args:
        mean: mean.
        std: standard deviation, at least 0.
        seed: another seed gives other values; the name of the table is mixed in.
    """

    mean: float = 0.0
    std: float = 1.0
    seed: int = 0

    unseen = 0.0

    def __post_init__(self) -> None:
        _check_parameters(self)
        _require(self.std >= 0, self, "std >= 0")

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the initial values of ``ids``."""
        return _filled(fill_normal, self.seed, ids, seed, spec, 0.0, 1.0, self.mean, self.std)


@dataclass(frozen=True)
class Uniform:
    """New rows are drawn uniformly from [a, b).

    Args:
        a: lower bound.
        b: upper bound, above ``a``; rounding to the table's dtype may reach it.
        seed: another seed gives other values; the name of the table is mixed in.
    """

    a: float = 0.0
    b: float = 1.0
    seed: int = 0

    unseen = 0.0

    def __post_init__(self) -> None:
        _check_parameters(self)
        _require(self.a < self.b, self, "a < b")

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the initial values of ``ids``."""
        return _filled(fill_uniform, self.seed, ids, seed, spec, self.a, self.b - self.a)


@dataclass(frozen=True)
class TruncatedNormal:
    """New rows are drawn from the part of the normal distribution that lies in [a, b].

    Args:
        mean: mean of the whole distribution.
        std: standard deviation of the whole distribution, above 0.
        a: lower bound of the values themselves, as in ``torch.nn.init.trunc_normal_``.
        b: upper bound of the values themselves, above ``a``.
        seed: another seed gives other values; the name of the table is mixed in.
    """

    mean: float = 0.0
    std: float = 1.0
    a: float = -2.0
    b: float = 2.0
    seed: int = 0

    unseen = 0.0

    def __post_init__(self) -> None:
        _check_parameters(self)
        _require(self.std > 0, self, "std > 0")
        _require(self.a < self.b, self, "a < b")
        _require(self._probabilities()[1] > 0, self, "bounds that the distribution ever reaches")

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the initial values of ``ids``."""
        low, width, sign = self._probabilities()
        out = _filled(fill_normal, self.seed, ids, seed, spec, low, width, self.mean, sign * self.std)
        return out.clamp_(self.a, self.b)

    def _probabilities(self) -> tuple[float, float, float]:
        """Return (probability below the bounds, between them, sign); sign is -1 if the upper tail is mirrored."""
        low, high, sign = (self.a - self.mean) / self.std, (self.b - self.mean) / self.std, 1.0
        if low > 0:  # only in the lower tail are probabilities precise enough
            low, high, sign = -high, -low, -1.0
        below, not_above = (math.erfc(-x / math.sqrt(2)) / 2 for x in (low, high))
        return below, not_above - below, sign


@dataclass(frozen=True)
class TorchInitializer:
    """Fills new rows with a function such as those of ``torch.nn.init``, which uses torch's random numbers."""

    fill: Callable[[Tensor], object]

    unseen = 0.0

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the initial values of ``ids``."""
        out = torch.zeros((len(ids), *spec.shape), dtype=getattr(torch, spec.dtype), device="cpu")
        with torch.no_grad():
            self.fill(out)
        return out


@dataclass(frozen=True)
class FromRow:
    """A new row starts as a copy of another id's embedding, such as that of its category; slots start as usual.

    Unlike other initial values, these depend on when the id arrives. Not for a table whose rows are spread over several
    ranks, because the other row may be on another rank.

    Args:
        fallback: the other id; or a function that maps new ids, an int64 array, to as many other ids.
        otherwise: initializer of ids whose fallback has no row, or is new itself; None for the default of tables. In
            eval mode an id without a row reads the constant of this initializer.

    Raises:
        TypeError: an argument has the wrong type.
    """

    fallback: int | Callable[[Int64s], npt.ArrayLike]
    otherwise: InitializerLike | None = None

    def __post_init__(self) -> None:
        if not (type(self.fallback) is int or isinstance(self.fallback, np.integer) or callable(self.fallback)):
            raise TypeError(f"FromRow: found fallback={self.fallback!r}, expected an id, or a function of ids to ids")
        if not callable(self.fallback) and not -(2**63) <= self.fallback < 2**63:
            raise ValueError(f"FromRow: found fallback={self.fallback}, expected an int64")
        if isinstance(self.otherwise, FromRow):
            raise TypeError("FromRow: found another FromRow as otherwise: make fallback return an id that has a row")

    @property
    def unseen(self) -> float:
        """The value that a look-up returns for an id without a row."""
        return self.otherwise.unseen if isinstance(self.otherwise, Initializer) else 0.0

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the initial values of ``ids`` whose fallback has no row."""
        assert isinstance(self.otherwise, Initializer)  # ``as_initializer`` has replaced other kinds
        return self.otherwise.values(ids, seed, spec)

    def fallbacks(self, ids: Int64s) -> Int64s:
        """Return the fallback of each of ``ids``.

        Raises:
            ValueError: the function did not return an int64 for each id.
        """
        if not callable(self.fallback):
            return np.full(len(ids), self.fallback, np.int64)
        if not len(ids):  # an empty list has no dtype
            return ids
        others = np.asarray(self.fallback(ids.copy()))
        if others.dtype.kind not in "iu" or others.dtype == np.uint64 or others.shape != ids.shape:
            found = f"{others.dtype} of shape {others.shape}"
            raise ValueError(f"FromRow: fallback returned {found}, expected an int64 for each of {len(ids)} ids")
        return others.astype(np.int64)


def default_initializer(dtype: torch.dtype, shape: tuple[int, ...]) -> Initializer:
    """Return the default: a random direction with a length of about 1.

    Values of ``nn.Embedding`` have a standard deviation of 1, so the dot product of two rows has a standard deviation
    of ``sqrt(values in a row)``, which saturates a sigmoid. TorchRec's bound, ``1 / sqrt(num_embeddings)``, does not
    exist for a growing table. Integer tables, which are not trained, start at 0.
    """
    return Normal(std=1 / math.sqrt(math.prod(shape))) if dtype.is_floating_point else Constant(0)


def as_initializer(initializer: InitializerLike | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Initializer:
    """Return an initializer for a user's argument (None: the default). Raises TypeError or ValueError for a bad one."""
    if initializer is None:
        return default_initializer(dtype, shape)
    if isinstance(initializer, type):
        raise TypeError(f"found the class {initializer.__name__}, expected an instance of the class: add parentheses")
    if isinstance(initializer, Constant):
        bounds, value = None if dtype.is_floating_point else torch.iinfo(dtype), initializer.value
        if bounds is not None and (value != value // 1 or not bounds.min <= value <= bounds.max):
            raise ValueError(f"found {initializer!r}, expected an integer that fits a table of {dtype}")
        return initializer
    if not isinstance(initializer, Initializer) and not callable(initializer):
        raise TypeError(
            f"found {initializer!r}, expected one of recckpt.sparse.table.initializers or a callable like those of "
            "torch.nn.init; for one number use Constant"
        )
    if not dtype.is_floating_point:
        raise ValueError(f"a table of {dtype} starts at a constant, found {initializer!r}: use Constant")
    if isinstance(initializer, FromRow):
        return replace(initializer, otherwise=as_initializer(initializer.otherwise, dtype, shape))
    return initializer if isinstance(initializer, Initializer) else TorchInitializer(initializer)


def _filled(
    fill: Callable[..., None], own_seed: int, ids: Int64s, seed: int, spec: SlotSpec, *parameters: float
) -> Tensor:
    streams = mix64(np.array([seed % 2**64, own_seed % 2**64], np.uint64))
    dtype = np.float64 if spec.dtype == "float64" else np.float32
    out = np.empty((len(ids), math.prod(spec.shape)), dtype)
    fill(streams[0] ^ mix64(streams[1:])[0], np.ascontiguousarray(ids), *map(float, parameters), out)
    return torch.from_numpy(out).view(len(ids), *spec.shape).to(getattr(torch, spec.dtype))


def _check_parameters(initializer: Any, *, is_finite: bool = True) -> None:
    for name, value in vars(initializer).items():
        kind = type(initializer).__name__
        if name == "seed":
            if not isinstance(value, Integral):
                raise TypeError(f"{kind}: found seed={value!r}, expected an int")
        elif not isinstance(value, Real):
            raise TypeError(f"{kind}: found {name}={value!r}, expected a number")
        elif is_finite:
            _require(math.isfinite(value), initializer, f"{name} to be finite")


def _require(condition: bool, initializer: object, what: str) -> None:
    if not condition:
        raise ValueError(f"found {initializer!r}, expected {what}")


@njit(nogil=True, inline="always")
def _key(stream: Any, id_: Any) -> Any:
    return mix64_of_one(mix64_of_one(np.uint64(id_)) ^ stream)


@njit(nogil=True, inline="always")
def _uniform(key: Any, position: int) -> float:
    bits = mix64_of_one(key + np.uint64(position + 1) * _GAMMA)  # all uint64: numba turns uint64 + int64 into float64
    return np.float64(bits >> _S12) * _STEP + _HALF_STEP


@compiled
def fill_uniform(stream: Any, ids: Any, low: float, width: float, out: Any) -> None:
    for i in range(len(ids)):
        key = _key(stream, ids[i])
        for j in range(out.shape[1]):
            out[i, j] = low + width * _uniform(key, j)


@compiled
def fill_normal(  # noqa: PLR0917  # compiled functions take positions only
    stream: Any, ids: Any, low: float, width: float, mean: float, std: float, out: Any
) -> None:
    """Fill ``out``, shape (len(ids), n), with values of N(mean, std) at quantiles in [low, low + width)."""
    for i in range(len(ids)):
        key = _key(stream, ids[i])
        for j in range(out.shape[1]):
            out[i, j] = mean + std * normal_quantile(low + width * _uniform(key, j))


@njit(nogil=True, error_model="numpy")
def normal_quantile(p: float) -> float:
    """Return x with P(N(0, 1) < x) = p, to 7 digits.

    Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37, 1988 (PPND7).
    Changing the algorithm would change the initial values of ids.
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
