"""A live table with its door: what a saver takes as a table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.live.store import LiveStore
from recckpt.types import EMBEDDING, IdRange, LiveTable, WatchedTable, check_table_name

Int64s = npt.NDArray[np.int64]


class AttachedTable:
    """A live table whose changes are announced from now on, for as long as somebody has this, or until it is closed.

    Args:
        live: the table.
        is_announced: as of :class:`LiveStore`, as the others.
        says_what_changes: whether marks are kept of the rows that change.
        audit: at every how manyth save they are compared with fingerprints.

    Attributes:
        name: in checkpoints.
        live: the table.
        store: its rows.
    """

    def __init__(
        self, live: LiveTable, *, is_announced: bool = True, says_what_changes: bool = True, audit: int = 0
    ) -> None:
        self.name, self.live = check_table_name(live.name), live
        self.store = LiveStore(live, is_announced=is_announced, says_what_changes=says_what_changes, audit=audit)
        # Not at the end of this object, which may come in the middle of a step: hooks cannot be removed while they are
        # called. Those without a door do nothing.
        self._detach = live.attach(self.store)
        self._is_closed = False

    def close(self) -> None:
        """End the announcements; the table can be saved and loaded no more."""
        if not self._is_closed:
            self._is_closed = True
            self._detach()

    def prepare(self) -> None:
        """Bring the memory up to date, in the thread that calls the saver, before it is read or written.

        Raises:
            LiveTableError: this is closed, or the table cannot be read now.
        """
        if self._is_closed:
            raise LiveTableError(f"table {self.name!r}: it was closed, and nobody notes its changes; call live_tables")
        self.live.prepare()

    def look(self) -> None:
        """Take all rows for changed, and fail snapshots, where something wrote that was not announced."""
        if isinstance(self.live, WatchedTable):
            self.live.look()

    @property
    def share(self) -> IdRange:
        """The rows that this rank saves, by their ids."""
        first = self.store.ids.first
        return IdRange(first, first + len(self.store), self.live.n_rows)

    def __len__(self) -> int:
        return len(self.store)

    def ids(self) -> Tensor:
        """Return the numbers of the rows that this rank saves."""
        return self.store.ids.to_tensor(len(self))

    def embeddings(self) -> Tensor:
        """Return their values."""
        return self.store.saved_columns[EMBEDDING].blocks[0]

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """The slots of their optimizer."""
        return {name: column.blocks[0] for name, column in self.store.saved_columns.items() if name != EMBEDDING}

    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        """Set the rows of ``ids``.

        Raises:
            LiveTableError: there is no such row.
        """
        self.write(ids, {EMBEDDING: embeddings, **(slots or {})})

    def write(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Set slots of the rows of ``ids``, all different, where they lie; from any thread.

        Raises:
            LiveTableError: there is no such row on this rank.
        """
        first, end = self.store.box.rows
        self._refuse_outside(ids.numpy(), first, end)
        self.store.write(ids.numpy() - first, values)

    def check(self, ids: Int64s) -> None:
        """Refuse ids that have no row on any rank.

        Raises:
            LiveTableError: there are some; says how many, and the first.
        """
        self._refuse_outside(ids, 0, self.live.n_rows)

    def _refuse_outside(self, ids: Int64s, first: int, end: int) -> None:
        outside = ids[(ids < first) | (ids >= end)]
        if len(outside):
            raise LiveTableError(
                f"table {self.name!r}: found {len(outside)} ids without a row, such as {int(outside[0])}, expected ids "
                f"from {first} to {end - 1}: make the table larger, or drop them by 'out_of_range': 'skip' in load_conf"
            )

    def clear(self) -> None:
        """Refuse: the rows of a live table are as many as its owner has made."""
        raise LiveTableError(f"table {self.name!r}: its rows are not recckpt's to drop; load into it instead")
