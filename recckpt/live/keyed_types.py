"""What a live table by ids is: rows of a fixed memory that belong to ids which come and go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from recckpt.sparse.files.owners import OwnedIds
from recckpt.types import LiveTable


@dataclass(frozen=True)
class IdMap:
    """Which rows of a box belong to which ids: int64 ``ids``, ascending, their ``rows``, and int64 slots of them."""

    ids: Tensor
    rows: Tensor
    meta: Mapping[str, Tensor]


@runtime_checkable
class KeyedLiveTable(LiveTable, Protocol):
    """A live table whose rows belong to ids that come and go; it is saved by id, those that went as deletes.

    Attributes:
        n_ids: how many ids there can be over all ranks; None where those that have no place are left out.
    """

    n_ids: int | None

    def id_map(self) -> IdMap:
        """Return the ids of now; asked at every save. Tensors that change no more."""

    @property
    def owned_ids(self) -> OwnedIds:
        """Which ids this rank takes in a load."""

    def place(self, ids: Tensor, meta: Mapping[str, Tensor], *, drops: bool) -> Tensor:
        """Return the rows that ids are to have, -1 for none; LiveTableError where that drops some, and may not."""

    def take_ids(self, id_map: IdMap) -> None:
        """Make these the ids, once a load has written their rows."""
