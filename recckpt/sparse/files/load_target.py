"""Where the rows of a load go: into the table, or aside until all of them are there."""

from __future__ import annotations

import threading

from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.table import HashTable
from recckpt.types import HashTable as AnyTable


class LoadTarget:
    """One table during a load.

    A table of ours that is empty, or to be emptied, gets all its rows at once when the load is over: they are gathered
    in a store of their own, which nobody else sees. Other tables change batch by batch.

    Args:
        table: ours or foreign.
    """

    def __init__(self, table: AnyTable) -> None:
        self.table = table
        self.was_empty = len(table) == 0
        self.lock = threading.RLock()
        self._aside: RowStore | None = None
        if self.was_empty and isinstance(table, HashTable):
            self._aside = table.store.emptied()

    @property
    def store(self) -> RowStore:
        """The store to fill, of a table of ours."""
        assert isinstance(self.table, HashTable)
        return self.table.store if self._aside is None else self._aside

    @property
    def is_aside(self) -> bool:
        """Whether nobody else sees the store."""
        return self._aside is not None

    def __len__(self) -> int:
        return len(self.store) if isinstance(self.table, HashTable) else len(self.table)

    def clear(self) -> None:
        """Drop all rows; those of a table that has some at once, since there is never memory for both."""
        if len(self.table):
            self.table.clear()
        if isinstance(self.table, HashTable):
            self._aside = self.table.store.emptied()

    def finish(self) -> None:
        """Let the table have what was gathered aside."""
        if isinstance(self.table, HashTable) and self._aside is not None:
            self.table.store.adopt(self._aside)

    def undo(self, *, is_cleared: bool) -> None:
        """Empty a table that was empty before, or that was to be emptied anyway; others keep what they have taken."""
        if len(self.table) and (self.was_empty or is_cleared):
            self.table.clear()
