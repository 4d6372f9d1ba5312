"""Selects what a save writes of a table when some rows or slots are left out, or stored in another dtype."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from recckpt.format.tables import Narrowed, Reduced
from recckpt.policies.row_filter import RowFilter, numbers
from recckpt.sparse.files.table_rows import StillTable, TableSource
from recckpt.sparse.table.marks import DeltaSource
from recckpt.sparse.table.snapshot import Snapshot, SnapshotIds
from recckpt.types import SlotSpec

Bytes = npt.NDArray[np.uint8]
_PIECE = 1 << 15  # values: few enough for the CPU cache, and for torch not to use several threads
Int64s = npt.NDArray[np.int64]
_PIECE_ROWS = 1 << 17


def narrow(table: str, values: Bytes, slot: SlotSpec, target: Bytes, stored: SlotSpec) -> float:
    """Write a slot's values to ``target`` in a narrower dtype, rounded to nearest; return the largest rounding error.

    Infinities and NaN are kept. Raises ValueError if a finite value overflows the dtype.
    """
    wide = torch.from_numpy(values).view(getattr(torch, slot.dtype))
    narrowed = torch.from_numpy(target).view(getattr(torch, stored.dtype))
    worst = 0.0
    for begin in range(0, len(wide), _PIECE):
        piece, to = wide[begin : begin + _PIECE], narrowed[begin : begin + _PIECE]
        to.copy_(piece)
        error = (to.to(piece.dtype) - piece).abs_()
        largest = float(error.max())
        if not math.isfinite(largest):
            is_finite = torch.isfinite(piece)
            beyond = piece[is_finite & ~torch.isfinite(error)]
            if len(beyond):
                raise ValueError(
                    f"table {table!r}, {slot.name!r}: found {float(beyond[0]):g}, expected numbers within the range of "
                    f"{stored.dtype}, which 'store' asks for: store the slot as "
                    f"{'bfloat16' if stored.dtype == 'float16' else 'float32'}, or in its own dtype"
                )
            largest = float(torch.where(is_finite, error, 0.0).max())
        worst = max(worst, largest)
    return worst


@dataclass(frozen=True)
class TableChoice:
    """The slots of a table to save, with their stored dtypes and in file order, and the filter of its rows."""

    slots: tuple[SlotSpec, ...]
    where: RowFilter | None
    reduced: Reduced

    @property
    def read(self) -> frozenset[str]:  # slots to save, and slots that the filter's conditions need
        return frozenset(slot.name for slot in self.slots) | (self.where.slots if self.where else frozenset())

    @property
    def row_bytes(self) -> int:  # including the id
        return 8 + sum(slot.row_bytes for slot in self.slots)


class ReducedSource:
    """The chosen slots and rows of a source, numbered 0 to ``n_rows - 1``.

    Rows are chosen at the first access. Conditions are evaluated on all rows of the table, also for a delta, because a
    checkpoint states how many rows it has. In a delta, a changed row that fails the conditions becomes a delete, since
    the base may have it. An unchanged row gives the same result as at the last save.
    """

    def __init__(self, source: TableSource, choice: TableChoice) -> None:
        self.name, self.slots = source.name, choice.slots
        self._source, self._choice = source, choice
        self._errors = dict.fromkeys(choice.reduced.dtypes, 0.0)
        stored = {slot.name: slot for slot in choice.slots if slot.name in self._errors}
        self._narrowed = {slot.name: (slot, stored[slot.name]) for slot in source.slots if slot.name in stored}
        self._lock, self._scratch = threading.Lock(), threading.local()

    @cached_property
    def _rows(self) -> _Rows | None:
        if self._choice.where is None:
            return None
        changed = self._source if isinstance(self._source, DeltaSource) else None
        whole = self._source if changed is None else changed.snapshot
        assert isinstance(whole, Snapshot | StillTable)
        mask = _mask(whole, self._choice.where)
        n_all, kind = int(np.count_nonzero(mask)), np.uint32 if len(mask) < 1 << 32 else np.int64
        if changed is None:
            pieces = range(0, len(mask), _PIECE_ROWS)
            kept = [(np.flatnonzero(mask[at : at + _PIECE_ROWS]) + at).astype(kind) for at in pieces]
            return _Rows(np.concatenate([np.empty(0, kind), *kept]), np.empty(0, np.int64), n_all, len(mask) - n_all)
        changed.narrow()
        is_kept = mask[changed.rows]
        ids = changed.ids.gather(np.flatnonzero(~is_kept)).numpy()
        return _Rows(np.flatnonzero(is_kept), ids, n_all, len(mask) - n_all)

    @property
    def n_rows(self) -> int:
        return self._source.n_rows if self._rows is None else len(self._rows.kept)

    @property
    def n_all(self) -> int:
        """Number of chosen rows of the table, including unchanged ones."""
        return self._source.n_all if self._rows is None else self._rows.n_all

    @property
    def ids(self) -> SnapshotIds:
        return SnapshotIds(lambda rows, target: self._source.ids.gather_into(self._of_source(rows), target))

    @property
    def n_kept(self) -> int:
        return self._source.n_kept

    @property
    def reduced(self) -> Reduced:
        """What was left out of the rows that have been read so far."""
        dtypes = self._choice.reduced.dtypes
        narrowed = tuple(Narrowed(slot, dtype, self._errors[slot]) for slot, dtype in dtypes.items())
        n_left_out = 0 if self._rows is None else self._rows.n_left_out
        return replace(self._choice.reduced, rows=n_left_out, narrowed=narrowed)

    def deletes(self) -> Int64s:
        """Return the distinct ids that a delta deletes, including changed rows that the filter excludes."""
        deleted = self._source.deletes()
        return deleted if self._rows is None else np.concatenate([deleted, self._rows.gone])

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy values as :meth:`TableSource.read_slots` does, in the stored dtypes.

        Raises:
            ValueError: a number overflows the dtype in which it is stored.
        """
        rows, wide = self._of_source(rows), dict[str, Bytes]()
        for name in targets.keys() & self._narrowed.keys():
            n_bytes = len(rows) * self._narrowed[name][0].row_bytes
            kept: Bytes | None = self._scratch.__dict__.get(name)  # a buffer of this thread, reused
            if kept is None or len(kept) < n_bytes:
                kept = self._scratch.__dict__[name] = np.empty(n_bytes, np.uint8)
            wide[name] = kept[:n_bytes]
        self._source.read_slots(rows, {**targets, **wide}, is_last=is_last)
        for name, values in wide.items():
            slot, stored = self._narrowed[name]
            error = narrow(self.name, values, slot, targets[name], stored)
            with self._lock:
                self._errors[name] = max(self._errors[name], error)

    def close(self) -> None:
        self._source.close()

    def _of_source(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return rows if self._rows is None else self._rows.kept[rows]


class _Rows(NamedTuple):
    kept: npt.NDArray[Any]
    gone: Int64s
    n_all: int
    n_left_out: int


def _mask(table: Snapshot | StillTable, where: RowFilter) -> npt.NDArray[np.bool_]:
    specs = [slot for slot in table.slots if slot.name in where.slots]
    mask = np.empty(table.n_rows, np.bool_)
    for begin in range(0, table.n_rows, _PIECE_ROWS):
        rows = np.arange(begin, min(table.n_rows, begin + _PIECE_ROWS))
        read = {slot.name: np.empty(len(rows) * slot.row_bytes, np.uint8) for slot in specs}
        table.read_slots(rows, read, is_last=False)
        tensors = {slot.name: torch.from_numpy(read[slot.name]).view(getattr(torch, slot.dtype)) for slot in specs}
        values = {name: numbers(tensor) for name, tensor in tensors.items()}
        mask[begin : begin + len(rows)] = where.keeps(table.ids.gather(rows).numpy(), values)
    return mask
