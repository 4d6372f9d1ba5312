"""How the rows of a checkpoint are cut into parts: by ranges of buckets, each part a piece of work by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.chain import OpenChain
from recckpt.format.buckets import N_BUCKETS, gen_slice
from recckpt.sparse.files.link_cursors import bytes_up_to
from recckpt.types import SlotSpec

LEAST_PART_BYTES, MOST_PART_BYTES = 128 << 20, 1 << 30
_MANY = 64  # parts are as small as that for this many of them: pieces of work for many workers
_MAX_TABLES = 32_767  # part of the format: the table column counts in int16

_UpTo = npt.NDArray[np.int64]  # bytes of the rows of a bucket and those before it, times N_BUCKETS


@dataclass(frozen=True)
class Range:
    """The rows of one table in buckets [begin, end)."""

    table: str
    begin: int
    end: int


@dataclass(frozen=True)
class PlannedPart:
    """One part to write: number ``number`` of the tables of a shard that have these slots, which are a group."""

    shard: int
    shards: int
    group: int
    number: int
    slots: tuple[SlotSpec, ...]
    ranges: tuple[Range, ...]  # in file order
    n_bytes: int  # of its rows, about


def plan_parts(chain: OpenChain) -> list[PlannedPart]:
    """Divide the rows of a chain over as many shards as the newest link has, and over parts of about equal bytes.

    Shards get equal slices of the hashed ids, as ranks do; their parts come in the order of a catalog.
    """
    newest = chain.manifest
    slots = {table.name: [slot.name for slot in table.slots] for table in newest.tables}
    up_to = {table: bytes_up_to(chain.table(table, names).links, 0) for table, names in slots.items()}
    total = sum(int(table[-1]) for table in up_to.values()) // N_BUCKETS
    target = max(LEAST_PART_BYTES, min(MOST_PART_BYTES, total // _MANY))
    groups: dict[tuple[SlotSpec, ...], list[tuple[str, _UpTo]]] = {}
    for table in newest.tables:
        groups.setdefault(table.slots, []).append((table.name, up_to[table.name]))
    shards = len(newest.shards)
    return [
        PlannedPart(shard, shards, group, number, slots, ranges, n_bytes)
        for shard in range(shards)
        for group, slots in enumerate(sorted(groups))
        for number, (ranges, n_bytes) in enumerate(_roll(groups[slots], _buckets_of(shard, shards), target))
    ]


def _buckets_of(shard: int, shards: int) -> tuple[int, int]:
    own = gen_slice(shard, shards)
    return own.begin, own.end


def _roll(
    tables: Sequence[tuple[str, _UpTo]], buckets: tuple[int, int], target: int
) -> Iterator[tuple[tuple[Range, ...], int]]:
    """Yield the ranges of each part and about how many bytes they hold."""
    ranges: list[Range] = []
    n_bytes = 0
    for table, up_to in tables:
        at = buckets[0]
        while at < buckets[1]:
            begin, at = at, _end(up_to, at, buckets[1], target - n_bytes)
            size = _bytes_in(up_to, begin, at)
            if size:
                ranges.append(Range(table, begin, at))
                n_bytes += size
            if at < buckets[1] or n_bytes >= target or len(ranges) == _MAX_TABLES:
                yield tuple(ranges), n_bytes
                ranges, n_bytes = [], 0
    if ranges:
        yield tuple(ranges), n_bytes


def _end(up_to: _UpTo, begin: int, last: int, room: int) -> int:
    """Return up to which bucket the rows from ``begin`` on have room, one at least."""
    done = int(up_to[begin - 1]) if begin else 0
    return max(begin + 1, int(np.searchsorted(up_to[:last], done + room * N_BUCKETS, side="right")))


def _bytes_in(up_to: _UpTo, begin: int, end: int) -> int:
    """Return the bytes of buckets [begin, end), rounded up: where there is a row, it is not 0."""
    before = int(up_to[begin - 1]) if begin else 0
    return -(-(int(up_to[end - 1]) - before) // N_BUCKETS)
