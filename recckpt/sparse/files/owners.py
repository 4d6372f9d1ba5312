"""Which ranks own which ids of a table that they load parts of, or copies (no torch here)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import Slice, bucket_of
from recckpt.format.catalog import Batch

Int64s = npt.NDArray[np.int64]
_LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class IdSpan:
    """The ids from ``least`` to ``greatest``, both included; none where that is the smaller one."""

    least: int
    greatest: int

    @classmethod
    def of_rows(cls, first: int, end: int, n_rows: int) -> IdSpan:
        """Return what a rank owns that has the rows [first, end) of a table of so many.

        Ids without a row, which a load may leave out, belong to the ranks with the first and the last one: so each id
        has an owner, and is counted by it.
        """
        if first >= end:
            return cls(0, -1)
        return cls(_LEAST if first == 0 else first, _GREATEST if end == n_rows else end - 1)

    @property
    def is_everything(self) -> bool:
        """Whether every id is inside."""
        return self.least == _LEAST and self.greatest == _GREATEST

    def owns(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids that are inside."""
        return (ids >= self.least) & (ids <= self.greatest)


OwnedIds = Slice | IdSpan  # of one table on one rank


class Owners:
    """The owners of the ids of a table, of which an id may have several; the same on all ranks.

    Args:
        owned: rank -> the ids that it owns.
    """

    def __init__(self, owned: Mapping[int, Collection[OwnedIds]]) -> None:
        self._owned = owned
        every = [(one, rank) for rank, some in owned.items() for one in some]
        self._by_bucket = _Spans((*one.buckets, rank) for one, rank in every if isinstance(one, Slice))
        self._by_id = _Spans((one.least, one.greatest + 1, rank) for one, rank in every if isinstance(one, IdSpan))

    def shares(self, batch: Batch) -> Mapping[int, float]:
        """Return about which share of the rows of a batch each rank owns, of all that may own one; in one order.

        Ids are spread evenly over buckets, and taken to be so over their range.
        """
        shares: dict[int, float] = {}
        for rank, share in self._by_bucket.shares(*batch.buckets):
            shares[rank] = shares.get(rank, 0.0) + share
        for rank, share in self._by_id.shares(batch.ids[0], batch.ids[1] + 1):
            shares[rank] = shares.get(rank, 0.0) + share
        return shares

    def of(self, ids: Int64s, ranks: Collection[int]) -> Iterator[tuple[int, Int64s]]:
        """Yield some ranks, each with the positions of the ids that it owns."""
        buckets = bucket_of(ids) if self._by_bucket.n else ids
        for rank in ranks:
            is_own = np.zeros(len(ids), np.bool_)
            for one in self._owned[rank]:
                if isinstance(one, Slice):
                    begin, end = one.buckets
                    is_own |= (buckets >= begin) & (buckets < end)
                else:
                    is_own |= one.owns(ids)
            yield rank, np.flatnonzero(is_own)


class _Spans:
    """Ranges [begin, end) of ranks on one line."""

    def __init__(self, spans: Iterable[tuple[int, int, int]]) -> None:
        self._spans = sorted(span for span in spans if span[0] < span[1])
        self.n = len(self._spans)
        self._begins = [begin for begin, _, _ in self._spans]
        self._furthest = list(accumulate((end for _, end, _ in self._spans), max))

    def shares(self, first: int, last: int) -> Iterator[tuple[int, float]]:
        """Yield the ranks whose ranges meet [first, last), each with the share that it has of that."""
        for begin, end, rank in self._spans[bisect_right(self._furthest, first) : bisect_left(self._begins, last)]:
            both = min(end, last) - max(begin, first)
            if both > 0:
                yield rank, both / (last - first)
