"""A live table with its door: what a saver takes as a table."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.live.store import LiveStore
from recckpt.types import EMBEDDING, LiveTable, check_table_name


class AttachedTable:
    """A live table whose changes are announced from now on, until this is closed or garbage.

    Args:
        live: the table.
        is_announced: as of :class:`LiveStore`.

    Attributes:
        name: in checkpoints.
        live: the table.
        store: its rows.
    """

    def __init__(self, live: LiveTable, *, is_announced: bool = True) -> None:
        self.name, self.live = check_table_name(live.name), live
        self.store = LiveStore(live, is_announced=is_announced)
        self.close = weakref.finalize(self, live.attach(self.store))
        self.close.atexit = False

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
            LiveTableError: there is no such row.
        """
        self.check(ids.numpy())
        self.store.write(ids.numpy() - self.store.ids.first, values)

    def check(self, ids: npt.NDArray[np.int64]) -> None:
        """Refuse ids that have no row here.

        Raises:
            LiveTableError: there are some; says how many, and the first.
        """
        first, n = self.store.ids.first, len(self)
        outside = ids[(ids < first) | (ids >= first + n)]
        if len(outside):
            raise LiveTableError(
                f"table {self.name!r}: found {len(outside)} ids without a row, such as {int(outside[0])}, expected ids "
                f"from {first} to {first + n - 1}"
            )

    def clear(self) -> None:
        """Refuse: the rows of a live table are as many as its owner has made."""
        raise LiveTableError(f"table {self.name!r}: its rows are not recckpt's to drop; load into it instead")
