"""How the rows of tables are cut into parts: between buckets, so that all parts are about as large (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import N_BUCKETS
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
PART_BYTES = 1 << 30
_MAX_TABLES = 32_767  # part of the format: the table column counts in int16
_ID_BYTES = 8 + 2  # the id and table columns


@dataclass(frozen=True)
class TableBytes:
    """The size of the rows of one table.

    ``up_to`` returns for each bucket the bytes of its rows and of those in the buckets before it. It is called only
    where a table is cut: counting takes as long as reading all ids.
    """

    name: str
    slots: tuple[SlotSpec, ...]
    n_bytes: int
    up_to: Callable[[], Int64s]

    def within(self, begin: int, end: int) -> int:
        """Return the bytes of the rows in buckets [begin, end)."""
        if (begin, end) == (0, N_BUCKETS) or not self.n_bytes:
            return self.n_bytes
        up_to = self.up_to()
        return int(up_to[end - 1] - _before(up_to, begin)) if begin < end else 0


@dataclass(frozen=True)
class BucketRange:
    """The rows of one table in buckets [begin, end)."""

    table: str
    begin: int
    end: int


@dataclass(frozen=True)
class PartPlan:
    """One part to write: number ``number`` of the tables that have these slots, which are a group."""

    group: int
    number: int
    slots: tuple[SlotSpec, ...]
    ranges: tuple[BucketRange, ...]  # in file order; of different tables

    @property
    def tables(self) -> list[str]:
        """The tables that it has rows of."""
        return [cut.table for cut in self.ranges]


def row_bytes(slots: Sequence[SlotSpec]) -> int:
    """Return the bytes of one row in all columns."""
    return _ID_BYTES + sum(slot.row_bytes for slot in slots)


def plan_parts(
    tables: Sequence[TableBytes],
    n_writers: int,
    *,
    least_bytes: int,
    part_bytes: int = PART_BYTES,
    buckets: tuple[int, int] = (0, N_BUCKETS),
) -> list[PartPlan]:
    """Divide the rows of tables in buckets [begin, end) over parts, in the order of group and number.

    One large table is spread over as many parts as there are writers, but none is planned smaller than
    ``least_bytes``, or larger than ``part_bytes``. All parts of a group have about the same size: they differ by the
    rows of one bucket. The count is at most groups + n_writers + total bytes / part_bytes, and one more for every
    32,767 tables. A group has the same number whether its tables have rows or not.
    """
    groups: dict[tuple[SlotSpec, ...], list[TableBytes]] = {}
    for table in tables:
        groups.setdefault(table.slots, []).append(table)
    total = sum(table.n_bytes for table in tables)
    target_bytes = max(least_bytes, min(part_bytes, -(-total // n_writers)))
    return [
        PartPlan(group, number, slots, ranges)
        for group, slots in enumerate(sorted(groups))
        for number, ranges in enumerate(_parts(groups[slots], target_bytes, *buckets))
    ]


def _parts(tables: Sequence[TableBytes], target_bytes: int, begin: int, end: int) -> Iterator[tuple[BucketRange, ...]]:
    """Yield what goes into each part of a group."""
    ranges: list[BucketRange] = []
    for cut in _cut(tables, target_bytes, begin, end):
        if ranges and (cut is None or len(ranges) == _MAX_TABLES):
            yield tuple(ranges)
            ranges = []
        if cut is not None:
            ranges.append(cut)
    if ranges:
        yield tuple(ranges)


def _cut(tables: Sequence[TableBytes], target_bytes: int, begin: int, end: int) -> Iterator[BucketRange | None]:
    """Lay tables end to end and cut them into equal parts; yield their ranges, and None where a part ends."""
    sizes = [table.within(begin, end) for table in tables]
    total, before = sum(sizes), 0
    n_parts = max(1, round(total / target_bytes))
    for table, n_bytes in zip(tables, sizes, strict=True):
        if not n_bytes:
            continue
        first, last = (min(n_parts - 1, at * n_parts // total) for at in (before, before + n_bytes))
        if first == last:
            yield BucketRange(table.name, begin, end)
        else:
            limits = np.array([total * number // n_parts - before for number in range(first + 1, last + 1)])
            yield from _cut_one(table.name, table.up_to(), limits, begin, end)
        before += n_bytes


def _cut_one(table: str, up_to: Int64s, limits: Int64s, begin: int, end: int) -> Iterator[BucketRange | None]:
    """Cut a table at the borders of buckets before which there are nearest to so many bytes, for each limit."""
    up_to = np.concatenate([[0], up_to[begin:end] - _before(up_to, begin)])
    after = np.searchsorted(up_to, limits)  # the first border with at least as many bytes before it
    borders = np.where((after > 0) & (limits - up_to[after - 1] < up_to[after] - limits), after - 1, after)
    at = 0
    for border in borders.tolist():
        if up_to[at] < up_to[border]:
            yield BucketRange(table, begin + at, begin + border)
        yield None
        at = border
    if up_to[at] < up_to[-1]:
        yield BucketRange(table, begin + at, end)


def _before(up_to: Int64s, bucket: int) -> int:
    return int(up_to[bucket - 1]) if bucket else 0
