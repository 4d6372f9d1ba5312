"""What a load takes of the links of a chain, and the tables it fills: in place, or aside until all rows are there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recckpt.format import layout
from recckpt.format.buckets import Slice
from recckpt.format.catalog import Batch, Part
from recckpt.format.tables import TableEntry
from recckpt.policies.evict import LAST_TIME
from recckpt.sparse.files.ages import Ages
from recckpt.sparse.files.link_batches import LinkBatches
from recckpt.sparse.files.row_filter import RowFilter
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.table import HashTable
from recckpt.types import SavableTable


class LoadTarget:
    """One table during a load.

    A table of ours that is empty, or to be emptied, gets all its rows at once when the load is over: they are gathered
    in a store of their own, which is not seen yet. Other tables change batch by batch.
    """

    def __init__(self, table: SavableTable) -> None:
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
        """Whether the store is not seen by others yet."""
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


@dataclass(frozen=True)
class TableLoad:
    """One table to fill from the table ``entry`` of a checkpoint."""

    table: SavableTable
    entry: TableEntry
    slots: Mapping[str, str]  # here -> there; slots left out start at their initial values in new rows
    with_rows: bool  # whether ids are taken; otherwise only the slots of ids that the table has
    clear: bool  # whether the table has no other rows in the end; otherwise rows are merged in, and the loaded ones win
    where: RowFilter
    is_update: bool  # whether the table holds what older links give, and nothing has changed since it was loaded
    ages: Ages

    def wants(self, batch: Batch) -> bool:
        """Say whether the table may own rows of a batch."""
        owned: Slice | None = getattr(self.table, "slice", None)
        return owned is None or owned.meets(*batch.buckets)

    @property
    def empties(self) -> bool:
        """Whether the table is emptied first."""
        return self.with_rows and self.clear and not self.is_update

    @property
    def erases(self) -> bool:
        """Whether rows go that are deleted, or that the filter no longer keeps."""
        return self.with_rows and self.clear and self.is_update

    def take_eviction(self) -> None:
        """Let a table that has become that of the checkpoint, at its step, evict what it would have evicted."""
        if self.empties and isinstance(self.table, HashTable) and self.ages.is_resumed:
            self.table.evicted_to = self.entry.evicted_to

    def take_clock(self) -> None:
        """Let a table without an event time know which dates of its rows are those of a clock."""
        if isinstance(self.table, HashTable) and LAST_TIME in self.slots:
            self.table.note_clock(self.entry.clock)

    @property
    def columns(self) -> frozenset[str]:
        """The slots in the checkpoint that have to be read."""
        return frozenset(self.slots.values()) | self.where.slots

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the columns that are read, the id included."""
        return 8 + sum(slot.row_bytes for slot in self.entry.slots if slot.name in self.columns)


@dataclass(frozen=True)
class LinkLoad:
    """What is taken of a link; a table of it may fill several.

    The links of a chain have the same :class:`TableLoad` for a table, as far as they count.
    """

    tables: Sequence[TableLoad]
    batches: LinkBatches

    @property
    def parts(self) -> Sequence[Sequence[Part]]:
        """By shard, those that may hold their rows or deletes."""
        return self.batches.parts if self.tables else ()

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows that are read, in the columns that are read."""
        return sum(
            batch.rows * load.row_bytes
            for part in self._parts()
            for batch in part.batches
            for load in self.takers(batch)
            if part.holds == "rows"
        )

    def takers(self, batch: Batch) -> list[TableLoad]:
        """Return the loads that may take something of a batch."""
        return [load for load in self.tables if load.entry.name == batch.table and load.wants(batch)]

    def wanted_files(self) -> Iterator[str]:
        """Yield the files that have something for the tables, by their slices."""
        for part in self._parts():
            if any(map(self.takers, part.batches)):
                yield layout.join(self.batches.directory, part.file)

    def _parts(self) -> Iterator[Part]:
        return (part for parts in self.parts for part in parts)
