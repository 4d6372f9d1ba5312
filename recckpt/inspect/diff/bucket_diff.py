"""What was found in rows of a table, counted as they pass (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recckpt.format.tables import TableEntry
from recckpt.inspect.diff.distances import Moves
from recckpt.inspect.diff.result import MovedRow, SlotDiff, TableDiff
from recckpt.inspect.spread import Floats, Histogram
from recckpt.sparse.files.once import Int64s
from recckpt.types import EMBEDDING, SlotSpec

Pair = tuple[SlotSpec, SlotSpec]  # a slot, before and after


class BucketDiff:
    """What was found in some buckets of a table."""

    def __init__(self, pairs: Sequence[Pair], top: int) -> None:
        self.n_rows = [0, 0]
        self.n_changed = self.n_both = 0
        self.changed = {pair[0].name: 0 for pair in pairs}
        self.l2 = {name: Histogram() for name in self.changed}
        self.cosine = {name: Histogram() for name in self.changed}
        self._top = top
        self._moved: list[tuple[Int64s, Floats, Floats]] = []

    def add(self, name: str, ids: Int64s, moves: Moves) -> None:
        """Count moves of a slot of some rows."""
        if len(moves.rows):
            self.changed[name] += len(moves.rows)
            self.l2[name].add(moves.l2)
            self.cosine[name].add(moves.cosine[~np.isnan(moves.cosine)])
        if name == EMBEDDING and len(moves.rows) and self._top:
            self._keep_top(ids[moves.rows], moves.l2, moves.cosine)

    def add_changed(self, n_rows: int) -> None:
        """Count rows of which a slot has changed."""
        self.n_changed += n_rows

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
        """Add what was found in other buckets."""
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
        """Return all of it."""
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
    """Return the slots of both sides, with the differences of those that could be compared."""
    one, other = ({slot.name: slot for slot in slots} for slots in (before, after))
    return tuple(_slot(name, one.get(name), other.get(name), diff) for name in {**one, **other})


def _slot(name: str, before: SlotSpec | None, after: SlotSpec | None, diff: BucketDiff | None) -> SlotDiff:
    kinds = (None if before is None else before.kind, None if after is None else after.kind)
    if diff is None or name not in diff.changed:
        return SlotDiff(name, *kinds, None, None, None)
    return SlotDiff(name, *kinds, diff.changed[name], diff.l2[name].spread(), diff.cosine[name].spread())
