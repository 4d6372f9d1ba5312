"""How many rows a table has at each link of chains, and how many deletes are of ids that it lacks (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from recckpt.errors import CorruptCheckpointError
from recckpt.format.buckets import N_BUCKETS
from recckpt.format.distinct import distinct, is_among
from recckpt.sparse.files.id_check import Int64s
from recckpt.sparse.files.link_cursors import LinkCursor, Piece, bucket_ranges, ids_of
from recckpt.sparse.files.table_reader import TableReader


@dataclass(frozen=True)
class Node:
    """A link of one chain or of several: what it holds of the table, and what it stands on."""

    link: TableReader
    below: int | None  # number of that node, which comes before this one; None where the link holds all rows


@dataclass
class Counted:
    """What the ids of a node, and of those below, come to."""

    rows: int = 0
    absent: int = 0  # deletes of ids that are in no row at that link or below
    error: CorruptCheckpointError | OSError | None = None  # why it cannot be counted
    is_known: bool = True  # whether it was counted


def count_rows(nodes: Sequence[Node], budget_bytes: int) -> list[Counted]:
    """Return what each node comes to; ids are read once for all of them, so many bytes at a time."""
    counted = [Counted() for _ in nodes]
    cursors = [LinkCursor(node.link, (0, N_BUCKETS)) for node in nodes]
    for buckets in bucket_ranges([node.link for node in nodes], (0, N_BUCKETS), budget_bytes):
        ids = _Ids(nodes)
        for number, (node, count) in enumerate(zip(nodes, counted, strict=True)):
            count.is_known &= node.below is None or counted[node.below].is_known
            if count.is_known:
                try:
                    ids.add(*cursors[number].between(*buckets))
                except (CorruptCheckpointError, OSError) as error:
                    count.error, count.is_known = error, False
            if not count.is_known:
                ids.add([], [])
        for number, count in enumerate(counted):
            more, absent = ids.changes(number)
            count.rows += more
            count.absent += absent
    for node, count in zip(nodes, counted, strict=True):
        count.rows += 0 if node.below is None else counted[node.below].rows
    return counted


class _Ids:
    """The ids of a range of buckets, by node."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._upserts: list[Int64s] = []
        self._deletes: list[Int64s] = []  # of which none is an upsert of the same node

    def add(self, rows: Sequence[Piece], deletes: Sequence[Piece]) -> None:
        """Take the ids of the next node."""
        self._upserts.append(np.sort(ids_of(rows)))
        deleted = distinct(ids_of(deletes))
        self._deletes.append(deleted[~is_among(deleted, self._upserts[-1])])

    def changes(self, number: int) -> tuple[int, int]:
        """Return how many rows more a node has than the one below, and how many of its deletes are of ids not there."""
        upserts, deletes, below = self._upserts[number], self._deletes[number], self._nodes[number].below
        present = self._are_there(below, deletes).sum()
        return int((~self._are_there(below, upserts)).sum() - present), int(len(deletes) - present)

    def _are_there(self, number: int | None, ids: Int64s) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids that have a row at a node, by the newest that knows them."""
        mask, left = np.zeros(len(ids), np.bool_), np.arange(len(ids))
        while number is not None and len(left):
            is_row = is_among(ids[left], self._upserts[number])
            mask[left[is_row]] = True
            left = left[~(is_row | is_among(ids[left], self._deletes[number]))]
            number = self._nodes[number].below
        return mask
