"""Rows that another library exports when it is asked to: they lie nowhere that recckpt could read by itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.marks import DeltaSource
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.sparse.table.store import Store
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowsOfMoment:
    """Rows of one moment, copied out of the library.

    Attributes:
        ids: all different.
        columns: their slots by name, on the CPU.
        epoch: from which on to ask for what is written later.
    """

    ids: Int64s
    columns: Mapping[str, Column]
    epoch: int


class ExportedStore(Store):
    """Rows that a library has. The columns of this have none: rows are there once they are exported."""

    @abstractmethod
    def export(self, since: int | None, slots: Collection[str] | None = None) -> RowsOfMoment:
        """Return all rows, or those that were written since an epoch; some of their slots, or all.

        Ids that went since the export before are noted in all marks. Training stands still meanwhile.
        """


class ExportedRows(Snapshot):
    """The rows of a table of a library; :meth:`export` is called before training goes on, and nothing is read before.

    Args:
        name: the table.
        n_rows: how many there are.
        slots: that are exported.
        export: exports them.
    """

    is_in_place = False  # they are read from a copy
    n_kept = 0  # rows that were copied aside

    def __init__(self, name: str, n_rows: int, slots: tuple[SlotSpec, ...], export: Callable[[], RowsOfMoment]) -> None:
        self.name, self.n_rows, self.slots = name, n_rows, slots
        self._export = export
        self._exported: RowsOfMoment | None = None

    def export(self) -> None:
        """Take the rows, unless they are taken."""
        if self._exported is None:
            self.take(self._export())

    def take(self, exported: RowsOfMoment) -> None:
        """Take rows that are exported already."""
        self._exported = exported

    @property
    def exported_ids(self) -> Int64s | None:
        """The ids in the order of the rows, also once this is closed; None where they were not exported."""
        return None if self._exported is None else self._exported.ids

    @property
    def epoch(self) -> int:
        """From which on to ask for what is written later; 0, which is all, where nothing was exported."""
        return 0 if self._exported is None else self._exported.epoch

    def read_ids(self, rows: npt.NDArray[Any], target: Bytes) -> None:
        """Copy the ids of rows."""
        np.take(self._taken.ids, rows, out=target.view(np.int64))

    def read_slots(self, rows: npt.NDArray[Any], targets: Mapping[str, Bytes], *, is_last: bool) -> None:
        """Copy rows of some slots into a target each."""
        for name, target in targets.items():
            self._taken.columns[name].gather_into(rows, target)

    def narrow(self, bits: Bytes) -> None:
        """Do nothing: the copy has all rows."""

    def fail(self, error: Exception) -> None:
        """Do nothing: what training does to the table is not done to the copy."""

    def check(self) -> None:
        """Do nothing: nothing fails."""

    def close(self) -> None:
        """Drop the copy, but for the ids."""
        if self._exported is not None:
            self._exported = replace(self._exported, columns={})

    @property
    def _taken(self) -> RowsOfMoment:
        if self._exported is None:
            raise RuntimeError(f"table {self.name!r}: its rows are not exported")
        return self._exported


class ExportedDelta(DeltaSource):
    """Rows that a library has exported because they have changed, as rows 0 to ``n_rows - 1``.

    Args:
        changed: the rows.
        gone: ids that may have gone; some may be among the rows.
        n_all: rows of the table.
    """

    def __init__(self, changed: ExportedRows, gone: Int64s, n_all: int) -> None:
        super().__init__(changed, lambda: np.zeros(0, np.uint8), (gone,))
        self.n_all = n_all

    def narrow(self) -> None:
        """Do nothing: there are no other rows."""

    @cached_property
    def rows(self) -> Int64s:
        """All of them."""
        return np.arange(self.snapshot.n_rows)
