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
_Span = tuple[int, int, float]
LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1


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
        return cls(LEAST if first == 0 else first, _GREATEST if end == n_rows else end - 1)

    @property
    def is_everything(self) -> bool:
        """Whether every id is inside."""
        return self.least == LEAST and self.greatest == _GREATEST

    def owns(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids that are inside."""
        return (ids >= self.least) & (ids <= self.greatest)

    @property
    def spans(self) -> Iterator[_Span]:
        """Where on the line of ids it owns some: [begin, end), and which share of those."""
        yield self.least, self.greatest + 1, 1.0


@dataclass(frozen=True)
class IdSpans:
    """The ids of several ranges."""

    parts: tuple[IdSpan, ...]

    @property
    def is_everything(self) -> bool:
        """Whether one of them has every id."""
        return any(part.is_everything for part in self.parts)

    def owns(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids that are inside."""
        is_own = np.zeros(len(ids), np.bool_)
        for part in self.parts:
            is_own |= part.owns(ids)
        return is_own

    @property
    def spans(self) -> Iterator[_Span]:
        """As of :class:`IdSpan`."""
        return (span for part in self.parts for span in part.spans)


@dataclass(frozen=True)
class IdBlock:
    """One of ``size`` blocks of ids, each ``width`` wide, as TorchRec gives them to ranks; ids count as unsigned.

    Ids beyond all blocks are dealt in turn: the id ``i`` belongs to the block ``i % size``.
    """

    number: int
    size: int
    width: int

    @property
    def is_everything(self) -> bool:
        """Whether it is the only one."""
        return self.size == 1

    def owns(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids that belong to it."""
        unsigned = ids.astype(np.uint64)
        is_inside = unsigned <= np.uint64(self._end - 1)
        owner = np.where(is_inside, unsigned // np.uint64(self.width), unsigned % np.uint64(self.size))
        is_own: npt.NDArray[np.bool_] = owner == np.uint64(self.number)
        return is_own

    @property
    def spans(self) -> Iterator[_Span]:
        """As of :class:`IdSpan`."""
        begin = self.number * self.width
        for first, end, share in ((begin, begin + self.width, 1.0), (self._end, 1 << 64, 1 / self.size)):
            yield first, min(end, 1 << 63), share
            yield max(first, 1 << 63) - (1 << 64), min(end, 1 << 64) - (1 << 64), share

    @property
    def _end(self) -> int:
        """The first id after all blocks."""
        return min(self.size * self.width, 1 << 64)


EVERY_ID = IdSpan(LEAST, _GREATEST)
OwnedIds = Slice | IdSpan | IdSpans | IdBlock  # of one table on one rank


class Owners:
    """The owners of the ids of a table, of which an id may have several; the same on all ranks.

    Args:
        owned: rank -> the ids that it owns.
    """

    def __init__(self, owned: Mapping[int, Collection[OwnedIds]]) -> None:
        self._owned = owned
        every = [(one, rank) for rank, some in owned.items() for one in some]
        self._by_bucket = _Spans((*one.buckets, 1.0, rank) for one, rank in every if isinstance(one, Slice))
        self._by_id = _Spans((*span, rank) for one, rank in every if not isinstance(one, Slice) for span in one.spans)

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
    """Ranges [begin, end) on one line, of each of which a rank has a share."""

    def __init__(self, spans: Iterable[tuple[int, int, float, int]]) -> None:
        self._spans = sorted(span for span in spans if span[0] < span[1])
        self.n = len(self._spans)
        self._begins = [span[0] for span in self._spans]
        self._furthest = list(accumulate((span[1] for span in self._spans), max))

    def shares(self, first: int, last: int) -> Iterator[tuple[int, float]]:
        """Yield the ranks whose ranges meet [first, last), each with the share that it has of that."""
        for begin, end, share, rank in self._spans[
            bisect_right(self._furthest, first) : bisect_left(self._begins, last)
        ]:
            both = min(end, last) - max(begin, first)
            if both > 0:
                yield rank, share * both / (last - first)
