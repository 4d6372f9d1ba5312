"""A live table with its door: what a saver takes as a table."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.live.column_slots import whole_spec
from recckpt.live.store import LiveStore
from recckpt.sparse.files.reduced_rows import file_order
from recckpt.sparse.table.store import Store
from recckpt.types import EMBEDDING, LiveTable, RowShare, SlotSpec, WatchedTable, check_table_name

Int64s = npt.NDArray[np.int64]


class AttachedTable:
    """A live table whose changes are announced from now on, while this is referenced and not closed.

    Args:
        live: the table.
        is_announced: as of :class:`LiveStore`, as the others.
        says_what_changes: whether marks are kept of the rows that change.
        audit: at every how manyth save they are compared with fingerprints.

    Attributes:
        name: in checkpoints.
        live: the table.
        rows: its rows by their numbers.
    """

    def __init__(
        self, live: LiveTable, *, is_announced: bool = True, says_what_changes: bool = True, audit: int = 0
    ) -> None:
        self.name, self.live = check_table_name(live.name), live
        self.rows = LiveStore(live, is_announced=is_announced, says_what_changes=says_what_changes, audit=audit)
        # Not at the end of this object, which may come in the middle of a step: hooks cannot be removed while they are
        # called. Those without a door do nothing.
        self._detach = live.attach(self.rows)
        self._is_closed = False

    @property
    def store(self) -> Store:
        """Its rows by the ids that they are saved by: their numbers."""
        return self.rows

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
            raise LiveTableError(
                f"table {self.name!r}: it is closed, so its changes are not noted any more; call live_tables, "
                "and make another saver"
            )
        self.live.prepare()

    def look(self) -> None:
        """Take all rows for changed, and fail snapshots, where something wrote that was not announced."""
        if isinstance(self.live, WatchedTable):
            self.live.look()

    @property
    def share(self) -> RowShare:
        """The rows that this rank saves, by their ids."""
        return RowShare(*self.rows.box.own_rows, self.live.n_rows)

    @property
    def n_saved(self) -> int:
        """How many rows this rank saves."""
        begin, end = self.rows.box.own_rows
        return end - begin

    @property
    def specs(self) -> tuple[SlotSpec, ...]:
        """The slots of a row in a checkpoint, which has all its columns; as they stand there."""
        specs = [whole_spec(column.spec, self.rows.box) for column in self.rows.saved_columns.values()]
        return file_order(specs)

    def __len__(self) -> int:
        return len(self.store)

    def ids(self) -> Tensor:
        """Return the numbers of the rows of which a save reads values here."""
        return self.store.ids.to_tensor(len(self))

    def has_all_of(self, n_rows: int) -> bool:
        """Say whether a checkpoint of so many rows has all of the table, and a load of it leaves nothing otherwise."""
        return n_rows == self.live.n_rows

    def embeddings(self) -> Tensor:
        """Return these values."""
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
        self.rows.write(ids.numpy() - self.rows.box.rows[0], values)

    def check_ids(self, least: int, greatest: int) -> None:
        """Refuse a checkpoint with ids from ``least`` to ``greatest`` if one of them has no row on any rank.

        Raises:
            LiveTableError: there is none.
        """
        n_rows = self.live.n_rows
        if least < 0 or greatest >= n_rows:
            raise LiveTableError(
                f"table {self.name!r}: found ids from {least} to {greatest}, expected ids from 0 to {n_rows - 1}: make "
                "the table larger, or drop those without a row by 'out_of_range': 'skip' in load_conf"
            )

    def clear(self) -> None:
        """Refuse: the rows of a live table are as many as its owner has made."""
        raise LiveTableError(f"table {self.name!r}: its rows are not recckpt's to drop; load into it instead")
