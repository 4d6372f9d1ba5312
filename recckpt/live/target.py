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
        rows = ids - store.ids.first
        store.write(rows, fitted_to(store.saved_columns, rows, values))
        return len(ids)

    def erase(self, ids: Int64s) -> None:
        """Keep the rows of ids: a live table has all its rows always."""

    def undo(self, *, is_cleared: bool) -> None:
        """Keep what was written: what was there before is gone."""
