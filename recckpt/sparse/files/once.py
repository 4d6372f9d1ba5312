"""The rule of ids in files: a link names an id once, and the newest link that names it counts (no torch here).

A link names an id by a row or by a delete, in one of its shards once; a row in any of them counts more than a delete in
any. The form for memory, which hashes ids as they come, is :class:`recckpt.sparse.files.known_ids.KnownIds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from recckpt.format.distinct import distinct, is_among, repeated

Int64s = npt.NDArray[np.int64]
Damage = Callable[[str, str, str], Exception]  # of (where, found, expected)

ABSENT, DELETED = -1, -2  # in place of a row


class AskedLink(Protocol):
    """What a link says of ids."""

    def find(self, ids: Int64s) -> Int64s:
        """Return the row of each id; ABSENT where the link does not name it, DELETED where it has no row of it."""


_Link = TypeVar("_Link", bound=AskedLink)


def named_twice(ids: Int64s) -> tuple[str, str]:
    """Return (found, expected) for ids that are there more than once."""
    others = f" and {len(ids) - 1} others" if len(ids) > 1 else ""
    return f"id {ids[0]}{others} twice", "every id once"


def check_once(shards: Iterable[tuple[Int64s, Int64s]], damage: Damage, *, between: bool = True) -> None:
    """Raise where a link names an id twice: as a row and a delete of one shard, or as a row of two.

    Args:
        shards: the ids of the rows and of the deletes of each, among both of which none is twice.
        damage: makes the error.
        between: whether an id may be in two shards, so that they are compared.
    """
    of_shards = []
    for rows, deletes in shards:
        if len(rows) and len(deletes):
            _check("in one shard", [rows, deletes], damage)
        of_shards += [rows] if len(rows) else []
    if between and len(of_shards) > 1:
        _check("between shards", of_shards, damage)


def _check(where: str, ids: list[Int64s], damage: Damage) -> None:
    if len(twice := repeated(np.concatenate(ids))):
        raise damage(where, *named_twice(twice))


def newest(links: Iterable[_Link], ids: Int64s) -> Iterator[tuple[_Link, Int64s, Int64s]]:
    """Ask links, newest first, for the ids that no newer one names; ask no further once all are named.

    Yields:
        A link, the positions of the ids whose rows it has, and these rows.
    """
    left = np.arange(len(ids))
    for link in links if len(ids) else ():
        rows = link.find(ids[left])
        yield link, left[rows >= 0], rows[rows >= 0]
        left = left[rows == ABSENT]
        if not len(left):
            return


class LinkIds:
    """The ids that one link names.

    Args:
        rows: the ids that have rows, in order.
        deletes: those that its shards delete, in any order; those with rows do not count.
    """

    def __init__(self, rows: Int64s, deletes: Iterable[Int64s]) -> None:
        deleted = distinct(np.empty(0, np.int64), *deletes)
        self.rows, self.deletes = rows, deleted[~is_among(deleted, rows)]

    def find(self, ids: Int64s) -> Int64s:
        """Return the place of each id among the rows; ABSENT or DELETED where it has none."""
        places = np.where(is_among(ids, self.deletes), DELETED, ABSENT)
        if len(self.rows):
            at = np.minimum(np.searchsorted(self.rows, ids), len(self.rows) - 1)
            places = np.where(self.rows[at] == ids, at, places)
        return places


class NamedIds:
    """The ids that newer links name, or their hashes."""

    def __init__(self) -> None:
        self._ordered: npt.NDArray[Any] | None = None

    def new(self, ids: npt.NDArray[Any]) -> Int64s:
        """Return the positions of the ids that are not named yet."""
        return np.arange(len(ids)) if self._ordered is None else np.flatnonzero(self.is_new(ids))

    def is_new(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids that are not named yet."""
        return np.ones(len(ids), np.bool_) if self._ordered is None else ~is_among(ids, self._ordered)

    def add(self, *ids: npt.NDArray[Any]) -> None:
        """Name ids, some of which may be named already."""
        if sum(map(len, ids)):
            self._ordered = np.sort(np.concatenate(ids if self._ordered is None else (self._ordered, *ids)))
