"""What a load takes of the links of a chain, for which of its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from recckpt.format.catalog import Batch, Part
from recckpt.format.tables import TableEntry
from recckpt.policies.evict import LAST_TIME
from recckpt.sparse.files.ages import Ages
from recckpt.sparse.files.deal import TableRequest
from recckpt.sparse.files.link_batches import LinkBatches
from recckpt.sparse.files.owners import SliceOwners
from recckpt.sparse.files.row_filter import RowFilter
from recckpt.sparse.files.table_target import LoadTarget
from recckpt.types import SavableTable


@dataclass(frozen=True)
class TableLoad:
    """One table to fill from the table ``entry`` of a checkpoint."""

    target: LoadTarget
    entry: TableEntry
    slots: Mapping[str, str]  # here -> there; slots left out start at their initial values in new rows
    with_rows: bool  # whether ids are taken; otherwise only the slots of ids that the table has
    clear: bool  # whether the table has no other rows in the end; otherwise rows are merged in, and the loaded ones win
    where: RowFilter
    is_update: bool  # whether the table holds what older links give, and nothing has changed since it was loaded
    ages: Ages
    skips_outside: bool = False  # whether ids that the table cannot have a row of are left out; otherwise refused

    @property
    def table(self) -> SavableTable:
        """The table to fill."""
        return self.target.table

    def wants(self, batch: Batch) -> bool:
        """Say whether the table may own rows of a batch."""
        return self.target.slice is None or self.target.slice.meets(*batch.buckets)

    def share(self, batch: Batch) -> float:
        """Return about which share of the rows of a batch the table owns."""
        owned = self.target.slice
        return 1.0 if owned is None else SliceOwners({0: [owned]}).shares(batch).get(0, 0.0)

    @property
    def request(self) -> TableRequest:
        """What the rank takes of the table of the checkpoint, as other ranks get it."""
        owned = self.target.slice
        slices = None if owned is None or self.target.owns_all else (owned,)
        return TableRequest(self.columns, self.row_bytes, slices)

    @property
    def empties(self) -> bool:
        """Whether the table is emptied first."""
        return self.with_rows and self.clear and not self.is_update

    @property
    def erases(self) -> bool:
        """Whether rows go that are deleted, or that the filter no longer keeps."""
        return self.with_rows and self.clear and self.is_update

    def take_history(self) -> None:
        """Let the table, which is loaded, go on from the evictions of the checkpoint, if it has become its table.

        Without an event time it also has to know which dates of its rows are those of a clock.
        """
        if self.empties and self.ages.is_resumed:
            self.target.take_eviction(self.entry.evicted_to)
        if LAST_TIME in self.slots:
            self.target.take_clock(self.entry.clock)

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Slot here -> its dtype in the table that was saved, where the checkpoint has stored it in a narrower one."""
        dtypes = self.entry.reduced.dtypes if self.entry.reduced else {}
        return {slot: dtypes[there] for slot, there in self.slots.items() if there in dtypes}

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

    Attributes:
        number: of the checkpoint among those that are loaded, and of the link in its chain: the same on all ranks.
        tables: what is filled.
        batches: what it is filled with.
        fetch: copies files to this host, by their paths, before they are read; None to read them where they lie.
    """

    number: tuple[int, int]
    tables: Sequence[TableLoad]
    batches: LinkBatches
    fetch: Callable[[Iterable[str]], object] | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows that the tables own, about, in the columns that are read."""
        return sum(
            round(batch.rows * load.share(batch)) * load.row_bytes
            for part in self._parts()
            for batch in part.batches
            for load in self.takers(batch)
            if part.holds == "rows"
        )

    def takers(self, batch: Batch) -> list[TableLoad]:
        """Return the loads that may take something of a batch."""
        return [load for load in self.tables if load.entry.name == batch.table and load.wants(batch)]

    def _parts(self) -> Iterator[Part]:
        return (part for parts in self.batches.parts.values() for part in parts)
