"""Rows of two checkpoints that have the same ids, found by their hashes (no torch here)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from recckpt.sparse.files.once import Int64s

Hashes = npt.NDArray[np.uint64]
_TO_BUCKET = np.uint64(48)  # bits below those of the bucket


def paired(before: Hashes, after: Hashes) -> tuple[Int64s, Int64s]:
    """Return where the ids that both sides have lie on the one and on the other, in the order of the first.

    On each side the hashes are all different and in the order of their buckets. Within a bucket, the rows of one run
    keep their order as long as none goes, and new ones follow them. So each row is looked for at its place in the
    bucket first, and only those that are not there are sorted and searched.
    """
    if not len(before) or not len(after):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    at = _same_places(before, after)
    is_found = after[at] == before
    both = np.flatnonzero(is_found)
    at = at[both]
    if len(both) == min(len(before), len(after)):
        return both, at
    is_left = np.ones(len(after), np.bool_)
    is_left[at] = False
    more, more_at = _searched(before, np.flatnonzero(~is_found), after, np.flatnonzero(is_left))
    if not len(more):
        return both, at
    both, at = np.concatenate([both, more]), np.concatenate([at, more_at])
    order = np.argsort(both)
    return both[order], at[order]


def _same_places(before: Hashes, after: Hashes) -> Int64s:
    """Return for each row before the row after that is as far behind the first of its bucket, or any other."""
    buckets = before >> _TO_BUCKET
    firsts = np.flatnonzero(np.concatenate([[True], buckets[1:] != buckets[:-1]]))
    shifts = np.searchsorted(after >> _TO_BUCKET, buckets[firsts]) - firsts
    places = np.arange(len(before)) + np.repeat(shifts, np.diff(firsts, append=len(before)))
    return np.asarray(np.minimum(places, len(after) - 1))


def _searched(before: Hashes, rows: Int64s, after: Hashes, rows_after: Int64s) -> tuple[Int64s, Int64s]:
    """Return the rows that are also among ``rows_after``, which has at least one, and their counterparts there."""
    rows_after = rows_after[np.argsort(after[rows_after])]
    ordered, sought = after[rows_after], before[rows]
    places = np.minimum(np.searchsorted(ordered, sought), len(ordered) - 1)
    matches = np.flatnonzero(ordered[places] == sought)
    return rows[matches], rows_after[places[matches]]
