"""A live table whose rows belong to ids, with its door."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.errors import LiveTableError
from recckpt.live.attached import AttachedTable
from recckpt.live.keyed_store import KeyedStore
from recckpt.live.keyed_types import IdMap, KeyedLiveTable
from recckpt.sparse.table.placed_rows import IdPlaces
from recckpt.types import EMBEDDING, SlotSpec

Int64s = npt.NDArray[np.int64]


class AttachedKeyedTable(AttachedTable):
    """A keyed live table; arguments as of :class:`AttachedTable`."""

    live: KeyedLiveTable

    def __init__(
        self, live: KeyedLiveTable, *, is_announced: bool = True, says_what_changes: bool = True, audit: int = 0
    ) -> None:
        super().__init__(live, is_announced=is_announced, says_what_changes=says_what_changes, audit=audit)
        self._keyed = KeyedStore(live, self.rows)
        self._is_as_loaded = False

    @property
    def store(self) -> KeyedStore:
        """Its rows by their ids."""
        return self._keyed

    @property
    def specs(self) -> tuple[SlotSpec, ...]:
        """The slots of an id in a checkpoint: those of its row, and what else is known of it."""
        return self.store.slots

    @property
    def n_saved(self) -> int:
        """How many ids this rank saves."""
        return len(self.store)

    def has_all_of(self, n_rows: int) -> bool:
        """Say whether all ids and rows are as the last load found them in a checkpoint."""
        return self._is_as_loaded

    def embeddings(self) -> Tensor:
        """Return a copy of the values of the ids."""
        return self.store.columns[EMBEDDING].blocks[0]

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """Copies of the other slots."""
        return {name: column.blocks[0] for name, column in self.store.columns.items() if name != EMBEDDING}

    def write(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Set slots of the rows of ids.

        Raises:
            LiveTableError: an id has no row, or what is to be set is known of the id and not of its row.
        """
        placed = self.store.placed()
        at = np.searchsorted(placed.ids, ids.numpy())
        at[at == len(placed.ids)] = 0
        n_unknown = int((placed.ids[at] != ids.numpy()).sum()) if len(placed.ids) else len(ids)
        if n_unknown or values.keys() & placed.meta.keys():
            raise LiveTableError(
                f"table {self.name!r}: found {n_unknown} ids without a row, and the slots {sorted(values)}, expected "
                f"ids that have one, and none of {sorted(placed.meta)}: load a checkpoint to give ids rows"
            )
        self.rows.write(placed.places[at], values)

    def place(
        self, ids: Int64s, values: Mapping[str, Tensor], *, drops: bool
    ) -> tuple[IdPlaces, dict[str, Tensor], Tensor]:
        """Return ids in ascending order with their meta, the slots of their rows, and the rows, -1 where there is none.

        Raises:
            LiveTableError: there are more ids than can have a row, and it is not asked for that some are dropped.
        """
        order = np.argsort(ids)
        values = {name: tensor[torch.from_numpy(order)] for name, tensor in values.items()}
        names = self.live.id_map().meta.keys()
        asked = IdPlaces(ids[order], order, {name: values.pop(name).numpy() for name in names})
        meta = {name: torch.from_numpy(column) for name, column in asked.meta.items()}
        return asked, values, self.live.place(torch.from_numpy(asked.ids), meta, drops=drops)

    def replace(self, ids: Int64s, values: Mapping[str, Tensor], *, drops: bool) -> int:
        """Make these the ids, all different, with these rows and meta; return how many of them got no row.

        Raises:
            LiveTableError: there are more than can have one, and it is not asked for that some are dropped. Nothing
                has changed then.
        """
        asked, values, rows = self.place(ids, values, drops=drops)
        meta = {name: torch.from_numpy(column) for name, column in asked.meta.items()}
        taken = rows >= 0
        at = rows[taken]
        self.rows.write(at.numpy(), {name: tensor[taken] for name, tensor in values.items()})
        of_taken = {name: column[taken] for name, column in meta.items()}
        self.live.take_ids(IdMap(torch.from_numpy(asked.ids)[taken], at, of_taken))
        now = self.store.placed()
        kept = taken.numpy()
        saved = IdPlaces(asked.ids[kept], at.numpy(), {name: column[kept] for name, column in asked.meta.items()})
        n_dropped = len(ids) - len(at)
        self._is_as_loaded = now.is_same(saved) and (n_dropped == 0 or self.live.n_ids is None)
        return n_dropped
