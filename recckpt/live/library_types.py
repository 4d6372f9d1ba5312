"""What a hash table of another library is to recckpt: it exports rows, and knows which have changed since a moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from recckpt.types import SlotSpec


@dataclass(frozen=True)
class LibraryExport:
    """What a library has exported of a table, all of one moment.

    Attributes:
        rows: batches of int64 ids, shape (n,), and their slots by name, each (n, *shape of the slot), on any device;
            no id twice.
        gone: int64 ids that were evicted or erased since the export before, whoever asked for that one; ids that are
            there again may be among them, and so may others that the table has not.
        epoch: what to ask for next to get what is written from this moment on.
    """

    rows: Iterable[tuple[Tensor, Mapping[str, Tensor]]]
    gone: Tensor
    epoch: int


@runtime_checkable
class LibraryTable(Protocol):
    """A hash table of another library, whose rows come and go by key: given to ``live_tables(adapters=...)``.

    Made for dynamicemb, whose scores may be times, and for HierarchicalKV, whose scores begin with an epoch. Its
    methods are called in the thread that calls the saver; no row may change meanwhile.

    Attributes:
        name: in checkpoints.
    """

    name: str

    def __len__(self) -> int:
        """Return how many ids the table has."""

    def slots(self) -> Sequence[SlotSpec]:
        """Return the slots of a row, ``embedding`` among them."""

    def export(self, since: int | None) -> LibraryExport:
        """Return all rows, or those that were written since an epoch began; some more do no harm.

        What is read and cleared by it is not lost where a save fails: recckpt keeps what is ``gone`` for every saver.

        Args:
            since: the ``epoch`` of an export before; None for all rows.
        """

    def insert(self, ids: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Set rows in a load, int64 ids and slots on the CPU, adding those that are new."""

    def clear(self) -> None:
        """Drop all rows."""
