"""Which ranks own which ids of a table that several of them load parts of (no torch here)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import Slice, bucket_of
from recckpt.format.catalog import Batch

Int64s = npt.NDArray[np.int64]


class Owners(Protocol):
    """The owners of the ids of a table, of which an id may have several; the same on all ranks."""

    def shares(self, batch: Batch) -> Mapping[int, float]:
        """Return about which share of the rows of a batch each rank owns, of all that may own one; in one order."""

    def of(self, ids: Int64s, ranks: Collection[int]) -> Iterator[tuple[int, Int64s]]:
        """Yield some ranks, each with the positions of the ids that it owns."""


class SliceOwners:
    """Owners by the buckets of ids.

    Args:
        slices: rank -> the slices that it owns.
    """

    def __init__(self, slices: Mapping[int, Collection[Slice]]) -> None:
        spans = sorted((*each.buckets, rank) for rank, some in slices.items() for each in some)
        self._slices = slices
        self._spans = [span for span in spans if span[0] < span[1]]
        self._begins = [begin for begin, _, _ in self._spans]
        self._furthest = list(accumulate((end for _, end, _ in self._spans), max))

    def shares(self, batch: Batch) -> Mapping[int, float]:
        """Return the share of the buckets of a batch: ids are spread over them evenly."""
        first, last = batch.buckets
        shares: dict[int, float] = {}
        for begin, end, rank in self._spans[bisect_right(self._furthest, first) : bisect_left(self._begins, last)]:
            both = min(end, last) - max(begin, first)
            if both > 0:
                shares[rank] = shares.get(rank, 0.0) + both / (last - first)
        return shares

    def of(self, ids: Int64s, ranks: Collection[int]) -> Iterator[tuple[int, Int64s]]:
        """Yield some ranks, each with the positions of the ids in its slices."""
        buckets = bucket_of(ids)
        for rank in ranks:
            is_own = np.zeros(len(ids), np.bool_)
            for begin, end in (each.buckets for each in self._slices[rank]):
                is_own |= (buckets >= begin) & (buckets < end)
            yield rank, np.flatnonzero(is_own)
