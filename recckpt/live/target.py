"""A live table during a load: rows go where they lie."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.live.attached import AttachedTable
from recckpt.sparse.files.owners import IdSpan, OwnedIds
from recckpt.sparse.files.rows_aside import Values, fitted_to
from recckpt.sparse.files.table_target import LoadTarget

Int64s = npt.NDArray[np.int64]
_PIECE_ROWS = 1 << 17  # that are given first values at a time


class LiveTarget(LoadTarget):
    """A live table: it has all its rows already, and those that a checkpoint lacks stay as they are."""

    takes_slots = True

    def __init__(self, table: AttachedTable) -> None:
        super().__init__(table)
        self._attached = table

    def begin(self) -> None:
        """Bring the memory up to date."""
        self._attached.prepare()
        self._attached.rows.wait()  # a load writes in streams of its own threads
        first, end = self._attached.rows.box.rows
        self.was_empty = first == end

    @property
    def owned_ids(self) -> OwnedIds:
        """The numbers of the rows that this rank has, of copies all of them."""
        return IdSpan.of_rows(*self._attached.rows.box.rows, self._attached.live.n_rows)

    def placed(self, ids: Int64s) -> Int64s | None:
        """Return at which places there are ids that have a row; None for all."""
        has_row = (ids >= 0) & (ids < self._attached.live.n_rows)
        return None if has_row.all() else np.flatnonzero(has_row)

    def check_ids(self, least: int, greatest: int) -> None:
        """Refuse a checkpoint with ids in this range if there is no row of the first or the last.

        Raises:
            LiveTableError: there is none.
        """
        self._attached.check_ids(least, greatest)

    def clear(self) -> None:
        """Keep the rows: they are all written, or stay."""

    def begin_anew(self, slots: Collection[str]) -> None:
        """Give slots of the optimizer the values of its first step, in all rows of this rank."""
        store = self._attached.rows
        n_rows = store.box.rows[1] - store.box.rows[0]
        first = float(self._attached.live.settings().get("initial_accumulator_value", 0.0))
        for name in sorted(store.columns.keys() & slots):
            spec = store.columns[name].spec
            for begin in range(0, n_rows, _PIECE_ROWS):
                rows = np.arange(begin, min(begin + _PIECE_ROWS, n_rows))
                shape, dtype = (len(rows), *spec.shape), getattr(torch, spec.dtype)
                store.write(rows, {name: torch.full(shape, first, dtype=dtype, device="cpu")})

    def merge(self, ids: Int64s, values: Values, dtypes: Mapping[str, str]) -> int:
        """Set rows where they lie."""
        return self.write_present(ids, values)

    def write_present(self, ids: Int64s, values: Values) -> int:
        """Set slots of rows where they lie."""
        store = self._attached.rows
        rows = ids - store.box.rows[0]
        values = {name: self._own_columns(name, each) for name, each in values.items()}
        store.write(rows, fitted_to(store.columns, rows, values))
        return len(ids)

    def erase(self, ids: Int64s) -> None:
        """Keep the rows of ids: a live table has all its rows always."""

    def finish(self, *, drops: bool = False) -> int:
        """Let the owner know, and no later look take what was loaded for a change that was not announced."""
        self._attached.rows.wait()
        self._attached.live.finish({}, {})
        self._attached.look()
        return 0

    def undo(self, *, is_cleared: bool) -> None:
        """Keep what was written: what was there before is gone."""

    def _own_columns(self, slot: str, values: Tensor) -> Tensor:
        """Return what this rank has of whole rows."""
        box = self._attached.rows.box
        if not box.columns:
            return values
        begin, end = box.columns[box.part]
        return values[:, begin:end] if self._attached.rows.columns[slot].spec.shape else values[:, box.part]
