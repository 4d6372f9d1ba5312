"""How values are spread, in bounded memory: exact ends, and quantiles of a histogram (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

QUANTILES = (0.1, 0.5, 0.9, 0.99)
_SHIFT = np.int64(45)  # of a float64, this leaves sign, exponent and 7 bits: bins that are 1/128 of their value wide
_MOST_WAITING = 1 << 13  # what counts them stays in the caches of a core
_N_BINS = 2047 << 7  # of positive finite numbers


@dataclass(frozen=True)
class Spread:
    """How the finite ones of some values, none negative, are spread.

    Attributes:
        n: how many there are.
        least: the smallest one.
        most: the largest one.
        quantiles: share of the values -> the value that so many are at most, within 0.4 %.
        not_finite: values beside them that are NaN or infinite.
    """

    n: int
    least: float
    most: float
    quantiles: Mapping[float, float]
    not_finite: int = 0


class Histogram:
    """Counts values in bins of equal relative width, 2 MiB whatever their number; not thread-safe."""

    def __init__(self) -> None:
        self._counts = np.zeros(_N_BINS, np.int64)
        self._least, self._most, self._not_finite = np.inf, 0.0, 0
        self._waiting: list[Floats] = []
        self._n_waiting = 0

    def add(self, values: Floats) -> None:
        """Count values, none of them negative."""
        self._waiting.append(values)
        self._n_waiting += len(values)
        if self._n_waiting >= _MOST_WAITING:
            self._count()

    def _count(self) -> None:
        values = np.concatenate([np.empty(0), *self._waiting])
        self._waiting, self._n_waiting = [], 0
        if len(values) and not np.isfinite(values.max()):  # which NaN is not either
            finite = values[np.isfinite(values)]
            self._not_finite += len(values) - len(finite)
            values = finite
        if len(values):
            least, most = float(values.min()), float(values.max())
            bins = np.ascontiguousarray(values).view(np.int64) >> _SHIFT
            first = int(bins.min())
            counts = np.bincount(bins - first)
            self._counts[first : first + len(counts)] += counts
            self._least, self._most = min(self._least, least), max(self._most, most)

    def merge(self, other: Histogram) -> None:
        """Count what another has counted."""
        self._count()
        other._count()
        self._counts += other._counts
        self._least, self._most = min(self._least, other._least), max(self._most, other._most)
        self._not_finite += other._not_finite

    def spread(self) -> Spread | None:
        """Return how the values are spread, None where there were none."""
        self._count()
        up_to = np.cumsum(self._counts)
        n = int(up_to[-1])
        if not n:
            return Spread(0, 0.0, 0.0, {}, self._not_finite) if self._not_finite else None
        ranks = [max(1, int(np.ceil(share * n))) for share in QUANTILES]
        bins = np.searchsorted(up_to, ranks).astype(np.int64)
        edges = (bins << _SHIFT).view(np.float64), ((bins + 1) << _SHIFT).view(np.float64)
        middles = np.where(bins > 0, np.clip(edges[0] / 2 + edges[1] / 2, self._least, self._most), 0.0)
        quantiles = dict(zip(QUANTILES, map(float, middles), strict=True))
        return Spread(n, self._least, self._most, quantiles, self._not_finite)
