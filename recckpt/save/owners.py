"""Whether each id of a table belongs to one rank, and each row of a live one to any; pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from recckpt.save.check import Owned
from recckpt.types import RowShare

_LIVE_REMEDY = "start the process group before live_tables is called on each rank, and save with all ranks"
_Range = tuple[float, float, int]  # part of the ids from 0 to 1, and the rank that owns it


def why_shared(owned: Sequence[Owned]) -> str | None:
    """Return which tables have ids that several ranks own, and what to do; None where there are none.

    Args:
        owned: names of the tables of each rank, by the ids that it owns of them.
    """
    ranges: dict[Sequence[str], list[_Range]] = {}  # by names of tables that are owned alike, mostly all of them
    for rank, of_rank in enumerate(owned):
        for own, names in of_rank.items():
            if own is None or own.begin < own.end:
                part = (own.begin / own.size, own.end / own.size, rank) if own else (0.0, 1.0, rank)
                ranges.setdefault(names, []).append(part)
    groups: dict[str, list[Sequence[str]]] = {}
    for names in ranges:
        for name in names:
            groups.setdefault(name, []).append(names)
    overlaps: dict[tuple[Sequence[str], ...], tuple[int, int] | None] = {}
    problems = []
    for name in sorted(groups):
        group = tuple(groups[name])
        if group not in overlaps:
            overlaps[group] = _overlap([part for names in group for part in ranges[names]])
        two = overlaps[group]
        if two is not None:
            problems.append(f"table {name!r}: ranks {min(two)} and {max(two)} own the same ids")
    if not problems:
        return None
    if any(isinstance(own, RowShare) for of_rank in owned for own in of_rank):
        return f"{'; '.join(problems)}: {_LIVE_REMEDY}"
    return (
        f"{'; '.join(problems)}: an id belongs to one rank, or it is saved several times and cannot be loaded; "
        "make the table a recckpt.sparse.ShardedHashTable, or give it slice=gen_slice(rank, ranks)"
    )


def _overlap(ranges: list[_Range]) -> tuple[int, int] | None:
    """Return two ranks that own the same ids, if there are any: neighbours, in the order of ids."""
    for (_, end, one), (begin, _, other) in pairwise(sorted(ranges)):
        if begin < end:
            return one, other
    return None


def why_missing(owned: Sequence[Owned]) -> str | None:
    """Return which rows of live tables no rank saves, and what to do; None where there are none."""
    ranges: dict[tuple[str, int], list[RowShare]] = {}
    for of_rank in owned:
        for own, names in of_rank.items():
            if isinstance(own, RowShare):
                for name in names:
                    ranges.setdefault((name, own.size), []).append(own)
    problems = [
        f"table {name!r}: found {n_saved} rows on {len(owned)} ranks, expected {size}"
        for (name, size), of_table in sorted(ranges.items())
        if (n_saved := sum(own.end - own.begin for own in of_table)) < size
    ]
    if not problems:
        return None
    return f"{'; '.join(problems)}: {_LIVE_REMEDY}"
