"""What fills the tables: slots that come from one table of one checkpoint, whose ids are then read once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from recckpt.format.names import ID
from recckpt.format.tables import TableEntry
from recckpt.load.inventory import Inventory
from recckpt.load.open_source import OpenSource
from recckpt.load.regrouping import regroups
from recckpt.load.report import Planned
from recckpt.load.tensor_rows import TensorRows
from recckpt.sparse.average.averaged import AverageTable
from recckpt.sparse.files.column_ranges import Ranges
from recckpt.sparse.files.load_target import LinkLoad, OtherRows, TableLoad
from recckpt.sparse.files.table_target import LoadTarget
from recckpt.storage.transfers import WorkDir
from recckpt.types import SavableTable


@dataclass(frozen=True)
class Into:
    """What is filled.

    Attributes:
        targets: the tables by name.
        step: that is taken over; None where none is.
        fresh: the slots of each table that nothing gives.
        inventory: the names of the model.
    """

    targets: Mapping[str, LoadTarget]
    step: int | None
    fresh: Mapping[str, frozenset[str]]
    inventory: Inventory


@dataclass(frozen=True)
class RowLoads:
    """What fills the tables: rows of links, and rows beside them."""

    links: list[LinkLoad] = field(default_factory=list)
    others: list[OtherRows] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows that the tables own, about, in the columns that are read."""
        return sum(link.n_bytes for link in self.links) + sum(rows.n_bytes for rows in self.others)


def row_loads(
    to: Into,
    items: Sequence[Planned],
    sources: Iterable[tuple[OpenSource, TensorRows]],
    download_dir: WorkDir | None,
    concurrency: int,
) -> RowLoads:
    """Return what fills the tables: checkpoint by checkpoint in the order of the bank, and each link by link.

    Args:
        to: what is filled.
        items: what is planned.
        sources: the checkpoints, with the dense tensors of each that are taken as tables.
        download_dir: where files that cannot be mapped are copied before they are read; None: nowhere.
        concurrency: number of threads that copy.
    """
    rows = RowLoads()
    for number, (source, tensors) in enumerate(sources):
        slots = [item for item in items if item.offer == number and item.name.is_slot]
        tables = {entry.name: entry for entry in source.at.checkpoint.manifest.tables}
        loads = _table_loads(to, slots, source, {**tensors.entries, **tables})
        rows.links.extend(
            source.rows(number, [load for load in loads if load.entry.name in tables], download_dir, concurrency)
        )
        rows.others.extend(
            OtherRows(load, partial(tensors.read, load)) for load in loads if load.entry.name not in tables
        )
    return rows


def _table_loads(
    to: Into, items: Iterable[Planned], source: OpenSource, entries: Mapping[str, TableEntry]
) -> list[TableLoad]:
    slots: dict[tuple[str, str], dict[str, str]] = {}
    ranges: dict[str, dict[str, tuple[Ranges, Ranges]]] = {}
    for item in items:
        table, slot = item.source.rsplit("@", 1)
        slots.setdefault((item.name.table, table), {})[item.name.slot] = slot
        here = to.inventory.get(item.name)
        if here is not None and regroups(item.thing, here):
            ranges.setdefault(item.name.table, {})[item.name.slot] = item.thing.columns, here.columns
    return [
        TableLoad(
            target=to.targets[name],
            entry=entries[there],
            slots=_columns(to.targets[name].table, {slot: other for slot, other in pairs.items() if slot != ID}),
            with_rows=ID in pairs,
            clear=source.at.entry.hashtable_clear,
            where=source.at.entry.where,
            is_update=there in source.updates,
            ages=to.targets[name].ages(source.at.checkpoint.manifest, to.step, entries[there].clock),
            ranges=ranges.get(name, {}),
            skips_outside=source.at.entry.out_of_range == "skip",
            fresh=to.fresh.get(name, frozenset()),
            drops=source.at.entry.zch == "drop",
        )
        for (name, there), pairs in slots.items()
    ]


def _columns(table: SavableTable, slots: dict[str, str]) -> Mapping[str, str]:
    """Return which columns of a table its slots in a checkpoint fill: an average has others than those it shows."""
    return table.filled_by(slots) if isinstance(table, AverageTable) else slots
