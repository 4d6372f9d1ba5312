"""One table of two checkpoints, compared in bucket order within a bound on memory (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from recckpt.checkpoint.chain import OpenChain
from recckpt.format.buckets import N_BUCKETS
from recckpt.format.tables import TableEntry
from recckpt.inspect.diff.bucket_diff import BucketDiff, Pair
from recckpt.inspect.diff.distances import SlotComparer, differ
from recckpt.inspect.diff.pairing import paired
from recckpt.inspect.diff.result import TableDiff
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID, ID_SPEC
from recckpt.sparse.files.link_cursors import LinkCursor, Piece, bucket_ranges, ids_of, row_of
from recckpt.sparse.files.merged_rows import RangeRows, check_count
from recckpt.sparse.files.once import Int64s
from recckpt.sparse.files.table_reader import TableReader
from recckpt.types import SlotSpec

_RANGE_BYTES = 16 << 20  # of each link, that are read and compared at once: two batches, which stay in the caches
_CHUNK_BYTES = 4 << 20  # of a slot, that are compared at once
_LEAST_ROWS = 1 << 10  # of a chunk that is cut where batches end
_FEW = 0.5  # of the rows: where more have changed, to look for them by their bytes takes longer than it saves
_SLICE_ROWS = 1 << 20  # of a table, worth a thread
_MAPPED_THREADS = 2  # of files in memory: the batches of more drive each other out of the caches

Advance = Callable[[int], object]
Pairing = tuple[Int64s, Int64s]  # rows of both sides that have the same ids


class DiffOptions(NamedTuple):
    """How to compare."""

    tolerance: float
    top: int  # rows to name among those that moved most
    budget_bytes: int  # memory for rows, of all threads
    threads: int


def compare_table(before: OpenChain, after: OpenChain, name: str, options: DiffOptions, advance: Advance) -> TableDiff:
    """Return what became of a table that both have.

    Raises:
        CorruptCheckpointError: a file is damaged, or an id is twice in one checkpoint.
        CheckpointRemovedError: its writer removed it, and the storage is not a local file system.
    """
    entries = before.manifest.named_table(name), after.manifest.named_table(name)
    pairs = _comparable(*entries)
    slots = [pair[0].name for pair in pairs]
    chains = [side.table(name, slots).links for side in (before, after)]
    links = [link for chain in chains for link in chain]
    is_mapped = all(link.is_mapped for link in links)
    n_threads = min(options.threads, _MAPPED_THREADS) if is_mapped else options.threads
    n_slices = max(1, min(n_threads, sum(entry.rows for entry in entries) // _SLICE_ROWS))
    budget_bytes = options.budget_bytes * 3 // 4 // n_slices
    if is_mapped:  # else a batch on both sides of a border would be read again
        budget_bytes = min(budget_bytes, len(links) * _RANGE_BYTES)
    borders = [N_BUCKETS * n // n_slices for n in range(n_slices + 1)]
    work = partial(_compare_slice, chains, pairs, options._replace(budget_bytes=budget_bytes), advance)
    first, *others = run_all(work, list(pairwise(borders)), options.threads)
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
    options: DiffOptions,
    advance: Advance,
    buckets: tuple[int, int],
) -> BucketDiff:
    diff = BucketDiff(pairs, options.top)
    comparers = [SlotComparer(*pair, options.tolerance) for pair in pairs]
    cursors = [[LinkCursor(link, buckets) for link in chain] for chain in chains]
    columns = [(ID_SPEC, *chain[0].specs) for chain in chains]
    room = _Room(columns, pairs)
    has_bytes = all(before.dtype == after.dtype for before, after in pairs)
    few_changed = True
    for part in bucket_ranges([link for chain in chains for link in chain], buckets, options.budget_bytes):
        sides = [RangeRows(cursor, part, lambda piece, rows: None) for cursor in cursors]
        both = paired(sides[0].hashes, sides[1].hashes)
        n_both, n_changed = len(both[0]), diff.n_changed
        diff.n_both += n_both
        for number, side in enumerate(sides):
            diff.n_rows[number] += len(side.hashes)
            advance(len(side.hashes) * sum(slot.row_bytes for slot in columns[number]))
        different = _different(sides, both, room) if has_bytes and few_changed else both
        for _, before, after in room.chunks(sides, different):
            _compare_rows(before, after, pairs, comparers, diff)
        few_changed = diff.n_changed - n_changed <= _FEW * n_both
    return diff


def _different(sides: Sequence[RangeRows], both: Pairing, room: _Room) -> Pairing:
    """Return the rows, among those that both sides have, of which any byte differs."""
    differs = np.zeros(len(both[0]), np.bool_)
    for chunk, before, after in room.chunks(sides, both):
        for one, other in zip(before[1:], after[1:], strict=True):
            differs[chunk] |= differ(one, other)
    rows = np.flatnonzero(differs)
    return both[0][rows], both[1][rows]


def _compare_rows(
    before: Piece, after: Piece, pairs: Sequence[Pair], comparers: Sequence[SlotComparer], diff: BucketDiff
) -> None:
    ids = ids_of([before])
    changed = np.zeros(len(ids), np.bool_)
    for column, (pair, comparer) in enumerate(zip(pairs, comparers, strict=True), start=1):
        moves = comparer.moves(before[column], after[column])
        changed[moves.rows] = True
        diff.add(pair[0].name, ids, moves)
    diff.add_changed(int(np.count_nonzero(changed)))


class _Room:
    """Memory for the rows of a chunk, on both sides: kept, since the first touch of memory is slow."""

    def __init__(self, columns: Sequence[Sequence[SlotSpec]], pairs: Sequence[Pair]) -> None:
        self._rows = max(1, _CHUNK_BYTES // max(slot.row_bytes for side in columns for slot in side))
        self._room = [[np.empty(self._rows, row_of(slot)) for slot in side] for side in columns]
        names = [slot.name for slot in columns[1]]
        self._in_order = [names.index(name) for name in (ID, *(pair[0].name for pair in pairs))]

    def chunks(self, sides: Sequence[RangeRows], at: Pairing) -> Iterator[tuple[slice, Piece, Piece]]:
        """Yield rows of both sides, which are good until the next: ids, and the slots in the order of the first."""
        for chunk in self._cut(sides, at):
            before, after = (side.take(rows[chunk], own) for side, rows, own in zip(sides, at, self._room, strict=True))
            yield chunk, before, [after[column] for column in self._in_order]

    def _cut(self, sides: Sequence[RangeRows], at: Pairing) -> Iterator[slice]:
        """Cut rows into chunks, also where a batch of the files ends on either side: within one, rows are not copied.

        Not where few rows lie between the ends, as where the links of a chain are merged.
        """
        n_rows = len(at[0])
        ends = np.concatenate([side.piece_ends(rows) for side, rows in zip(sides, at, strict=True)])
        batch_ends = ends.tolist() if len(ends) * _LEAST_ROWS <= n_rows else []
        cuts = sorted({0, n_rows, *range(0, n_rows, self._rows), *batch_ends})
        return (slice(first, last) for first, last in pairwise(cuts))
