"""Admission policies: pure objects that decide which ids without a row get a row at a look-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import N_BUCKETS, mix64
from recckpt.types import count_of, positive_int, positive_number

CELLS = 256  # cells per block; each cell is one byte, and one byte is enough to address a cell
MAX_BLOOM_COUNT = 255
_MAX_HASHES, _MAX_BLOCKS = 16, 1 << 12  # hashes per id; blocks per bucket
_MAX_CELLS = N_BUCKETS * _MAX_BLOCKS * CELLS  # also the greatest capacity: at one id per cell, the error is above 0.5
_MIN_ERROR = 1e-4
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
AdmitFunction = Callable[[Int64s, int], Any]


class Geometry(NamedTuple):
    """Number of blocks of cells per bucket, and number of cells per id."""

    blocks: int
    hashes: int


@dataclass(frozen=True)
class Bloom:
    """A counting Bloom filter (Fan et al., 2000) in blocks (Putze, Sanders, Singler, 2007), as in DeepRec.

    Each of the 65,536 buckets of ids has blocks of its own. So the filter is distributed among ranks like the ids, and
    the counts do not depend on the number of ranks. A cell is one byte. A block takes no memory before the first count
    in it.

    Attributes:
        capacity: the expected number of distinct ids. With more ids, the error grows.
        error: the share of ids whose count is too high once the filter has counted ``capacity`` ids; 0.0001 to 0.5.

    Raises:
        ValueError: a number is out of range.
    """

    capacity: int
    error: float

    def __post_init__(self) -> None:
        positive_int("Bloom: capacity", self.capacity)
        if not _MIN_ERROR <= positive_number("Bloom: error", self.error) <= 0.5:
            raise ValueError(f"Bloom: error must be {_MIN_ERROR} to 0.5, found {self.error!r}")
        if self.capacity > _MAX_CELLS or false_positives(self.capacity, _MAX_BLOCKS) > self.error:
            raise ValueError(f"Bloom: no filter has room for capacity={self.capacity} at error={self.error}")

    @cached_property
    def geometry(self) -> Geometry:
        """Internal: the smallest geometry with this error."""
        low, high = 1, _MAX_BLOCKS  # the least sufficient number of blocks is in [low, high]
        while low < high:
            middle = (low + high) // 2
            is_enough = false_positives(self.capacity, middle) <= self.error
            low, high = (low, middle) if is_enough else (middle + 1, high)
        hashes = (n for n in range(1, _MAX_HASHES + 1) if _error(self.capacity, Geometry(low, n)) <= self.error)
        return Geometry(low, next(hashes))

    @property
    def nbytes(self) -> int:
        """Bytes of all cells; stored as a table of blocks, the filter takes a sixth more for the index."""
        return N_BUCKETS * self.geometry.blocks * CELLS


def false_positives(capacity: int, blocks: int) -> float:
    """Return the share of ids that share all their cells with others, for the best number of hashes."""
    return min(_error(capacity, Geometry(blocks, hashes)) for hashes in range(1, _MAX_HASHES + 1))


def _error(capacity: int, geometry: Geometry) -> float:
    """Return the share of :func:`false_positives` for one geometry; ids per block follow a Poisson distribution."""
    mean = capacity / (N_BUCKETS * geometry.blocks)
    spread = 8 * math.sqrt(mean) + 20
    ids = np.arange(max(0, int(mean - spread)), int(mean + spread) + 1)
    logs = ids * math.log(mean) - mean - np.array([math.lgamma(n + 1) for n in ids])
    full = 1 - (1 - 1 / CELLS) ** (geometry.hashes * ids)
    return float((np.exp(logs) * full**geometry.hashes).sum())


@runtime_checkable
class Admit(Protocol):
    """Decides which ids get rows; a class of your own must have these four members."""

    @property
    def counts(self) -> bool:
        """Whether the table must count the occurrences of ids without a row."""

    @property
    def bloom(self) -> Bloom | None:
        """The Bloom filter that counts the occurrences; None for an exact count per id."""

    @property
    def needs_step(self) -> bool:
        """Whether the answer depends on the step; if so, the table needs its ``step`` set."""

    def admits(self, ids: Int64s, counts: Int64s, step: int) -> Bools:
        """Return a mask, True for each id that gets a row; pure, and the same on every rank.

        Args:
            ids: distinct ids, in any order.
            counts: how often each id was looked up so far, this look-up included; if :attr:`counts` is False, how often
                in this look-up.
            step: the step of the table.
        """


@dataclass(frozen=True)
class MinCount:
    """Admits an id at its n-th occurrence in training look-ups.

    Modelled on the frequency filter of Monolith (Liu et al., 2022) and the counter filter of DeepRec.

    Attributes:
        n: at least 1.
        bloom: a counting Bloom filter for the counts; None for one exact count per id that has no row. With a filter,
            some ids are admitted before their n-th occurrence, none later; ``n`` is at most 255.

    Raises:
        ValueError: ``n`` or ``bloom`` is invalid.
    """

    n: int
    bloom: Bloom | None = None
    counts: ClassVar[bool] = True
    needs_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        count_of("MinCount: n", self.n)
        if self.bloom is not None and not isinstance(self.bloom, Bloom):
            raise ValueError(f"MinCount: bloom must be a Bloom or None, found {self.bloom!r}")
        if self.bloom is not None and self.n > MAX_BLOOM_COUNT:
            raise ValueError(f"MinCount: a Bloom filter counts to {MAX_BLOOM_COUNT}, found n={self.n}: omit bloom")

    def admits(self, ids: Int64s, counts: Int64s, step: int) -> Bools:
        """Return a mask, True for each id that occurred at least n times."""
        return counts >= self.n


@dataclass(frozen=True)
class Probability:
    """Admits an id with probability ``p`` at each step that looks the id up; counts nothing, so it needs no memory.

    The random number is a hash of id and step, so a run that is repeated or resumed admits the same ids. Modelled on
    the probabilistic filter of Monolith (Liu et al., 2022).

    Attributes:
        p: above 0, at most 1.

    Raises:
        ValueError: ``p`` is out of range.
    """

    p: float
    counts: ClassVar[bool] = False
    bloom: ClassVar[Bloom | None] = None
    needs_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if positive_number("Probability: p", self.p) > 1:
            raise ValueError(f"Probability: p must be above 0 and at most 1, found {self.p!r}")

    def admits(self, ids: Int64s, counts: Int64s, step: int) -> Bools:
        """Return a mask, True for each id whose random number at this step is below ``p``."""
        salt = mix64(np.array([step], np.uint64) + np.uint64(1))  # + 1 because mix64(0) is 0
        coins = mix64(mix64(ids.view(np.uint64) ^ salt) ^ salt) >> np.uint64(11)
        fell: Bools = coins < self.p * 2.0**53
        return fell


@dataclass(frozen=True)
class AdmitIf:
    """Admits the ids that a function chooses.

    Attributes:
        function: called as ``function(ids, step)`` with n distinct int64 ids and the step of the table; returns n
            bools. It must be pure, and the same on every rank.
    """

    function: AdmitFunction
    counts: ClassVar[bool] = False
    bloom: ClassVar[Bloom | None] = None
    needs_step: ClassVar[bool] = False

    def __repr__(self) -> str:
        return "AdmitIf"  # the same on all ranks

    def admits(self, ids: Int64s, counts: Int64s, step: int) -> Bools:
        """Return the mask of the function."""
        answers: Bools = np.asarray(self.function(ids, step))
        return answers


def as_admit(admit: Any) -> Admit:
    if isinstance(admit, type) or not (isinstance(admit, Admit) or callable(admit)):
        raise TypeError(
            f"admit must be MinCount(n), Probability(p) or a callable (ids, step) -> mask, found {admit!r}; omit it to "
            "admit all"
        )
    return admit if isinstance(admit, Admit) else AdmitIf(admit)
