"""What a load takes of the links of a chain, for which of its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from recckpt.format.catalog import Batch, Part, id_ranges
from recckpt.format.tables import TableEntry
from recckpt.policies.evict import LAST_TIME
from recckpt.sparse.files.ages import Ages
from recckpt.sparse.files.batch_rows import BatchRows
from recckpt.sparse.files.column_ranges import Ranges, regrouped
from recckpt.sparse.files.deal import TableRequest
from recckpt.sparse.files.link_batches import LinkBatches
from recckpt.sparse.files.owners import Owners
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
    ranges: Mapping[str, tuple[Ranges, Ranges]] = field(default_factory=dict)  # slot here -> those there, and here
    skips_outside: bool = False  # whether ids that the table cannot have a row of are left out; otherwise refused
    fresh: frozenset[str] = frozenset()  # slots that begin anew in a table that is emptied: nothing gives them
    drops: bool = False  # whether a table with fewer rows than ids keeps those that count most; otherwise refused

    @property
    def table(self) -> SavableTable:
        """The table to fill."""
        return self.target.table

    def values_of(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of slots here, of those that were read."""
        values = {slot: rows[there] for slot, there in self.slots.items()}
        return values | {slot: regrouped(values[slot], *ranges) for slot, ranges in self.ranges.items()}

    def wants(self, batch: Batch) -> bool:
        """Say whether the table may own rows of a batch."""
        return self.share(batch) > 0

    def share(self, batch: Batch) -> float:
        """Return about which share of the rows of a batch the table owns."""
        return self._owners.shares(batch).get(0, 0.0)

    def check_ids(self, least: int, greatest: int) -> None:
        """Refuse ids from ``least`` to ``greatest`` if the table cannot have a row of one, and none is left out.

        Raises:
            LiveTableError: it cannot.
        """
        if not self.skips_outside:
            self.target.check_ids(least, greatest)

    @property
    def request(self) -> TableRequest:
        """What the rank takes of the table of the checkpoint, as other ranks get it."""
        return TableRequest(self.columns, self.row_bytes, (self.target.owned_ids,))

    @cached_property
    def _owners(self) -> Owners:
        return Owners({0: [self.target.owned_ids]})

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
class OtherRows:
    """Rows of a table that lie in no part, such as those of a dense tensor; each rank reads its own.

    Attributes:
        load: what they fill.
        read: yields them, checked, as often as it is called.
    """

    load: TableLoad
    read: Callable[[], Iterator[BatchRows]]

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows in the columns that are read."""
        return self.load.entry.rows * self.load.row_bytes


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

    def check_ids(self) -> None:
        """Refuse ids that a table cannot have a row of: alike on all ranks, from the catalogs alone.

        Raises:
            LiveTableError: there are some.
        """
        ranges = id_ranges(self._parts())
        for load in self.tables:
            if load.entry.name in ranges:
                load.check_ids(*ranges[load.entry.name])

    def takers(self, batch: Batch) -> list[TableLoad]:
        """Return the loads that may take something of a batch."""
        return [load for load in self.tables if load.entry.name == batch.table and load.wants(batch)]

    def _parts(self) -> Iterator[Part]:
        return (part for parts in self.batches.parts.values() for part in parts)
