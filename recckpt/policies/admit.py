"""Which ids get rows: small pure objects that decide, of ids without a row, whether they get one at this look-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import mix64
from recckpt.policies.bloom import MAX_BLOOM_COUNT, Bloom
from recckpt.types import count_of, positive_number

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
AdmitFunction = Callable[[Int64s, int], Any]


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
        ValueError: ``n`` or ``bloom`` is not such.
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
        ValueError: ``p`` is not such a number.
    """

    p: float
    counts: ClassVar[bool] = False
    bloom: ClassVar[Bloom | None] = None
    needs_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if positive_number("Probability: p", self.p) > 1:
            raise ValueError(f"Probability: p must be above 0 and at most 1, found {self.p!r}")

    def admits(self, ids: Int64s, counts: Int64s, step: int) -> Bools:
        """Return for which ids the coin of this step fell so."""
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
    """Return a policy, or wrap a function as one.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(admit, type) or not (isinstance(admit, Admit) or callable(admit)):
        raise TypeError(
            f"admit must be MinCount(n), Probability(p) or a callable (ids, step) -> mask, found {admit!r}; omit it to "
            "admit all"
        )
    return admit if isinstance(admit, Admit) else AdmitIf(admit)
