"""The spread of values in bounded memory: exact least and largest value, and quantiles from a histogram."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

QUANTILES = (0.1, 0.5, 0.9, 0.99)
_SHIFT = 45  # keeps sign, exponent and 7 bits of a float64: the width of a bin is 1/128 of its value
_MOST_WAITING = 1 << 13  # values to count at once, within the caches of a core


@dataclass(frozen=True)
class Spread:
    """Least, largest and quantiles of non-negative values; non-finite values are counted separately."""

    n: int  # number of finite values
    least: float  # smallest value
    most: float  # largest value
    quantiles: Mapping[float, float]  # share -> quantile, with an error of up to 0.4 %
    not_finite: int = 0  # number of NaN and infinite values


@dataclass(frozen=True)
class Bars:
    zeros: int  # number of values that are 0, which a logarithmic scale cannot show
    edges: tuple[float, ...]  # ascending edges, one more than bars; () if all values are 0
    counts: tuple[int, ...]  # values in each bar


class Histogram:
    """Counts non-negative values in bins of equal relative width. Not thread-safe.

    Takes 1 kB for each power of two between the smallest and largest value, at most 2 MiB.
    """

    def __init__(self) -> None:
        self._counts, self._first = np.zeros(0, np.int64), 0  # counts of positive values; number of the first bin
        self._zeros = 0
        self._least, self._most, self._not_finite = np.inf, 0.0, 0
        self._waiting: list[Floats] = []
        self._n_waiting = 0

    def add(self, values: Floats) -> None:
        self._waiting.append(values)
        self._n_waiting += len(values)
        if self._n_waiting >= _MOST_WAITING:
            self._count()

    def _count(self) -> None:
        values = self._waiting[0] if len(self._waiting) == 1 else np.concatenate([np.empty(0), *self._waiting])
        self._waiting, self._n_waiting = [], 0
        if len(values) and not np.isfinite(values.max()):  # also True for NaN
            finite = values[np.isfinite(values)]
            self._not_finite += len(values) - len(finite)
            values = finite
        if not len(values):
            return
        least, most = float(values.min()), float(values.max())
        self._least, self._most = min(self._least, least), max(self._most, most)
        if least == 0:
            positive = values[values > 0]
            self._zeros += len(values) - len(positive)
            values, least = positive, float(positive.min()) if len(positive) else 0.0
        if len(values):
            first = int(np.float64(least).view(np.int64) >> _SHIFT)
            bins = np.ascontiguousarray(values).view(np.int64) >> _SHIFT
            bins -= first
            self._add_counts(first, np.bincount(bins))

    def _add_counts(self, first: int, counts: Int64s) -> None:
        if not len(counts):
            return
        if not len(self._counts):
            self._first = first
        begin = min(first, self._first)
        end = max(first + len(counts), self._first + len(self._counts))
        if end - begin > len(self._counts):
            before, self._counts = self._counts, np.zeros(end - begin, np.int64)
            self._counts[self._first - begin : self._first - begin + len(before)] = before
            self._first = begin
        self._counts[first - self._first : first - self._first + len(counts)] += counts

    def merge(self, other: Histogram) -> None:
        self._count()
        other._count()
        self._zeros += other._zeros
        self._add_counts(other._first, other._counts)
        self._least, self._most = min(self._least, other._least), max(self._most, other._most)
        self._not_finite += other._not_finite

    def spread(self) -> Spread | None:
        self._count()
        up_to = self._zeros + np.concatenate([[0], np.cumsum(self._counts)])
        n = int(up_to[-1])
        if not n:
            return Spread(0, 0.0, 0.0, {}, self._not_finite) if self._not_finite else None
        ranks = [max(1, int(np.ceil(share * n))) for share in QUANTILES]
        middles = np.concatenate([[0.0], self._middles()])[np.searchsorted(up_to, ranks)]
        quantiles = dict(zip(QUANTILES, map(float, middles), strict=True))
        return Spread(n, self._least, self._most, quantiles, self._not_finite)

    def n_above(self, value: float) -> int:
        """Return about how many values are larger than ``value``, not counting those in its own bin."""
        self._count()
        at = int(np.float64(value).view(np.int64) >> _SHIFT) + 1 - self._first
        return int(self._counts[max(0, at) :].sum())

    def n_that_carry(self, share: float) -> int:
        """Return the smallest number of values, taken from the largest down, that make up this share of the sum."""
        self._count()
        counts, middles = self._counts[::-1], self._middles()[::-1]
        sums = np.cumsum(counts * middles)
        if not len(sums) or not sums[-1] > 0:
            return 0
        carried = share * sums[-1]
        at = int(np.searchsorted(sums, carried))
        before = sums[at - 1] if at else 0.0
        return int(counts[:at].sum()) + int(np.ceil((carried - before) / middles[at]))

    def bars(self, most: int) -> Bars | None:
        """Return a histogram of at most ``most`` bars of equal width in the logarithm; None if empty."""
        self._count()
        bins = np.flatnonzero(self._counts) + self._first
        if not len(bins):
            return Bars(self._zeros, (), ()) if self._zeros else None
        first, last = int(bins[0]), int(bins[-1])
        width = -(-(last - first + 1) // most)
        borders = np.arange(first, last + width + 1, width)
        counts = np.add.reduceat(self._counts[first - self._first :], borders[:-1] - first)
        return Bars(self._zeros, tuple(map(float, _edge(borders))), tuple(map(int, counts)))

    def _middles(self) -> Floats:
        bins = self._first + np.arange(len(self._counts))
        middles = np.clip(_edge(bins) / 2 + _edge(bins + 1) / 2, self._least, self._most)
        return np.where(bins > 0, middles, 0.0)


def _edge(bins: Int64s) -> Floats:
    return (np.asarray(bins, np.int64) << _SHIFT).view(np.float64)
