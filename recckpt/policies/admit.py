"""Which ids get rows: small pure objects that decide, of ids without a row, whether they get one at this look-up."""

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

CELLS = 256  # in a block: one byte each, and a byte addresses them
MAX_BLOOM_COUNT = 255
_MAX_HASHES, _MAX_BLOCKS = 16, 1 << 12  # for an id; in a bucket
_MAX_CELLS = N_BUCKETS * _MAX_BLOCKS * CELLS  # with an id a cell, more than half share theirs; more are not summed up
_MIN_ERROR = 1e-4
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
AdmitFunction = Callable[[Int64s, int], Any]


class Geometry(NamedTuple):
    """Blocks of cells for each bucket, and the number of cells in which an id is counted."""

    blocks: int
    hashes: int


@dataclass(frozen=True)
class Bloom:
    """A counting Bloom filter (Fan et al., 2000) in blocks (Putze, Sanders, Singler, 2007), as in DeepRec.

    Each of the 65,536 buckets of ids has blocks of its own, so the filter is divided among any number of ranks as the
    ids are, and counts the same on all of them. A cell is one byte. Blocks exist once something is counted in them.

    Attributes:
        capacity: the number of distinct ids it should count. Beyond that the error grows; nothing else happens.
        error: the share of ids counted too high when the filter is full, from 0.0001 to 0.5.

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
        low, high = 1, _MAX_BLOCKS  # the first number of blocks that will do is in [low, high]
        while low < high:
            middle = (low + high) // 2
            is_enough = false_positives(self.capacity, middle) <= self.error
            low, high = (low, middle) if is_enough else (middle + 1, high)
        hashes = (n for n in range(1, _MAX_HASHES + 1) if _error(self.capacity, Geometry(low, n)) <= self.error)
        return Geometry(low, next(hashes))

    @property
    def nbytes(self) -> int:
        """Bytes of all cells; a table of blocks takes a sixth more, for the index."""
        return N_BUCKETS * self.geometry.blocks * CELLS


def false_positives(capacity: int, blocks: int) -> float:
    """Return the share of ids that share all their cells with others, for the best number of hashes."""
    return min(_error(capacity, Geometry(blocks, hashes)) for hashes in range(1, _MAX_HASHES + 1))


def _error(capacity: int, geometry: Geometry) -> float:
    """Return that share for one geometry; ids in a block follow a Poisson distribution."""
    mean = capacity / (N_BUCKETS * geometry.blocks)
    spread = 8 * math.sqrt(mean) + 20
    ids = np.arange(max(0, int(mean - spread)), int(mean + spread) + 1)
    logs = ids * math.log(mean) - mean - np.array([math.lgamma(n + 1) for n in ids])
    full = 1 - (1 - 1 / CELLS) ** (geometry.hashes * ids)
    return float((np.exp(logs) * full**geometry.hashes).sum())


@runtime_checkable
class Admit(Protocol):
    """Says which ids get rows; a class of your own needs nothing but these four."""

    @property
    def counts(self) -> bool:
        """Whether the occurrences of ids without a row have to be counted."""

    @property
    def bloom(self) -> Bloom | None:
        """Where they are counted; None for exactly, by id."""

    @property
    def needs_step(self) -> bool:
        """Whether the answer depends on the step, which the table must then be given."""

    def admits(self, ids: Int64s, counts: Int64s, step: int) -> Bools:
        """Return a mask: which of these ids get a row; pure, and the same on every rank.

        Args:
            ids: all different, in any order.
            counts: how often each was looked up so far, this look-up included; of this look-up alone where nothing is
                counted.
            step: of the table.
        """


@dataclass(frozen=True)
class MinCount:
    """Admits an id with its n-th occurrence in training look-ups.

    After the probabilistic and frequency filters of Monolith (Liu et al., 2022) and the counter filter of DeepRec.

    Attributes:
        n: at least 1.
        bloom: counts in a counting Bloom filter in place of one row for each id that waits; ids are then admitted as
            early as exact counts would admit them, some of them earlier. ``n`` is at most 255 then.

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
        """Return which ids occurred often enough."""
        return counts >= self.n


@dataclass(frozen=True)
class Probability:
    """Admits an id with this probability at each step at which it is looked up; not counted, so it needs no memory.

    The coin is a hash of id and step: a run that is repeated or resumed admits the same ids. As the probabilistic
    filter of Monolith (Liu et al., 2022).

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
        """Return the ids that the coin of this step admits."""
        salt = mix64(np.array([step], np.uint64) + np.uint64(1))  # mix64(0) is 0: at step 0 as at any other
        coins = mix64(mix64(ids.view(np.uint64) ^ salt) ^ salt) >> np.uint64(11)
        fell: Bools = coins < self.p * 2.0**53
        return fell


@dataclass(frozen=True)
class AdmitIf:
    """Admits what a function says: ``admit(ids, step)`` returns a mask; it is pure, and the same on every rank.

    Attributes:
        function: gets different ids, int64 of shape (n,), and the step of the table; returns n bools.
    """

    function: AdmitFunction
    counts: ClassVar[bool] = False
    bloom: ClassVar[Bloom | None] = None
    needs_step: ClassVar[bool] = False

    def __repr__(self) -> str:
        return "AdmitIf"  # the same on all ranks

    def admits(self, ids: Int64s, counts: Int64s, step: int) -> Bools:
        """Return what the function says."""
        answers: Bools = np.asarray(self.function(ids, step))
        return answers


def as_admit(admit: Any) -> Admit:
    if isinstance(admit, type) or not (isinstance(admit, Admit) or callable(admit)):
        raise TypeError(
            f"admit must be MinCount(n), Probability(p) or a callable (ids, step) -> mask, found {admit!r}; omit it to "
            "admit all"
        )
    return admit if isinstance(admit, Admit) else AdmitIf(admit)
