"""Compares one table of two checkpoints, in bucket order, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.chain import OpenChain
from recckpt.format.buckets import N_BUCKETS
from recckpt.format.tables import TableEntry
from recckpt.inspect.diff_result import MovedRow, SlotDiff, TableDiff
from recckpt.inspect.distances import SlotComparer
from recckpt.inspect.spread import Floats, Histogram
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.arrow_format import ID, ID_SPEC
from recckpt.sparse.files.merged_rows import LinkCursor, RangeRows, bucket_ranges, check_count, current_rows
from recckpt.sparse.files.pieces import TO_BUCKET, Hashes, Int64s, row_of
from recckpt.sparse.files.table_reader import TableReader
from recckpt.types import EMBEDDING, SlotSpec

_BUDGET_BYTES = 256 << 20  # memory for rows, shared by all threads
_RANGE_BYTES = 64 << 20  # bytes of each link to compare at once, if links are mapped
_CHUNK_BYTES = 1 << 20  # bytes of a slot to check and compare at once, within the caches of a core
_LEAST_ROWS = 1 << 10  # chunks end at batch ends only if these are at least this many rows apart on average
_FEW = 0.5  # up to this share of changed rows, comparing bytes first saves time
_SLICE_ROWS = 1 << 20  # least rows of a table for each thread
_MAPPED_THREADS = 2  # for mapped files: with more threads their batches evict each other from the caches

Advance = Callable[[int], object]
Pair = tuple[SlotSpec, SlotSpec]  # a slot before and after
Pairing = tuple[Int64s, Int64s]  # row numbers, on each side, of the same ids
Bytes = npt.NDArray[np.void]
Column = Callable[[int, Bytes | None], Bytes]  # column number on one side, memory -> its values
Columns = Callable[[int], tuple[Bytes, Bytes]]  # column number before -> its values on both sides


def compare_table(
    before: OpenChain, after: OpenChain, name: str, *, tolerance: float, top: int, threads: int, advance: Advance
) -> TableDiff:
    """Compare a table that both checkpoints have; CorruptCheckpointError if an id occurs twice in one of them."""
    entries = before.manifest.named_table(name), after.manifest.named_table(name)
    others = {slot.name: slot for slot in entries[1].slots}
    there = [(slot, others[slot.name]) for slot in entries[0].slots if slot.name in others]
    pairs = [(slot, other) for slot, other in there if slot.shape == other.shape]
    slots = [slot.name for slot, _ in pairs]
    chains = [side.table(name, slots).links for side in (before, after)]
    links = [link for chain in chains for link in chain]
    is_mapped = all(link.is_mapped for link in links)
    n_threads = min(threads, _MAPPED_THREADS) if is_mapped else threads
    n_slices = max(1, min(n_threads, sum(entry.rows for entry in entries) // _SLICE_ROWS))
    budget_bytes = _BUDGET_BYTES * 3 // 4 // n_slices
    if is_mapped:  # without maps, a batch on both sides of a border would be read twice
        budget_bytes = min(budget_bytes, len(links) * _RANGE_BYTES)
    borders = [N_BUCKETS * n // n_slices for n in range(n_slices + 1)]

    def compare(buckets: tuple[int, int]) -> BucketDiff:
        diff = BucketDiff(pairs, tolerance, top)
        diff.compare_slice(chains, buckets, budget_bytes, advance)
        return diff

    first, *more = run_all(compare, list(pairwise(borders)), threads)
    for each in more:
        first.merge(each)
    for chain, n_rows in zip(chains, first.n_rows, strict=True):
        check_count(chain[0], n_rows)
    return first.result(*entries)


class _Room:
    """Memory for one column of a chunk of rows, on both sides; reused, because first access to new memory is slow."""

    def __init__(self, columns: Sequence[Sequence[SlotSpec]], pairs: Sequence[Pair]) -> None:
        self._rows = max(1, _CHUNK_BYTES // max(slot.row_bytes for side in columns for slot in side))
        self._room = [[np.empty(self._rows, row_of(slot)) for slot in side] for side in columns]
        names = [slot.name for slot in columns[1]]
        self._in_order = [names.index(name) for name in (ID, *(pair[0].name for pair in pairs))]

    def chunks(self, sides: Sequence[RangeRows], at: Pairing) -> Iterator[tuple[slice, Columns]]:
        """Yield a chunk, and a function that maps a column's index (0: ids, then the pairs) to its rows on both sides.

        The rows are valid until the next chunk. Chunks also end where batches of the files end, because rows within a
        batch need no copy; except if batches are small, as in merged chains.
        """
        n_rows = len(at[0])
        ends = np.concatenate([side.piece_ends(rows) for side, rows in zip(sides, at, strict=True)])
        batch_ends = ends.tolist() if len(ends) * _LEAST_ROWS <= n_rows else []
        cuts = sorted({0, n_rows, *range(0, n_rows, self._rows), *batch_ends})
        for chunk in (slice(first, last) for first, last in pairwise(cuts)):
            one, other = (side.at(rows[chunk]) for side, rows in zip(sides, at, strict=True))

            def column(number: int, one: Column = one, other: Column = other) -> tuple[Bytes, Bytes]:
                there = self._in_order[number]
                return one(number, self._room[0][number]), other(there, self._room[1][there])

            yield chunk, column


class BucketDiff:
    def __init__(self, pairs: Sequence[Pair], tolerance: float, top: int) -> None:
        self._pairs = pairs
        self._comparers = {pair[0].name: SlotComparer(*pair, tolerance) for pair in pairs}
        self.n_rows = [0, 0]
        self.n_changed = self.n_both = 0
        self.changed = {pair[0].name: 0 for pair in pairs}
        self.l2 = {name: Histogram() for name in self.changed}
        self.cosine = {name: Histogram() for name in self.changed}
        self._top = top
        self._moved: list[tuple[Int64s, Floats, Floats]] = []

    def compare_slice(
        self,
        chains: Sequence[Sequence[TableReader]],
        buckets: tuple[int, int],
        budget_bytes: int,
        advance: Advance,
    ) -> None:
        cursors = [[LinkCursor(link, buckets) for link in chain] for chain in chains]
        columns = [(ID_SPEC, *chain[0].specs) for chain in chains]
        room = _Room(columns, self._pairs)
        has_bytes = all(before.dtype == after.dtype for before, after in self._pairs)
        few_changed = True
        for part in bucket_ranges([link for chain in chains for link in chain], buckets, budget_bytes):
            sides = [RangeRows(current_rows(cursor, part)) for cursor in cursors]
            both = paired(sides[0].hashes, sides[1].hashes)
            n_both, n_changed = len(both[0]), self.n_changed
            self.n_both += n_both
            for number, side in enumerate(sides):
                self.n_rows[number] += len(side.hashes)
                advance(len(side.hashes) * sum(slot.row_bytes for slot in columns[number]))
            rows = both
            if has_bytes and few_changed:  # compare values only of rows in which a byte differs
                differs = np.zeros(n_both, np.bool_)
                for chunk, column in room.chunks(sides, both):
                    for number, comparer in enumerate(self._comparers.values(), start=1):
                        differs[chunk.start + comparer.differing(*column(number))] = True
                rows = both[0][differs], both[1][differs]
            for _, column in room.chunks(sides, rows):
                self._compare_rows(column)
            for side in sides:
                side.end()
            few_changed = self.n_changed - n_changed <= _FEW * n_both

    def _compare_rows(self, column: Columns) -> None:
        ids = column(0)[0].view(np.int64)
        changed = np.zeros(len(ids), np.bool_)
        for number, (name, comparer) in enumerate(self._comparers.items(), start=1):
            rows, l2, cosine = comparer.moves(*column(number))
            if not len(rows):
                continue
            changed[rows] = True
            self.changed[name] += len(rows)
            self.l2[name].add(l2)
            self.cosine[name].add(cosine[~np.isnan(cosine)])
            if name == EMBEDDING and self._top:
                self._keep_top(ids[rows], l2, cosine)
        self.n_changed += int(np.count_nonzero(changed))

    def _keep_top(self, ids: Int64s, l2: Floats, cosine: Floats) -> None:
        least = self._moved[0][1] if self._moved else None
        far = np.where(np.isnan(l2), np.inf, l2)
        if least is not None and len(least) == self._top:
            kept = np.flatnonzero(far >= np.where(np.isnan(least), np.inf, least)[-1])
            if not len(kept):
                return
            ids, l2, cosine = ids[kept], l2[kept], cosine[kept]
        self._moved.append((ids, l2, cosine))
        self._shorten()

    def _shorten(self) -> None:
        ids, l2, cosine = (np.concatenate(columns) for columns in zip(*self._moved, strict=True))
        order = np.lexsort((ids, np.where(np.isnan(l2), -np.inf, -l2)))[: self._top]
        self._moved = [(ids[order], l2[order], cosine[order])]

    def merge(self, other: BucketDiff) -> None:
        self.n_rows = [one + more for one, more in zip(self.n_rows, other.n_rows, strict=True)]
        self.n_changed, self.n_both = self.n_changed + other.n_changed, self.n_both + other.n_both
        for name in self.changed:
            self.changed[name] += other.changed[name]
            self.l2[name].merge(other.l2[name])
            self.cosine[name].merge(other.cosine[name])
        self._moved += other._moved
        if self._moved:
            self._shorten()

    def result(self, before: TableEntry, after: TableEntry) -> TableDiff:
        slots = slots_of(before.slots, after.slots, self)
        n_before, n_after = self.n_rows
        is_same = n_before == n_after == self.n_both and all(slot.is_same for slot in slots)
        counts = (n_after - self.n_both, n_before - self.n_both, self.n_changed, self.n_both - self.n_changed)
        moved = tuple(
            MovedRow(int(id_), float(l2), float(cosine))
            for ids, distances, cosines in self._moved
            for id_, l2, cosine in zip(ids, distances, cosines, strict=True)
        )
        return TableDiff(before.name, "same" if is_same else "changed", n_before, n_after, *counts, slots, moved)


def slots_of(before: Sequence[SlotSpec], after: Sequence[SlotSpec], diff: BucketDiff | None) -> tuple[SlotDiff, ...]:
    one, other = ({slot.name: slot for slot in slots} for slots in (before, after))
    diffs = []
    for name in {**one, **other}:
        kinds = (one[name].kind if name in one else None, other[name].kind if name in other else None)
        if diff is None or name not in diff.changed:
            diffs.append(SlotDiff(name, *kinds, None, None, None))
        else:
            diffs.append(SlotDiff(name, *kinds, diff.changed[name], diff.l2[name].spread(), diff.cosine[name].spread()))
    return tuple(diffs)


def paired(before: Hashes, after: Hashes) -> tuple[Int64s, Int64s]:
    """Return the positions, on each side, of the ids that both sides have, in the order of the first side.

    On each side hashes are distinct and ordered by bucket. Within a bucket, rows of one run keep their order while no
    row is deleted, and new rows come after them. So each row is first looked up at its own place in the bucket; only
    rows not found there are sorted and searched.
    """
    if not len(before) or not len(after):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # For each row: the row after it that has the same offset in its bucket, or any other row.
    buckets = before >> TO_BUCKET
    firsts = np.flatnonzero(np.concatenate([[True], buckets[1:] != buckets[:-1]]))
    shifts = np.searchsorted(after >> TO_BUCKET, buckets[firsts]) - firsts
    places = np.arange(len(before)) + np.repeat(shifts, np.diff(firsts, append=len(before)))
    at = np.minimum(places, len(after) - 1)
    is_found = after[at] == before
    both = np.flatnonzero(is_found)
    at = at[both]
    if len(both) == min(len(before), len(after)):
        return both, at
    is_left = np.ones(len(after), np.bool_)
    is_left[at] = False
    rows, left = np.flatnonzero(~is_found), np.flatnonzero(is_left)
    left = left[np.argsort(after[left])]
    ordered, sought = after[left], before[rows]
    places = np.minimum(np.searchsorted(ordered, sought), len(ordered) - 1)
    more = np.flatnonzero(ordered[places] == sought)
    if not len(more):
        return both, at
    both, at = np.concatenate([both, rows[more]]), np.concatenate([at, left[places[more]]])
    order = np.argsort(both)
    return both[order], at[order]
