"""What a load fills: made once a load, so that what the model consists of is looked up once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recckpt.dense.optimizer_class import lineage_of
from recckpt.dense.optimizers import NamedOptimizer
from recckpt.dense.registered import Registry
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import GLOBAL_STEP, ID, Name, slot_name, state_name
from recckpt.live.attached import AttachedTable
from recckpt.live.keyed_table import AttachedKeyedTable
from recckpt.live.keyed_target import live_target
from recckpt.live.optimizers import RowOptimizers, row_optimizers
from recckpt.live.tables import NO_TABLES, LiveTables
from recckpt.live.torch_embedding import TorchEmbedding
from recckpt.load.inventory import PLAIN, Inventory, Thing
from recckpt.load.open_source import Needs
from recckpt.load.problems import Problems
from recckpt.load.report import Planned
from recckpt.load.source import LocatedCheckpoint
from recckpt.sparse.files.row_filter import RowFilter
from recckpt.sparse.files.table_rows import source_of
from recckpt.sparse.files.table_target import LoadTarget, target_of
from recckpt.sparse.split import parameters_of, state_of
from recckpt.types import EMBEDDING, SavableTable, SlotSpec


@dataclass(frozen=True)
class LiveState:
    """The model of this rank, its companions, and which rank of how many this is."""

    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    shard: int
    shards: int
    live_tables: LiveTables = NO_TABLES

    @property
    def row_optimizers(self) -> Optimizer | RowOptimizers | None:
        """The optimizers of the rows of all tables."""
        return row_optimizers(self.sparse_optim, self.live_tables)

    @cached_property
    def _state(self) -> tuple[dict[str, SavableTable], dict[str, Any]]:
        return self.live_tables.joined(*state_of(self.model))

    @property
    def tables(self) -> Mapping[str, SavableTable]:
        """The tables by name."""
        return self._state[0]

    @cached_property
    def targets(self) -> Mapping[str, LoadTarget]:
        """What fills the tables, by name."""
        return {
            name: live_target(table) if isinstance(table, AttachedTable) else target_of(table)
            for name, table in self.tables.items()
        }

    @property
    def dense(self) -> Mapping[str, Any]:
        """The dense state."""
        return self._state[1]

    @property
    def tensor_names(self) -> list[str]:
        """The names that a checkpoint may have for dense tensors: of the dense state, and of live tables."""
        return [*self.dense, *(tensor for name in self.live_tables for tensor in self.live_tables.tensors_of(name))]

    @cached_property
    def optimizers(self) -> Mapping[str, NamedOptimizer]:
        """The registered dense optimizers whose state goes by the names of parameters."""
        return self.extra.optimizers

    @cached_property
    def needs(self) -> Needs:
        """What this rank reads of what each rank reads some of."""
        slices = {name: self.targets[name.table].slice for name in self.inventory if name.is_slot}
        gathers = any(map(self.extra.gathers, self.extra))
        tensors = {
            name: int(value.shape[0])
            for name, value in self.dense.items()
            if isinstance(value, torch.Tensor) and len(value.shape) > 1
        }
        return Needs(self.shard, self.shards, slices, len(self.io_state) > 0, gathers, tensors)

    @cached_property
    def inventory(self) -> Inventory:
        """The names that can be loaded."""
        things: dict[Name, Thing] = {Name(GLOBAL_STEP, GLOBAL_STEP): Thing(PLAIN)}
        for name, table in self.tables.items():
            if isinstance(table, AttachedTable):
                things |= _live_slots(table, self.live_tables.tensors_of(name))
                continue
            for slot in (SlotSpec(ID, "int64", ()), *source_of(table).slots):
                things[slot_name(name, slot.name)] = Thing(slot.dtype, slot.shape)
        others = _tied(self.model)
        things |= {Name("dense", name): _thing(value, others.get(name, ())) for name, value in self.dense.items()}
        things |= {Name("extra", name): Thing(PLAIN) for name in self.extra if name not in self.optimizers}
        for name, optimizer in self.optimizers.items():
            things[Name("dense_opt", name)] = Thing(PLAIN, lineage=lineage_of(optimizer.optimizer))
            for parameter, *tied in optimizer.names:
                things[state_name(parameter, name)] = Thing(PLAIN, tied=tuple(tied))
        things |= {Name("io_state", name): Thing(PLAIN) for name in self.io_state}
        if self.row_optimizers is not None:
            things[Name("sparse_opt", SPARSE_OPTIM)] = Thing(PLAIN)
        return things

    def inventory_beside(self, sources: Iterable[LocatedCheckpoint]) -> Inventory:
        """Return the names that can be loaded of checkpoints, one of which may bring settings that need more slots."""
        things = dict(self.inventory)
        for source in sources:
            for name in self.live_tables if _brings_settings(source) else ():
                entry = source.checkpoint.manifest.table(name)
                there = {slot.name for slot in entry.slots} if entry is not None else set()
                tied = self.live_tables.tensors_of(name)
                for slot in (slot for slot in self.other_slots(name) if slot.name in there):
                    things.setdefault(slot_name(name, slot.name), Thing(slot.dtype, slot.shape, tied=tied))
        return things

    def other_slots(self, table: str) -> Iterable[SlotSpec]:
        """Return the slots that a live table would have with other settings of its optimizer."""
        live = self.live_tables[table].live
        return live.other_slots().values() if isinstance(live, TorchEmbedding) else ()


def _brings_settings(source: LocatedCheckpoint) -> bool:
    """Say whether a load takes the settings of the optimizers of rows from a checkpoint."""
    is_there = SPARSE_OPTIM in source.checkpoint.manifest.names.extra
    return is_there and not source.entry.keeps_settings and source.entry.wants(Name("sparse_opt", SPARSE_OPTIM))


def _live_slots(table: AttachedTable, tied: tuple[str, ...]) -> dict[Name, Thing]:
    """Return the slots of whole rows; ``columns`` of those that have one value for each range of columns."""
    of_ranges = {name for name, column in table.rows.columns.items() if not column.spec.shape}
    columns = table.rows.box.columns
    things = {slot_name(table.name, ID): Thing("int64", (), tied=tied)}
    for spec in table.specs:
        own = columns if spec.name in of_ranges else ()
        things[slot_name(table.name, spec.name)] = Thing(spec.dtype, spec.shape, tied=tied, columns=own)
    return things


def _thing(value: Any, tied: tuple[str, ...]) -> Thing:
    if not isinstance(value, torch.Tensor):
        return Thing(PLAIN)
    n_bytes = math.prod(value.shape) * value.dtype.itemsize
    return Thing(str(value.dtype).removeprefix("torch."), tuple(value.shape), 0, n_bytes, tied)


def _tied(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of the parameters that have several, each with the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in parameters_of(model):
        names.setdefault(id(parameter), []).append(name)
    several = [some for some in names.values() if len(some) > 1]
    return {name: tuple(other for other in some if other != name) for some in several for name in some}


def check_live(
    live: LiveState, sources: Sequence[LocatedCheckpoint], items: Sequence[Planned], problems: Problems
) -> None:
    """Add what does not fit the live objects of a plan: states of other ranks, and tables that are not ours."""
    for item in items:
        if item.offer is not None and item.name.group == "io_state":
            _check_positions(live, sources[item.offer], item, problems)
        elif item.offer is not None and item.name.group in ("extra", "dense_opt"):
            _check_own_state(live, sources[item.offer], item, problems)
    _check_foreign(live, sources, items, problems)
    _check_rooms(live, sources, items, problems)


def _check_rooms(
    live: LiveState, sources: Sequence[LocatedCheckpoint], items: Iterable[Planned], problems: Problems
) -> None:
    """A live table that gives ids places has no more of them than it has rows."""
    for item in items:
        table = live.tables.get(item.name.table) if item.name.slot == ID and item.offer is not None else None
        if not isinstance(table, AttachedKeyedTable) or table.live.n_ids is None or item.offer is None:
            continue
        source, most = sources[item.offer], table.live.n_ids
        n_ids = source.checkpoint.manifest.named_table(item.source.rpartition("@")[0]).rows
        if n_ids > most and source.entry.zch == "error" and source.entry.where == RowFilter():
            expected = f"at most {most}: make its zch_size larger, or keep those that count most by 'zch': 'drop'"
            problems.misfit(source.entry, table.name, f"{n_ids} ids", expected)


def _check_positions(live: LiveState, source: LocatedCheckpoint, item: Planned, problems: Problems) -> None:
    can_merge = callable(getattr(live.io_state.get(item.name.text), "merge_io_state", None))
    if source.shards != live.shards and not can_merge:
        found = f"the positions of {source.shards} shards"
        expected = (
            f"{live.shards}: give the object merge_io_state(states, index, count), or leave it out with "
            "'exclude': ['io_state']"
        )
        problems.misfit(source.entry, f"io state {item.name.text}", found, expected)


def _check_own_state(live: LiveState, source: LocatedCheckpoint, item: Planned, problems: Problems) -> None:
    """A state that each rank has saved of its own goes to as many ranks again; one of a single rank goes to all."""
    registry = live.extra
    name, there = (text.rpartition("@")[2] if item.name.parameter else text for text in (item.name.text, item.source))
    is_for_all = there not in source.extras_of_ranks or source.shards == 1 or registry.gathers(name)
    if is_for_all or (registry.is_of_ranks(name) and source.shards == live.shards):
        return
    what = f"states of {live.shards} ranks" if registry.is_of_ranks(name) else "one for all ranks"
    hint = "" if registry.is_of_ranks(name) else "register it with per_rank=True, or "
    expected = f"{what}: {hint}leave it out with 'exclude': [{name!r}]"
    problems.misfit(source.entry, name, f"states of {source.shards} ranks, one each", expected)


def _check_foreign(
    live: LiveState, sources: Sequence[LocatedCheckpoint], items: Iterable[Planned], problems: Problems
) -> None:
    """A table that is not ours has no way to take anything but whole rows, as they are."""
    foreign = {name for name, target in live.targets.items() if not target.takes_slots}
    taken: dict[str, dict[str, Planned]] = {}
    for item in items:
        if item.offer is not None and item.name.table in foreign:
            taken.setdefault(item.name.table, {})[item.name.slot] = item
    for name, slots in taken.items():
        origins = {(item.offer, item.source.rsplit("@", 1)[0]) for item in slots.values()}
        is_whole = {ID, EMBEDDING} <= slots.keys() and not any(item.conversion for item in slots.values())
        if len(origins) > 1 or not is_whole:
            expected = "ids and embeddings of one table, unconverted: the table is not a recckpt.sparse.HashTable"
            found = f"only {', '.join(sorted(slots))}, or converted"
            for number in sorted({item.offer for item in slots.values() if item.offer is not None}):
                problems.misfit(sources[number].entry, name, found, expected)
