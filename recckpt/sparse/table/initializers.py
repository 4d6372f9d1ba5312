"""What a new row starts with.

The random initializers are a function of (table seed, initializer seed, id, position in the row): an id
starts the same whatever the order of arrival, the batch, the rank or the resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import mix64
from recckpt.sparse.table.id_random import fill_normal, fill_uniform
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]


@runtime_checkable
class Initializer(Protocol):
    """Gives new rows their values."""

    @property
    def unseen(self) -> float:
        """What an id without a row reads as."""

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the first values of ``ids``, shape (len(ids), *spec.shape), on the CPU.

        Args:
            ids: the new ids, all different.
            seed: the seed of the table, a function of its name.
            spec: the slot that they are for.
        """


InitializerLike = Initializer | Callable[[Tensor], object]


@dataclass(frozen=True)
class Constant:
    """Every new row starts at ``value``."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_number(self, "value", self.value)

    @property
    def unseen(self) -> float:
        """What an id without a row reads as."""
        return self.value

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the first values of ``ids``."""
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
        """Return the first values of ``ids``."""
        return _filled(fill_normal, self.seed, ids, seed, spec, 0.0, 1.0, self.mean, self.std)


@dataclass(frozen=True)
class Uniform:
    """New rows are drawn evenly from [a, b).

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
        """Return the first values of ``ids``."""
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
        """Return the first values of ``ids``."""
        low, width, sign = self._probabilities()
        out = _filled(fill_normal, self.seed, ids, seed, spec, low, width, self.mean, sign * self.std)
        return out.clamp_(self.a, self.b)

    def _probabilities(self) -> tuple[float, float, float]:
        """Return (probability below the bounds, between them, sign); -1 where the upper tail is mirrored."""
        low, high, sign = (self.a - self.mean) / self.std, (self.b - self.mean) / self.std, 1.0
        if low > 0:  # the lower tail alone has probabilities fine enough
            low, high, sign = -high, -low, -1.0
        below, not_above = (math.erfc(-x / math.sqrt(2)) / 2 for x in (low, high))
        return below, not_above - below, sign


@dataclass(frozen=True)
class TorchInitializer:
    """New rows are filled by a function such as those of ``torch.nn.init``, with the random numbers of torch.

    Args:
        fill: fills its argument, a tensor of shape (new rows, *embedding_shape), in place.
    """

    fill: Callable[[Tensor], object]

    unseen = 0.0

    def values(self, ids: Int64s, seed: int, spec: SlotSpec) -> Tensor:
        """Return the first values of ``ids``."""
        out = torch.zeros((len(ids), *spec.shape), dtype=getattr(torch, spec.dtype), device="cpu")
        with torch.no_grad():
            self.fill(out)
        return out


def default_initializer(dtype: torch.dtype, shape: tuple[int, ...]) -> Initializer:
    """Return what a table starts its rows with by default: a random direction of length 1 or so.

    Not the standard deviation of ``nn.Embedding``, which is 1: a product of two such rows has the standard deviation
    ``sqrt(values in a row)``, and a sigmoid behind it saturates. Not TorchRec's bound of ``1 / sqrt(num_embeddings)``:
    a growing table has no such number. Tables of integers, which are not trained, start at 0.
    """
    return Normal(std=1 / math.sqrt(math.prod(shape))) if dtype.is_floating_point else Constant(0)


def as_initializer(initializer: InitializerLike | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Initializer:
    """Return an initializer for the argument of a user; None is the default for this dtype and shape.

    Raises:
        TypeError: it is no initializer.
        ValueError: it cannot fill a table of ``dtype``.
    """
    if initializer is None:
        return default_initializer(dtype, shape)
    if isinstance(initializer, type):
        raise TypeError(f"found the class {initializer.__name__}, expected an instance of it: add parentheses")
    if isinstance(initializer, Constant):
        _check_fits(initializer, dtype)
        return initializer
    if not isinstance(initializer, Initializer) and not callable(initializer):
        raise TypeError(
            f"found {initializer!r}, expected one of recckpt.sparse.table.initializers or a callable like those of "
            "torch.nn.init; for one number use Constant"
        )
    if not dtype.is_floating_point:
        raise ValueError(f"a table of {dtype} starts at a constant, found {initializer!r}: use Constant")
    return initializer if isinstance(initializer, Initializer) else TorchInitializer(initializer)


def _filled(
    fill: Callable[..., None], own_seed: int, ids: Int64s, seed: int, spec: SlotSpec, *parameters: float
) -> Tensor:
    """Return values for ``ids``, computed in float64 and rounded to the dtype of the slot."""
    streams = mix64(np.array([seed % 2**64, own_seed % 2**64], np.uint64))
    dtype = np.float64 if spec.dtype == "float64" else np.float32
    out = np.empty((len(ids), math.prod(spec.shape)), dtype)
    fill(streams[0] ^ mix64(streams[1:])[0], np.ascontiguousarray(ids), *map(float, parameters), out)
    return torch.from_numpy(out).view(len(ids), *spec.shape).to(getattr(torch, spec.dtype))


def _check_parameters(initializer: Any) -> None:
    for name, value in vars(initializer).items():
        if name != "seed":
            _check_number(initializer, name, value)
            _require(math.isfinite(value), initializer, f"{name} to be finite")
        elif not isinstance(value, Integral):
            raise TypeError(f"{type(initializer).__name__}: found seed={value!r}, expected an int")


def _check_number(initializer: object, name: str, value: object) -> None:
    if not isinstance(value, Real):
        raise TypeError(f"{type(initializer).__name__}: found {name}={value!r}, expected a number")


def _require(condition: bool, initializer: object, what: str) -> None:
    if not condition:
        raise ValueError(f"found {initializer!r}, expected {what}")


def _check_fits(constant: Constant, dtype: torch.dtype) -> None:
    if dtype.is_floating_point:
        return
    bounds = torch.iinfo(dtype)
    if constant.value != constant.value // 1 or not bounds.min <= constant.value <= bounds.max:
        raise ValueError(f"found {constant!r}, expected an integer that fits a table of {dtype}")
