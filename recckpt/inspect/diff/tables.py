"""One table of two checkpoints, compared in bucket order within a bound on memory (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import N_BUCKETS
from recckpt.format.tables import TableEntry
from recckpt.inspect.diff.distances import SlotComparer
from recckpt.inspect.diff.found import Found, Pair
from recckpt.inspect.diff.result import TableDiff
from recckpt.inspect.open_checkpoint import OpenCheckpoint
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID
from recckpt.sparse.files.chain_table import open_table
from recckpt.sparse.files.id_check import Int64s
from recckpt.sparse.files.link_cursors import LinkCursor, bucket_ranges, ids_of
from recckpt.sparse.files.merged_rows import RangeRows, check_count
from recckpt.sparse.files.table_reader import TableReader

_CHUNK_ROWS = 2048  # that are compared at once: they stay in the caches of a core
_SLICE_ROWS = 1 << 18  # of a table, worth a thread

Advance = Callable[[int], object]


class Wish(NamedTuple):
    """How to compare."""

    tolerance: float
    top: int  # rows to name among those that moved most
    budget_bytes: int  # memory for rows, of all threads
    threads: int


def compare_table(before: OpenCheckpoint, after: OpenCheckpoint, name: str, wish: Wish, advance: Advance) -> TableDiff:
    """Return what became of a table that both have.

    Raises:
        CorruptCheckpointError: a file is damaged, or an id is twice in one checkpoint.
        CheckpointRemovedError: its writer removed it, and the storage is not a local file system.
    """
    entries = before.manifest.named_table(name), after.manifest.named_table(name)
    pairs = _comparable(*entries)
    slots = [pair[0].name for pair in pairs]
    chains = [open_table(side.links, name, slots).links for side in (before, after)]
    n_slices = max(1, min(wish.threads, sum(entry.rows for entry in entries) // _SLICE_ROWS))
    budget_bytes = wish.budget_bytes // n_slices
    borders = [N_BUCKETS * n // n_slices for n in range(n_slices + 1)]
    work = partial(_compare_slice, chains, pairs, wish._replace(budget_bytes=budget_bytes), advance)
    first, *others = run_all(work, list(pairwise(borders)), wish.threads)
    for other in others:
        first.merge(other)
    for chain, n_rows in zip(chains, first.n_rows, strict=True):
        check_count(chain[0], n_rows)
    return first.result(*entries)


def _comparable(before: TableEntry, after: TableEntry) -> list[Pair]:
    there = {slot.name: slot for slot in after.slots}
    pairs = [(slot, there[slot.name]) for slot in before.slots if slot.name in there]
    return [pair for pair in pairs if pair[0].shape == pair[1].shape]


def _compare_slice(
    chains: Sequence[Sequence[TableReader]],
    pairs: Sequence[Pair],
    wish: Wish,
    advance: Advance,
    buckets: tuple[int, int],
) -> Found:
    found = Found(pairs, wish.top)
    comparers = [SlotComparer(*pair, wish.tolerance) for pair in pairs]
    cursors = [[LinkCursor(link, buckets) for link in chain] for chain in chains]
    names = [ID, *(slot.name for slot in chains[1][0].specs)]
    in_order = [names.index(name) for name in (ID, *(pair[0].name for pair in pairs))]
    row_bytes = [8 + sum(slot.row_bytes for slot in chain[0].specs) for chain in chains]
    for part in bucket_ranges([link for chain in chains for link in chain], buckets, wish.budget_bytes * 3 // 4):
        sides = [RangeRows(cursor, part, lambda piece, rows: None) for cursor in cursors]
        at_before, at_after = _paired(sides[0].hashes, sides[1].hashes)
        found.n_both += len(at_before)
        for number, side in enumerate(sides):
            found.n_rows[number] += len(side.hashes)
            advance(len(side.hashes) * row_bytes[number])
        for chunk in _chunks(len(at_before)):
            rows = sides[0].take(at_before[chunk]), sides[1].take(at_after[chunk])
            _compare_rows(rows[0], [rows[1][column] for column in in_order], pairs, comparers, found)
    return found


def _compare_rows(
    before: Sequence[npt.NDArray[np.void]],
    after: Sequence[npt.NDArray[np.void]],
    pairs: Sequence[Pair],
    comparers: Sequence[SlotComparer],
    found: Found,
) -> None:
    ids = ids_of([list(before)])
    changed = np.zeros(len(ids), np.bool_)
    for column, (pair, comparer) in enumerate(zip(pairs, comparers, strict=True), start=1):
        moves = comparer.moves(before[column], after[column])
        changed[moves.rows] = True
        found.add(pair[0].name, ids, moves)
    found.n_changed += int(np.count_nonzero(changed))


def _chunks(n_rows: int) -> Iterator[slice]:
    return (slice(first, first + _CHUNK_ROWS) for first in range(0, n_rows, _CHUNK_ROWS))


def _paired(before: npt.NDArray[np.uint64], after: npt.NDArray[np.uint64]) -> tuple[Int64s, Int64s]:
    """Return where the ids that both sides have lie on the one and on the other, in the order of the first."""
    if np.array_equal(before, after):
        every = np.arange(len(before))
        return every, every
    order = np.argsort(after)
    ordered = after[order]
    if not len(ordered):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(ordered, before), len(ordered) - 1)
    both = np.flatnonzero(ordered[at] == before)
    return both, order[at[both]]
