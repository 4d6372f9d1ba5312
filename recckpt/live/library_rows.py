"""A hash table of another library as a table that a saver takes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recckpt.format.buckets import Slice
from recckpt.live.library_store import LibraryStore
from recckpt.live.library_types import LibraryTable
from recckpt.types import EMBEDDING, SlotSpec, check_table_name


class LibraryRows:
    """A hash table of another library, by the protocol of tables that are saved.

    Args:
        library: the table.

    Attributes:
        name: in checkpoints.
        library: the table.
        store: what it exports.
    """

    def __init__(self, library: LibraryTable) -> None:
        self.name, self.library, self.store = check_table_name(library.name), library, LibraryStore(library)

    def __len__(self) -> int:
        return len(self.library)

    @property
    def slice(self) -> Slice | None:
        """The buckets of its ids on this rank; None for all."""
        own: Slice | None = getattr(self.library, "slice", None)
        return own

    @property
    def specs(self) -> tuple[SlotSpec, ...]:
        """The slots."""
        return self.store.slots

    def has_all_of(self, n_rows: int) -> bool:
        """Say whether a load of a checkpoint of so many rows has left all of them here; not known on several ranks."""
        return self.slice is None and len(self) == n_rows

    def ids(self) -> Tensor:
        """Return the ids of now; exports them."""
        return torch.from_numpy(self.store.export(None, ()).ids)

    def embeddings(self) -> Tensor:
        """Return the values of now; exports them."""
        return self.store.export(None, {EMBEDDING}).columns[EMBEDDING].blocks[0]

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """The other slots of now; exports them."""
        others = {slot.name for slot in self.specs} - {EMBEDDING}
        return {name: column.blocks[0] for name, column in self.store.export(None, others).columns.items()}

    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        """Set the rows of ``ids``, adding those that are new, at whatever epoch; as of :meth:`clear`."""
        self.store.replaced()
        self.library.insert(ids, {EMBEDDING: embeddings, **(slots or {})})

    def clear(self) -> None:
        """Drop all rows; the next save holds all that are there then, unless a restore makes them those of a base."""
        self.store.replaced()
        self.library.clear()
