"""Which rows of a batch, and whether a dense tensor, meet a condition (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.dense.tensors import DenseTensors, StoredTensor
from recckpt.format.tables import TableEntry
from recckpt.inspect.norms import squares
from recckpt.inspect.over_time.condition import MAX, NORM, NOT_FINITE, OF_TENSORS, Condition
from recckpt.inspect.slabs import is_number, numbers_between, slabs_of
from recckpt.sparse.files.arrow_format import column_values, ids_in
from recckpt.types import EMBEDDING, SlotSpec

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Hit:
    """A row, or a tensor, that meets a condition.

    Attributes:
        name: of the table, or of the tensor.
        id: of the row; None of a tensor.
        values: what was compared -> its number.
    """

    name: str
    id: int | None
    values: Mapping[str, float]


class RowMatcher:
    """Looks at rows of one table.

    Attributes:
        slots: names of those that have to be read; None where no row of the table can meet the condition.
    """

    def __init__(self, condition: Condition, entry: TableEntry) -> None:
        self._condition, self._entry = condition, entry
        self._specs = {slot.name: slot for slot in entry.slots}
        chosen = [name for name in self._specs if condition.slot is not None and condition.means("slot", name)]
        self._of = {NOT_FINITE: chosen or list(self._specs)}
        self._of |= dict.fromkeys((NORM, MAX), chosen or [EMBEDDING])
        self.slots = self._needed(chosen)

    def _needed(self, chosen: list[str]) -> list[str] | None:
        condition, names = self._condition, dict[str, None]()
        if not condition.is_of_rows or not condition.means("table", self._entry.name):
            return None
        if condition.slot is not None and not chosen:
            return None
        for each in condition.comparisons:
            if each.name in OF_TENSORS:
                names |= dict.fromkeys(self._of[each.name])
            elif not is_scalar(self._specs.get(each.name)):
                return None
            else:
                names[each.name] = None
        return [name for name in self._specs if name in names]  # in the order of the table

    def matches(self, batch: Any) -> tuple[Array, Mapping[str, Array]]:
        """Return the ids of the rows that meet the condition, and what was compared of them: name -> numbers.

        Args:
            batch: an Arrow batch of the id and the slots that have to be read, one row at least.
        """
        ids: Array = ids_in(batch)
        meets = np.ones(len(ids), np.bool_) if self._condition.id is None else ids == self._condition.id
        values: dict[str, Array] = {}
        for each in self._condition.comparisons if meets.any() else ():
            values[each.name] = self._measured(each.name, batch)
            with np.errstate(invalid="ignore"):
                meets = meets & np.asarray(each.holds(values[each.name]), np.bool_)
        rows = np.flatnonzero(meets)
        return ids[rows], {name: numbers[rows] for name, numbers in values.items()}

    def _measured(self, name: str, batch: Any) -> Array:
        if name not in OF_TENSORS:
            return self._column(name, batch)[:, 0]
        columns = [self._column(slot, batch) for slot in self._of[name]]
        if name == NOT_FINITE:
            counts = (np.count_nonzero(~np.isfinite(c), axis=1) for c in columns if c.dtype.kind == "f")
            return np.asarray(sum(counts, start=np.zeros(batch.num_rows, np.int64)))
        if name == MAX:
            return np.asarray(np.max([_largest(column) for column in columns], axis=0))
        return np.asarray(np.sqrt(np.sum([squares(column) for column in columns], axis=0), dtype=np.float64))

    def _column(self, name: str, batch: Any) -> Array:
        """Return a slot, shape (rows, values)."""
        return column_values(batch.column(name), self._specs[name]).reshape(batch.num_rows, -1)


def _largest(column: Array) -> Array:
    """Return the largest absolute value of each row, NaN where there is one."""
    return np.asarray(np.max(np.abs(column.astype(np.float64)), axis=1, initial=0.0))


def is_scalar(slot: SlotSpec | None) -> bool:
    """Say whether a slot is there, and is one number of each row."""
    return slot is not None and not slot.shape


def compared_of_tensor(condition: Condition, dense: DenseTensors, tensor: StoredTensor) -> Mapping[str, float] | None:
    """Return what was compared of a dense tensor where it meets a condition, else None.

    Raises:
        CorruptCheckpointError: its bytes are not those that were saved.
    """
    if not is_number(tensor.dtype):
        return None
    values = _measures(dense, tensor) if condition.comparisons else {}
    if not all(each.holds(values[each.name]) for each in condition.comparisons):
        return None
    return {each.name: values[each.name] for each in condition.comparisons}


def _measures(dense: DenseTensors, tensor: StoredTensor) -> dict[str, float]:
    n_wrong, largest, total = 0, 0.0, 0.0
    with np.errstate(all="ignore"):
        for begin, end in slabs_of(tensor):
            slab = np.abs(numbers_between(dense, tensor, begin, end)).astype(np.float64).reshape(1, -1)
            n_wrong += int(np.count_nonzero(~np.isfinite(slab)))
            largest = float(np.maximum(largest, slab.max()))
            total += float(squares(slab)[0])
    return {NOT_FINITE: n_wrong, MAX: largest, NORM: float(np.sqrt(total))}
