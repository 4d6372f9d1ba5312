"""The rows of a table, counted as they pass: norms, look-ups, ages, and what is wrong with values (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.format.tables import TableEntry
from recckpt.inspect.norms import squares
from recckpt.inspect.report.learning import NormsByCount
from recckpt.inspect.report.result import Distribution, LargeRow, TableHealth
from recckpt.inspect.spread import Floats, Histogram, Int64s
from recckpt.policies.evict import COUNT, LAST_STEP, LAST_TIME
from recckpt.types import EMBEDDING, SlotSpec

OPTIMIZER = "sparse_"  # part of the format: how the slots of optimizers begin
EXPLODING = 100  # times the median of the norms
BUSY_SHARE = 0.8  # of the look-ups

_NAMED_ROWS = 5
_BARS = 40
_DAY_SEC = 86_400

Array = npt.NDArray[Any]
Rows = Int64s | slice  # of arrays: their numbers, or slice(None) for all


class TakenAt(NamedTuple):
    """When the checkpoint was taken."""

    step: int | None
    time: float | None  # in seconds since 1970


class RowCounts:
    """What some rows of a table come to; not thread-safe."""

    def __init__(self, entry: TableEntry, clock: TakenAt) -> None:
        self._entry, self._clock = entry, clock
        self._optimizer = [slot.name for slot in entry.slots if slot.name.startswith(OPTIMIZER)]
        self._numbers = {name: Histogram() for name in ("norms", "counts", "ages_steps", "ages_days")}
        self._not_finite: dict[str, int] = {}
        self._not_finite_ids: list[int] = []
        self._largest: list[LargeRow] = []
        self._has_counts = any(slot.name == COUNT and _is_tracked(slot) for slot in entry.slots)
        self._by_count = NormsByCount()
        self.n_rows = self._dead = self._untrained = 0

    def add(self, ids: Int64s, columns: Mapping[str, Array], rows: Rows = slice(None)) -> None:
        """Count some of the rows: columns of all slots, each of shape (rows, values).

        Few rows are meant to be left out: sums are made of all, which takes less than to copy those that count.
        """
        ids = ids[rows]
        if not len(ids):
            return
        self.n_rows += len(ids)
        norms: Floats | None = None
        for slot in self._entry.slots:
            values = columns[slot.name]
            if slot.name == EMBEDDING:
                norms = self._add_embeddings(ids, values, rows)
            elif _is_tracked(slot):
                self._add_tracked(slot.name, values[rows, 0])
            elif values.dtype.kind == "f" and not np.isfinite(values).all():
                self._add_not_finite(slot.name, ids, squares(values)[rows])
        untrained = _zeros([columns[name] for name in self._optimizer], rows) if self._optimizer else None
        self._untrained += 0 if untrained is None else len(untrained)
        if norms is not None and self._has_counts:
            self._by_count.add(columns[COUNT][rows, 0], norms, _among(untrained, rows))

    def _add_embeddings(self, ids: Int64s, values: Array, rows: Rows) -> Floats | None:
        """Count the norms, and return them; None where embeddings are integers."""
        if values.dtype.kind != "f":  # such as counts of ids that wait for a row
            return None
        sums = squares(values)[rows]
        self._add_not_finite(EMBEDDING, ids, sums)
        norms = np.sqrt(sums, dtype=np.float64)
        self._dead += len(norms) - int(np.count_nonzero(norms))
        if not self._has_counts:  # else they are counted by look-ups
            self._numbers["norms"].add(norms)
        self._keep_largest(ids, norms)
        return norms

    def _add_not_finite(self, slot: str, ids: Int64s, sums: Array) -> None:
        """Count the rows whose sum of squares is NaN: a value is not finite."""
        if np.isnan(sums.max()):
            wrong = np.flatnonzero(np.isnan(sums))
            self._not_finite[slot] = self._not_finite.get(slot, 0) + len(wrong)
            self._name_not_finite(map(int, ids[wrong[:_NAMED_ROWS]]))

    def _name_not_finite(self, ids: Any) -> None:
        self._not_finite_ids = list(dict.fromkeys([*self._not_finite_ids, *ids]))[:_NAMED_ROWS]

    def _add_tracked(self, name: str, values: Array) -> None:
        if name == COUNT:
            self._numbers["counts"].add(np.maximum(values, 0).astype(np.float64))
        elif name == LAST_STEP and self._clock.step is not None:
            self._numbers["ages_steps"].add(np.maximum(self._clock.step - values, 0).astype(np.float64))
        elif name == LAST_TIME and self._clock.time is not None:
            self._numbers["ages_days"].add(np.maximum(self._clock.time - values, 0.0) / _DAY_SEC + 0.0)  # never -0.0

    def _keep_largest(self, ids: Int64s, norms: Floats) -> None:
        least = self._largest[-1].norm if len(self._largest) == _NAMED_ROWS else -1.0
        if norms.max() <= least:  # which NaN is not
            return
        rows = np.flatnonzero(norms > least)
        if len(rows) > _NAMED_ROWS:
            rows = rows[np.argpartition(norms[rows], -_NAMED_ROWS)[-_NAMED_ROWS:]]
        if len(rows):
            self._merge_largest([LargeRow(int(ids[row]), float(norms[row])) for row in rows])

    def _merge_largest(self, rows: list[LargeRow]) -> None:
        self._largest = sorted([*self._largest, *rows], key=lambda row: (-row.norm, row.id))[:_NAMED_ROWS]

    def merge(self, other: RowCounts) -> None:
        """Count what another has counted."""
        self.n_rows += other.n_rows
        self._dead += other._dead
        self._untrained += other._untrained
        self._by_count.merge(other._by_count)
        for name, histogram in self._numbers.items():
            histogram.merge(other._numbers[name])
        for slot, n_rows in other._not_finite.items():
            self._not_finite[slot] = self._not_finite.get(slot, 0) + n_rows
        self._name_not_finite(other._not_finite_ids)
        self._merge_largest(other._largest)

    def result(self, damage: tuple[str, ...]) -> TableHealth:
        """Return all of it."""
        numbers = {**self._numbers, "norms": self._by_count.norms()} if self._has_counts else self._numbers
        columns = {name: _column(histogram) for name, histogram in numbers.items()}
        norms = columns["norms"]
        median = norms.spread.quantiles.get(0.5, 0.0) if norms else 0.0
        exploding = numbers["norms"].n_above(EXPLODING * median) if median > 0 else 0
        return TableHealth(
            self._entry.name,
            self._entry.rows,
            self._entry.row_bytes,
            rows_read=self.n_rows,
            damage=damage,
            **columns,
            not_finite=dict(self._not_finite),
            not_finite_ids=tuple(self._not_finite_ids),
            dead=self._dead if norms else None,
            exploding=exploding if norms else None,
            untrained=self._untrained if self._optimizer else None,
            busy=self._numbers["counts"].n_that_carry(BUSY_SHARE) if columns["counts"] else None,
            largest=tuple(self._largest),
            by_count=self._by_count.result(has_optimizer=bool(self._optimizer)),
            is_live=self._entry.live is not None,
        )


def _is_tracked(slot: SlotSpec) -> bool:
    return slot.name in (COUNT, LAST_STEP, LAST_TIME) and not slot.shape


def _zeros(columns: Sequence[Array], rows: Rows) -> Int64s:
    """Return the numbers of those of the rows of which all values are zero, in all columns."""
    left = np.flatnonzero(columns[0][rows, 0] == 0)  # few: the first value tells most rows
    left = left if isinstance(rows, slice) else rows[left]
    for values in columns:
        left = left[(values[left] == 0).all(axis=1)]
    return left


def _among(numbers: Int64s | None, rows: Rows) -> Int64s | None:
    """Return which of some rows have these numbers, which are among theirs and in order."""
    return numbers if numbers is None or isinstance(rows, slice) else np.searchsorted(rows, numbers)


def _column(histogram: Histogram) -> Distribution | None:
    spread = histogram.spread()
    return None if spread is None else Distribution(spread, histogram.bars(_BARS))
