"""Decides which ranks own which ids, which rank reads each batch, and in which rounds ranks send rows (no torch)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import Slice, bucket_of
from recckpt.format.catalog import Batch, Part

Int64s = npt.NDArray[np.int64]
_Span = tuple[int, int, float]
LEAST, _GREATEST = -(1 << 63), (1 << 63) - 1
BLOCK_BYTES = 1 << 20  # consecutive small batches of up to this size together are read by one rank
Window = Mapping[int, int]  # rows that a rank sends in one round: receiving rank -> about how many bytes


@dataclass(frozen=True)
class IdSpan:
    """The ids from ``least`` to ``greatest``, both included; empty if ``greatest`` is less than ``least``."""

    least: int
    greatest: int

    @classmethod
    def of_rows(cls, first: int, end: int, n_rows: int) -> IdSpan:
        """Return the ids that the owner of rows [first, end) of ``n_rows`` owns.

        Ids beyond the rows, which a load may skip, belong to the owner of the first or the last row, so that each such
        id is counted once.
        """
        if first >= end:
            return cls(0, -1)
        return cls(LEAST if first == 0 else first, _GREATEST if end == n_rows else end - 1)

    @property
    def is_everything(self) -> bool:
        return self.least == LEAST and self.greatest == _GREATEST

    def owns(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        return (ids >= self.least) & (ids <= self.greatest)

    @property
    def spans(self) -> Iterator[_Span]:
        """Yield (begin, end, share): ranges [begin, end) of ids, and the owned share of each range."""
        yield self.least, self.greatest + 1, 1.0


@dataclass(frozen=True)
class IdSpans:
    parts: tuple[IdSpan, ...]

    @property
    def is_everything(self) -> bool:
        return any(part.is_everything for part in self.parts)

    def owns(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        is_own = np.zeros(len(ids), np.bool_)
        for part in self.parts:
            is_own |= part.owns(ids)
        return is_own

    @property
    def spans(self) -> Iterator[_Span]:
        return (span for part in self.parts for span in part.spans)


@dataclass(frozen=True)
class IdBlock:
    """One of ``size`` blocks of ids of equal width, as TorchRec assigns them to ranks; ids count as unsigned.

    Ids beyond all blocks are assigned round-robin: id ``i`` belongs to block ``i % size``.
    """

    number: int
    size: int
    width: int

    @property
    def is_everything(self) -> bool:
        return self.size == 1

    def owns(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        unsigned = ids.astype(np.uint64)
        is_inside = unsigned <= np.uint64(self._end - 1)
        owner = np.where(is_inside, unsigned // np.uint64(self.width), unsigned % np.uint64(self.size))
        is_own: npt.NDArray[np.bool_] = owner == np.uint64(self.number)
        return is_own

    @property
    def spans(self) -> Iterator[_Span]:
        begin = self.number * self.width
        for first, end, share in ((begin, begin + self.width, 1.0), (self._end, 1 << 64, 1 / self.size)):
            yield first, min(end, 1 << 63), share
            yield max(first, 1 << 63) - (1 << 64), min(end, 1 << 64) - (1 << 64), share

    @property
    def _end(self) -> int:
        return min(self.size * self.width, 1 << 64)


EVERY_ID = IdSpan(LEAST, _GREATEST)
OwnedIds = Slice | IdSpan | IdSpans | IdBlock  # the ids of one table that one rank owns


class Owners:
    """Maps the ids of a table to the one or more ranks that own them; equal on all ranks."""

    def __init__(self, owned: Mapping[int, Collection[OwnedIds]]) -> None:
        self._owned = owned
        every = [(one, rank) for rank, some in owned.items() for one in some]
        self._by_bucket = _Spans((*one.buckets, 1.0, rank) for one, rank in every if isinstance(one, Slice))
        self._by_id = _Spans((*span, rank) for one, rank in every if not isinstance(one, Slice) for span in one.spans)

    def shares(self, batch: Batch) -> Mapping[int, float]:
        """Return about which share of a batch's rows each owning rank has, in a fixed order.

        Ids are assumed to be spread evenly over the batch's buckets and id range.
        """
        shares: dict[int, float] = {}
        for rank, share in self._by_bucket.shares(*batch.buckets):
            shares[rank] = shares.get(rank, 0.0) + share
        for rank, share in self._by_id.shares(batch.ids[0], batch.ids[1] + 1):
            shares[rank] = shares.get(rank, 0.0) + share
        return shares

    def of(self, ids: Int64s, ranks: Collection[int]) -> Iterator[tuple[int, Int64s]]:
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
    def __init__(self, spans: Iterable[tuple[int, int, float, int]]) -> None:
        self._spans = sorted(span for span in spans if span[0] < span[1])
        self.n = len(self._spans)
        self._begins = [span[0] for span in self._spans]
        self._furthest = list(accumulate((span[1] for span in self._spans), max))

    def shares(self, first: int, last: int) -> Iterator[tuple[int, float]]:
        for begin, end, share, rank in self._spans[
            bisect_right(self._furthest, first) : bisect_left(self._begins, last)
        ]:
            both = min(end, last) - max(begin, first)
            if both > 0:
                yield rank, share * both / (last - first)


@dataclass(frozen=True)
class TableRequest:
    """What a rank needs from a table of a link.

    Attributes:
        row_bytes: bytes per row in ``columns``, including the id.
        owned: the ids that the rank owns, one entry for each table that it fills from this one.
    """

    columns: frozenset[str]
    row_bytes: int
    owned: tuple[OwnedIds, ...]


class DealtBatch(NamedTuple):
    """A batch from which ranks need rows, with the rank that reads it.

    Attributes:
        n_bytes: bytes of ``columns``.
        columns: slots that ranks need.
        reader: the rank that reads the batch.
        sent: the other ranks that may need rows, and about how many bytes each.
    """

    shard: int
    part: Part
    number: int
    n_bytes: int
    columns: frozenset[str]
    reader: int
    sent: Window


class LinkRequests:
    """What all ranks need from a link; ``of_tables`` is table -> rank -> request."""

    def __init__(self, of_ranks: Sequence[Mapping[str, TableRequest]]) -> None:
        self._size = len(of_ranks)
        self.of_tables: dict[str, dict[int, TableRequest]] = {}
        for rank, requests in enumerate(of_ranks):
            for table, request in requests.items():
                self.of_tables.setdefault(table, {})[rank] = request
        known: dict[tuple[tuple[int, tuple[OwnedIds, ...]], ...], Owners] = {}  # most tables have equal owners
        self.owners: dict[str, Owners] = {}
        for table, some in self.of_tables.items():
            owned = tuple((rank, request.owned) for rank, request in some.items())
            self.owners[table] = known.get(owned) or known.setdefault(owned, Owners(dict(owned)))

    def deal(self, parts: Sequence[Part], shard: int) -> Iterator[DealtBatch]:
        """Yield the batches of a shard from which ranks need rows, each with the rank that reads it.

        A batch, or a block of small ones, is read by a rank that needs it: the rank that lags furthest behind the bytes
        it owns. So a batch that one rank needs is read by that rank; if the ranks are those of the save, they send
        nothing; and each rank reads about as many bytes as it owns.
        """
        owed: Counter[int] = Counter()  # bytes that a rank owns, minus those it was assigned to read
        for part in parts:
            for block in self._blocks(part):
                for _, n_bytes, shares in block:
                    whole = sum(shares.values())
                    for rank, share in shares.items():
                        owed[rank] += round(n_bytes * share / whole)
                reader = max(block[0][2], key=lambda rank: (owed[rank], (rank - shard) % self._size))
                owed[reader] -= sum(n_bytes for _, n_bytes, _ in block)
                for number, n_bytes, shares in block:
                    of_table = self.of_tables[part.batches[number].table]
                    columns = frozenset[str]().union(*(of_table[rank].columns for rank in shares))
                    sent = {to: round(n_bytes * share) for to, share in shares.items() if to != reader}
                    yield DealtBatch(shard, part, number, n_bytes, columns, reader, sent)

    def _blocks(self, part: Part) -> Iterator[list[tuple[int, int, Mapping[int, float]]]]:
        block = list[tuple[int, int, Mapping[int, float]]]()
        left = BLOCK_BYTES
        for number, batch in enumerate(part.batches):
            shares = self.owners[batch.table].shares(batch) if batch.table in self.owners else {}
            if not shares:
                continue
            requests = self.of_tables[batch.table].values()
            n_bytes = batch.rows * (8 if part.holds == "deletes" else max(request.row_bytes for request in requests))
            if block and (n_bytes > left or shares.keys() != block[0][2].keys()):
                yield block
                block, left = [], BLOCK_BYTES
            block.append((number, n_bytes, shares))
            left -= n_bytes
        if block:
            yield block


def agreed_rounds(of_ranks: Sequence[Sequence[Window]], room: int) -> list[frozenset[int]]:
    """Return which ranks send their next window in each round.

    A rank receives at most ``room`` bytes per round, unless a single window is larger.
    """
    n_sent = [0] * len(of_ranks)
    rounds = []
    while left := [rank for rank, windows in enumerate(of_ranks) if n_sent[rank] < len(windows)]:
        received, senders = Counter[int](), set[int]()
        for rank in sorted(left, key=lambda rank: n_sent[rank] - len(of_ranks[rank])):  # ranks with most to send first
            window = of_ranks[rank][n_sent[rank]]
            if all(not received[to] or received[to] + n_bytes <= room for to, n_bytes in window.items()):
                received.update(window)
                senders.add(rank)
                n_sent[rank] += 1
        rounds.append(frozenset(senders))
    return rounds
