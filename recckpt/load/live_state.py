"""The live objects that a load fills, looked up once per load; and checks of a plan against these objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from recckpt.dense.optimizers import NamedOptimizer, lineage_of, schedulers_in
from recckpt.dense.registered import Registry
from recckpt.dense.tensors import StoredTensor
from recckpt.errors import StateMismatchError
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import GLOBAL_STEP, ID, Name, slot_name, state_name
from recckpt.live.attached import AttachedTable
from recckpt.live.optimizer_slots import akin_slot
from recckpt.live.tables import NO_TABLES, LiveTables, RowOptimizers, row_optimizers
from recckpt.live.torch_embedding import TorchEmbedding
from recckpt.load.inventory import PLAIN, Inventory, Thing
from recckpt.load.open_source import Needs, OpenSource
from recckpt.load.plan import RESIZE
from recckpt.load.problems import Problems
from recckpt.load.report import LoadPlan, Planned
from recckpt.load.source import LocatedCheckpoint
from recckpt.policies.row_filter import RowFilter
from recckpt.sparse.files.table_rows import source_of
from recckpt.sparse.files.table_target import LoadTarget, target_of
from recckpt.sparse.split import parameters_of, state_of
from recckpt.text import first_few
from recckpt.types import EMBEDDING, GEOMETRY, SavableTable, SlotSpec

_MATERIALIZE = (
    "values copied to 'meta' are lost: call, for example, model.to_empty(device='cpu') first, before the model's "
    "optimizers are made"
)
_SCALARS = Name("sparse_opt", SPARSE_OPTIM)


@dataclass(eq=False)
class LiveState:
    model: nn.Module
    sparse_optim: Optimizer | None
    extra: Registry
    io_state: Registry
    shard: int
    shards: int
    live_tables: LiveTables = NO_TABLES
    tables: Mapping[str, SavableTable] = field(init=False, repr=False)
    dense: Mapping[str, Any] = field(init=False, repr=False)
    row_optimizers: Optimizer | RowOptimizers | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.tables, self.dense = self.live_tables.joined(*state_of(self.model))
        self.row_optimizers = row_optimizers(self.sparse_optim, self.live_tables)

    @cached_property
    def targets(self) -> Mapping[str, LoadTarget]:
        return {
            name: table.target_type(table) if isinstance(table, AttachedTable) else target_of(table)
            for name, table in self.tables.items()
        }

    @cached_property
    def tensor_names(self) -> list[str]:
        """The names of dense tensors, and the names that live tables may have as dense tensors in a checkpoint."""
        return [*self.dense, *(tensor for name in self.live_tables for tensor in self.live_tables.tensors_of(name))]

    @cached_property
    def optimizers(self) -> Mapping[str, NamedOptimizer]:
        return self.extra.optimizers

    @cached_property
    def needs(self) -> Needs:
        """The items that this rank reads from files of single ranks."""
        slices = {name: self.targets[name.table].slice for name in self.inventory if name.is_slot}
        gathers = any(map(self.extra.gathers, self.extra))
        values = self.dense.items()
        plain = {name: value for name, value in values if isinstance(value, torch.Tensor) and not is_lazy(value)}
        tensors = {name for name, value in plain.items() if len(value.shape) > 1}
        return Needs(self.shard, self.shards, slices, len(self.io_state) > 0, gathers, tensors)

    @cached_property
    def inventory(self) -> Inventory:
        things: dict[Name, Thing] = {Name(GLOBAL_STEP, GLOBAL_STEP): Thing(PLAIN)}
        for name, table in self.tables.items():
            things |= _slots_of(name, table, self.live_tables)
        things |= _dense_things(self.model, self.dense)
        for name in (name for name in self.extra if name not in self.optimizers):
            things[Name("extra", name)] = Thing(PLAIN, is_schedule=any(schedulers_in(self.extra.objects[name])))
        for name, optimizer in self.optimizers.items():
            things[Name("dense_opt", name)] = Thing(PLAIN, lineage=lineage_of(optimizer.optimizer))
            for parameter, *tied in optimizer.names:
                things[state_name(parameter, name)] = Thing(PLAIN, tied=tuple(tied))
        things |= {Name("io_state", name): Thing(PLAIN) for name in self.io_state}
        if self.row_optimizers is not None:
            things[_SCALARS] = Thing(PLAIN)
        return things

    def inventory_beside(self, sources: Iterable[LocatedCheckpoint]) -> Inventory:
        """Return the inventory, with slots that settings of these checkpoints may add to live tables."""
        things = dict(self.inventory)
        for source in sources:
            manifest, entry = source.checkpoint.manifest, source.entry
            if SPARSE_OPTIM not in manifest.names.extra or entry.keeps_settings or not entry.wants(_SCALARS):
                continue
            for name in self.live_tables:
                table, tied = manifest.table(name), self.live_tables.tensors_of(name)
                there = {slot.name for slot in table.slots} if table is not None else set()
                for slot in (slot for slot in self.other_slots(name) if there & {slot.name, akin_slot(slot.name)}):
                    things.setdefault(slot_name(name, slot.name), Thing(slot.dtype, slot.shape, tied=tied))
        return things

    def other_slots(self, table: str) -> Iterable[SlotSpec]:
        live = self.live_tables[table].live
        return live.other_slots().values() if isinstance(live, TorchEmbedding) else ()


def _slots_of(name: str, table: SavableTable, live_tables: LiveTables) -> dict[Name, Thing]:
    if not isinstance(table, AttachedTable):
        slots = (SlotSpec(ID, "int64", ()), *source_of(table).slots)
        return {slot_name(name, slot.name): Thing(slot.dtype, slot.shape) for slot in slots}
    of_ranges = {slot for slot, column in table.rows.columns.items() if not column.spec.shape}
    columns, tied = table.rows.box.columns, live_tables.tensors_of(name)
    things = {slot_name(table.name, ID): Thing("int64", (), tied=tied)}
    for spec in table.specs:
        own = columns if spec.name in of_ranges else ()
        things[slot_name(table.name, spec.name)] = Thing(spec.dtype, spec.shape, tied=tied, columns=own)
    return things


def _dense_things(model: nn.Module, dense: Mapping[str, Any]) -> dict[Name, Thing]:
    kinds = nn.Embedding | nn.EmbeddingBag
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    of_names, names_of = dict[str, int](), dict[int, list[str]]()
    for name, parameter in parameters_of(model):
        of_names[name] = id(parameter)
        names_of.setdefault(id(parameter), []).append(name)
    things = {}
    for name, value in dense.items():
        number = of_names.get(name, 0)
        is_embedding, tied = number in embeddings, tuple(one for one in names_of.get(number, ()) if one != name)
        if not isinstance(value, torch.Tensor):
            thing = Thing(PLAIN, is_embedding=is_embedding)
        elif is_lazy(value):  # takes dtype and shape from the loaded tensor
            thing = Thing(tied=tied, is_embedding=is_embedding)
        else:
            dtype = str(value.dtype).removeprefix("torch.")
            shape = tuple(getattr(value, GEOMETRY[0], value.shape))  # shape of the whole tensor
            n_bytes = math.prod(shape) * value.dtype.itemsize
            thing = Thing(dtype, shape, 0, n_bytes, tied, is_embedding=is_embedding)
        things[Name("dense", name)] = thing
    return things


def check_live(
    live: LiveState, sources: Sequence[LocatedCheckpoint], items: Sequence[Planned], problems: Problems
) -> None:
    """Add problems that only live objects show: per-rank states, tables that are not ours, lengths."""
    for item, source in ((item, sources[item.offer]) for item in items if item.offer is not None):
        if item.name.group == "io_state":
            _check_positions(live, source, item.name.text, problems)
        elif item.name.group in ("extra", "dense_opt"):
            _check_own_state(live, source, item, problems)
        here, table = live.inventory.get(item.name), live.tables.get(item.name.table)
        if here is not None and here.is_embedding and len(item.thing.shape) == len(here.shape):
            _warn_of_new(source, item.name.text, item.thing.shape[0], here.shape[0], problems)
        if item.name.slot == ID and isinstance(table, AttachedTable):
            check = _check_room if table.is_by_id else _check_length
            check(source, item, table, problems)
    _check_foreign(live, sources, items, problems)
    for source in sources:
        _check_untrained(live, source, problems)


def _check_positions(live: LiveState, source: LocatedCheckpoint, name: str, problems: Problems) -> None:
    can_merge = callable(getattr(live.io_state.get(name), "merge_io_state", None))
    if source.shards != live.shards and not can_merge:
        found = f"the positions of {source.shards} shards"
        expected = (
            f"{live.shards}: read the data by recckpt.positions, give the object merge_io_state(states, index, count), "
            "or leave it out with 'exclude': ['io_state']"
        )
        problems.misfit(source.entry, f"io state {name}", found, expected)


def _check_own_state(live: LiveState, source: LocatedCheckpoint, item: Planned, problems: Problems) -> None:
    """If each rank saved its own state, require the same number of ranks; a state saved by one rank fits any number."""
    registry = live.extra
    name, there = (text.rpartition("@")[2] if item.name.parameter else text for text in (item.name.text, item.source))
    is_for_all = there not in source.extras_of_ranks or source.shards == 1 or registry.gathers(name)
    if is_for_all or (registry.is_of_ranks(name) and source.shards == live.shards):
        return
    what = f"states of {live.shards} ranks: " if registry.is_of_ranks(name) else "one for all ranks: "
    hint = "" if registry.is_of_ranks(name) else "register it with per_rank=True, or "
    expected = f"{what}{hint}leave it out with 'exclude': [{name!r}]"
    problems.misfit(source.entry, name, f"states of {source.shards} ranks, one each", expected)


def _check_room(source: LocatedCheckpoint, item: Planned, table: AttachedTable, problems: Problems) -> None:
    """Refuse to load more ids than a live table with managed collisions has rows."""
    most, entry = table.most_ids, source.entry
    if most is None or entry.zch != "error" or entry.where != RowFilter():
        return
    n_ids = source.checkpoint.manifest.named_table(item.source.rpartition("@")[0]).rows
    if n_ids > most:
        expected = f"at most {most}: make its zch_size larger, or keep those that count most by 'zch': 'drop'"
        problems.misfit(entry, table.name, f"{n_ids} ids", expected)


def _check_length(source: LocatedCheckpoint, item: Planned, table: AttachedTable, problems: Problems) -> None:
    """Warn if a live table is longer than the saved one; refuse if it is shorter and may not be resized."""
    saved, here, entry = item.thing.rows, table.live.n_rows, source.entry
    there = source.checkpoint.manifest.table(item.source.rpartition("@")[0])
    if entry.where != RowFilter() or (not item.thing.tensor and (there is None or there.live is None)):
        return  # only some rows, or ids that are not row numbers
    _warn_of_new(source, table.name, saved, here, problems)
    is_cut = entry.out_of_range == "skip" or entry.action(slot_name(table.name, EMBEDDING)) == RESIZE
    if saved > here and not is_cut:
        expected = f"at most {here}: 'on_mismatch': {{{table.name!r}: {RESIZE!r}}} takes the first {here}"
        problems.misfit(entry, slot_name(table.name, EMBEDDING).text, f"{saved} rows", expected)


def _warn_of_new(source: LocatedCheckpoint, name: str, saved: int, here: int, problems: Problems) -> None:
    if saved < here:
        text = f"{name!r} has {here} rows, of which {here - saved} are new and keep what the model has"
        problems.warn(source.entry, text)


def _check_foreign(
    live: LiveState, sources: Sequence[LocatedCheckpoint], items: Iterable[Planned], problems: Problems
) -> None:
    """Check that a table that is not ours gets whole, unconverted rows: it can take nothing else."""
    foreign = {name for name, target in live.targets.items() if not target.takes_slots}
    taken: dict[str, dict[str, Planned]] = {}
    for item in items:
        if item.offer is not None and item.name.table in foreign:
            taken.setdefault(item.name.table, {})[item.name.slot] = item
    for name, slots in taken.items():
        saved_at = {(item.offer, item.source.rsplit("@", 1)[0]) for item in slots.values()}
        is_whole = {ID, EMBEDDING} <= slots.keys() and not any(item.conversion for item in slots.values())
        if len(saved_at) > 1 or not is_whole:
            expected = "ids and embeddings of one table, unconverted: the table is not a recckpt.sparse.HashTable"
            found = f"only {', '.join(sorted(slots))}, or converted"
            for number in sorted({item.offer for item in slots.values() if item.offer is not None}):
                problems.misfit(sources[number].entry, name, found, expected)


def _check_untrained(live: LiveState, source: LocatedCheckpoint, problems: Problems) -> None:
    """Warn if a resume has optimizer states of parameters that no optimizer trains here, as of a group added later."""
    saved = [text.rpartition("@") for text in source.checkpoint.manifest.names.dense_opt if source.entry.is_own]
    if not saved:
        return
    names = {name for optimizer in live.optimizers.values() for of_one in optimizer.names for name in of_one}
    of_tables = {id(weight) for weight in live.live_tables.weights_with_states()}
    others = {name: one for name, one in parameters_of(live.model) if name not in names and id(one) not in of_tables}
    untrained = {name for name, one in others.items() if one.numel()}  # hashtables have an empty parameter
    known = [(name, by) for name, _, by in saved if name in untrained and by in live.optimizers]
    left = [state.text for state in (state_name(*each) for each in known) if source.entry.wants(state)]
    if left:
        text = (
            f"{source.label} has optimizer states of parameters that no registered optimizer has here: "
            f"{first_few(left)}; add them, as by add_param_group, before it is loaded, or their state starts fresh"
        )
        problems.warn(source.entry, text)


def check_memory(live: LiveState, planned: LoadPlan, sources: Sequence[OpenSource]) -> None:
    """Raise if the model cannot hold the planned state.

    Raises:
        StateMismatchError: tensors or tables are on the device ``meta``, or a tied parameter would get values and
            optimizer state from two different names; the message lists all.
    """
    what, mismatched = " and ".join(planned.sources), dict[str, tuple[object, object]]()
    for name in (item.name for item in planned.taken if item.name.is_slot or item.name.group == "dense"):
        value: Any = live.tables[name.table] if name.is_slot else live.dense[name.text]
        try:
            is_on_meta = value.device.type == "meta"
        except (AttributeError, NotImplementedError, RuntimeError):  # no tensor, or one that lies on several devices
            is_on_meta = False
        if is_on_meta:
            mismatched[name.table or name.text] = ("values", "none: it is on 'meta'")
    if mismatched:
        raise StateMismatchError(what, mismatched=mismatched, remedy=_MATERIALIZE)
    untied = _untied(live, planned.taken, sources)
    for tied, (own, other) in untied.items():
        same = f"the same, since {own.name.text!r} and {other.name.text!r} are one tensor here"
        mismatched[tied] = (f"other values than {other.source!r}", same)
    if untied:
        renames = {name: other.source for name, (_, other) in untied.items()}
        remedy = f"choose one of them: 'oname': {renames} loads it into both"
        raise StateMismatchError(what, mismatched=mismatched, remedy=remedy)


def _untied(
    live: LiveState, taken: Sequence[Planned], sources: Sequence[OpenSource]
) -> dict[str, tuple[Planned, Planned]]:
    """Return the tied tensors that would get two different values, each with a tensor that it is tied to."""
    dense = {item.name.text: item for item in taken if item.name.group == "dense"}
    tied = {text: live.inventory[item.name].tied for text, item in dense.items()}
    if not any(tied.values()):
        return {}
    stored = [source.under_names_of(live.tensor_names, source.tensors.model) for source in sources]
    pairs: dict[str, tuple[Planned, Planned]] = {}
    for text, others in tied.items():
        first = next((dense[one] for one in others if one in dense), None)
        if first is not None and first.name.text not in pairs and _differ(dense[text], first, stored):
            pairs[text] = (dense[text], first)
    return pairs


def _differ(one: Planned, other: Planned, stored: Sequence[Mapping[str, StoredTensor]]) -> bool:
    """Return whether two tensors come from different places with different checksums."""
    if (one.offer, one.thing.table or one.source) == (other.offer, other.thing.table or other.source):
        return False
    tensors = [stored[item.offer or 0].get(item.source) for item in (one, other)]
    return tensors[0] is None or tensors[1] is None or tensors[0].content != tensors[1].content
