"""How many rows a table has at each link of chains, and how many deletes are of ids that it lacks (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.format.buckets import N_BUCKETS
from recckpt.sparse.files.link_cursors import LinkCursor, Piece, bucket_ranges, ids_of
from recckpt.sparse.files.once import Int64s, LinkIds, newest
from recckpt.sparse.files.table_reader import TableReader

Unreadable = CorruptCheckpointError | CheckpointRemovedError | OSError


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
    error: Unreadable | None = None  # why it cannot be counted
    is_known: bool = True  # whether it was counted

    def fail(self, error: Unreadable | None) -> None:
        """Note that it cannot be counted, as what it stands on, or by an error of its own."""
        self.error, self.is_known = error, False

    def add(self, rows: int, absent: int = 0) -> None:
        """Count rows, and deletes of ids that are not there."""
        self.rows += rows
        self.absent += absent


def count_rows(nodes: Sequence[Node], budget_bytes: int) -> list[Counted]:
    """Return what each node comes to; ids are read once for all of them, so many bytes at a time."""
    counted = [Counted() for _ in nodes]
    cursors = [LinkCursor(node.link, (0, N_BUCKETS)) for node in nodes]
    for buckets in bucket_ranges([node.link for node in nodes], (0, N_BUCKETS), budget_bytes):
        named: list[list[LinkIds]] = []  # by each node and those below, newest first
        for node, count, cursor in zip(nodes, counted, cursors, strict=True):
            if count.is_known and node.below is not None and not counted[node.below].is_known:
                count.fail(None)
            own = _ids_of([], [])
            if count.is_known:
                try:
                    own = _ids_of(*cursor.between(*buckets))
                except (CorruptCheckpointError, CheckpointRemovedError, OSError) as error:
                    count.fail(error)
            below = [] if node.below is None else named[node.below]
            named.append([own, *below])
            count.add(*_changes(own, below))
    for node, count in zip(nodes, counted, strict=True):
        count.add(0 if node.below is None else counted[node.below].rows)
    return counted


def _ids_of(rows: Sequence[Piece], deletes: Sequence[Piece]) -> LinkIds:
    return LinkIds(np.sort(ids_of(rows)), [ids_of(deletes)])


def _changes(own: LinkIds, below: Sequence[LinkIds]) -> tuple[int, int]:
    """Return how many rows more a node has than those below, newest first, and its deletes of ids not there."""
    n_present = _n_there(below, own.deletes)
    return len(own.rows) - _n_there(below, own.rows) - n_present, len(own.deletes) - n_present


def _n_there(links: Sequence[LinkIds], ids: Int64s) -> int:
    return sum(len(here) for _, here, _ in newest(links, ids))
