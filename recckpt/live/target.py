"""A live table during a load: rows go where they lie."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from recckpt.live.attached import AttachedTable
from recckpt.sparse.files.rows_aside import Values, fitted_to
from recckpt.sparse.files.table_target import LoadTarget

Int64s = npt.NDArray[np.int64]


class LiveTarget(LoadTarget):
    """A live table: it has all its rows already, and those that a checkpoint lacks stay as they are."""

    takes_slots = True

    def __init__(self, table: AttachedTable) -> None:
        super().__init__(table)
        self._attached = table

    def begin(self) -> None:
        """Bring the memory up to date."""
        self._attached.prepare()
        self.was_empty = self._first == self._end

    def owned(self, ids: Int64s) -> Int64s | None:
        """Return at which places there are ids of rows that this rank has, or that no rank has; None for all."""
        return _places((ids >= self._first) & (ids < self._end) | ~self._has_row(ids))

    def placed(self, ids: Int64s) -> Int64s | None:
        """Return at which places there are ids that have a row; None for all."""
        return _places(self._has_row(ids))

    @property
    def owns_all(self) -> bool:
        """Whether this rank has all rows."""
        return self._end - self._first == self._attached.live.n_rows

    def check(self, ids: Int64s) -> None:
        """Refuse ids that have no row.

        Raises:
            LiveTableError: there are some.
        """
        self._attached.check(ids)

    def clear(self) -> None:
        """Keep the rows: they are all written, or stay."""

    def merge(self, ids: Int64s, values: Values, dtypes: Mapping[str, str]) -> int:
        """Set rows where they lie."""
        return self.write_present(ids, values)

    def write_present(self, ids: Int64s, values: Values) -> int:
        """Set slots of rows where they lie."""
        store = self._attached.store
        rows = ids - self._first
        store.write(rows, fitted_to(store.columns, rows, values))
        return len(ids)

    def erase(self, ids: Int64s) -> None:
        """Keep the rows of ids: a live table has all its rows always."""

    def finish(self) -> None:
        """Let no later look take what was loaded for a change that nobody announced."""
        self._attached.look()

    def undo(self, *, is_cleared: bool) -> None:
        """Keep what was written: what was there before is gone."""

    @property
    def _first(self) -> int:
        return self._attached.store.box.rows[0]

    @property
    def _end(self) -> int:
        return self._attached.store.box.rows[1]

    def _has_row(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        return (ids >= 0) & (ids < self._attached.live.n_rows)


def _places(is_taken: npt.NDArray[np.bool_]) -> Int64s | None:
    return None if is_taken.all() else np.flatnonzero(is_taken)
