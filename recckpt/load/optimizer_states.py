"""Composes the states of optimizers from the checkpoints that their parameters and tables come from."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from recckpt.dense.loader import fitted, has_stand_ins
from recckpt.dense.optimizers import (
    NAMES,
    SHAPES,
    NamedOptimizer,
    Shared,
    counted_in_groups,
    is_named,
    lineage_of,
    shape_of,
    shared_in,
    states_by_name,
)
from recckpt.dense.sharded import is_sharded, may_be_sharded
from recckpt.format import layout
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import ID, Name, state_name
from recckpt.live.optimizer_slots import DECAY
from recckpt.live.tables import RowOptimizers
from recckpt.load.converted import TableTensors, TensorRows
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource
from recckpt.load.report import Planned
from recckpt.text import first_few
from recckpt.types import EMBEDDING

log = logging.getLogger("recckpt")
_SCALARS = Name("sparse_opt", SPARSE_OPTIM)
_States = dict[str, tuple[tuple[int, ...], Mapping[str, Any] | None]]  # parameter -> (its shape, its state if any)
_GO_BY_PLACE = {"LBFGS"}  # keep one state for the concatenated values of all parameters, under the first one
_ELSEWHERE = "it depends on the order of the parameters, which differs here"


def sparse_optimizer_state(
    optimizer: Optimizer | RowOptimizers | None,
    items: Sequence[Planned],
    sources: Sequence[OpenSource],
    tensors: Sequence[TensorRows],
) -> dict[str, Any] | None:
    """Return the scalars to load into the sparse optimizer, None if nothing changes.

    The step of a table comes from the source of its slots; if rows of the table stay, the higher step counts. The step
    is 0 if the table is emptied and its slots start fresh. Hyper-parameters of a group come from the source of
    ``sparse_optim``, if one saved group has all tables of the group with the same slots; from another run only if
    requested. ``tensors``: per source, its tensors that fill live tables.
    """
    if optimizer is None:
        return None
    scalars = next((i.offer for i in items if i.name == _SCALARS), None)
    saved = None if scalars is None else tensors[scalars].scalars
    live = optimizer.state_dict()
    slots: dict[str, list[Planned]] = {name: [] for g in live.get("param_groups", []) for name in g.get("tables", [])}
    if not slots:
        return saved if saved is not None else _foreign_steps(live, items, sources)
    for item in items:
        slots.get(item.name.table, []).append(item)
    steps = dict(live["state"])
    for table, its_slots in slots.items():
        saved_at = _saved_at(its_slots, tensors)
        ids = next((item.offer for item in its_slots if item.name.slot == ID), None)
        is_emptied = ids is not None and sources[ids].at.entry.hashtable_clear
        if saved_at is not None:
            saved_step = tensors[saved_at[0]].scalars["state"].get(saved_at[1])
            is_merged = ids is not None and not is_emptied  # rows that stay have moments of as many steps
            before = steps.get(table) if is_merged else None
            steps[table] = max(saved_step, before, key=_n_steps)
        elif is_emptied:
            steps[table] = None
    steps = {table: step for table, step in steps.items() if step is not None}
    if saved is None or scalars is None:
        return None if steps == live["state"] else {**live, "state": steps}
    there: dict[str, str] = {}
    alike, other_decay, source = set[str](), set[str](), tensors[scalars]
    for table, its_slots in slots.items():
        there[table] = next((item.source.rpartition("@")[0] for item in its_slots if item.offer == scalars), table)
        own = [item.name.slot for item in its_slots if item.name.group == "sparse_opt"]
        is_live = isinstance(optimizer, RowOptimizers) and optimizer.is_live(table)
        if source.has_slots(there[table], own, is_live=is_live):
            alike.add(table)
            if source.has_other_decay(there[table], own):
                other_decay.add(table)
    groups = [_with_settings(group, saved["param_groups"], there, alike, other_decay) for group in live["param_groups"]]
    return {**live, "state": steps, "param_groups": groups}


def _saved_at(items: Sequence[Planned], tensors: Sequence[TensorRows]) -> tuple[int, str] | None:
    """Return the source and table that the step of a table comes from; None if the step is not loaded.

    The step of an optimizer without slots comes with the rows.
    """
    own = [item for item in items if item.name.group == "sparse_opt"]
    taken = next((item for item in own or items if item.offer is not None and item.name.slot != ID), None)
    if taken is None or taken.offer is None:
        return None
    table, saved = taken.source.rpartition("@")[0], tensors[taken.offer]
    if not own:
        gives_steps = not any(pattern.matches(_SCALARS) for pattern in saved.source.at.entry.exclude)
        own = [taken] if taken.name.slot == EMBEDDING and gives_steps and saved.has_slots(table, ()) else []
    return (taken.offer, table) if own else None


def _n_steps(state: Any) -> float:
    """Return the steps that a table's state counts; infinity if malformed: the optimizer refuses it."""
    try:
        return float(state.get("step", 0)) if state is not None else 0.0
    except (AttributeError, TypeError, ValueError):
        return math.inf


def _foreign_steps(
    live: Mapping[str, Any], items: Iterable[Planned], sources: Sequence[OpenSource]
) -> dict[str, Any] | None:
    """Return the state of an optimizer that is not ours, from the source of the last slots; its settings stay."""
    offers = [item.offer for item in items if item.name.is_slot and item.name.group == "sparse_opt"]
    taken = [offer for offer in offers if offer is not None]
    saved = sources[max(taken)].row_scalars() if taken else {}
    groups = [[len(group.get("params", ())) for group in state.get("param_groups", ())] for state in (saved, live)]
    return {**saved, "param_groups": live["param_groups"]} if saved and groups[0] and groups[0] == groups[1] else None


def _with_settings(
    live: Mapping[str, Any],
    saved_groups: Iterable[Mapping[str, Any]],
    there: Mapping[str, str],
    alike: Container[str],
    other_decay: Container[str],
) -> dict[str, Any]:
    """Return a group with the hyper-parameters of the saved group that holds its tables.

    If a table is not in ``alike``, another optimizer trained it, so the live settings stay. For tables in
    ``other_decay`` the live weight decay stays, because the saved one has another meaning. ``there``: table -> its name
    in the checkpoint.
    """
    tables = {there.get(table, table) for table in live["tables"]}
    if others := [table for table in live["tables"] if table not in alike]:
        log.warning("sparse optimizer: %s had other slots; this run's hyper-parameters stay", sorted(others))
        return dict(live)
    saved = next((group for group in saved_groups if tables <= set(group.get("tables", ()))), None)
    if saved is None:
        log.warning("sparse optimizer: %s were not in one group; this run's hyper-parameters stay", sorted(tables))
    group = {**live, **(saved or {}), "tables": live["tables"]}
    if any(table in other_decay for table in live["tables"]):
        own = {key: live[key] for key in DECAY if key in live}
        differences = [f"{key} {value}, not {group[key]}" for key, value in own.items() if group[key] != value]
        group.update(own)
        if differences:
            what = "sparse optimizer: the weight decay of this run stays for %s: %s"
            log.warning(what, live["tables"], ", ".join(differences))
    return group


def dense_optimizer_states(
    live: LiveState, items: Iterable[Planned], sources: Sequence[OpenSource], tables: Sequence[TableTensors]
) -> tuple[dict[str, Any], list[str]]:
    """Return the states to load into the registered dense optimizers, and notes on states that start fresh.

    A loaded parameter takes its state from the same source; without a state there, its state starts fresh. Other
    parameters keep their state, and groups keep their settings unless the plan loads settings. A state shared by all
    parameters comes with the settings, or else from the source of all states, if there is only one. ``tables``: per
    source, its tables that are dense tensors here.
    """
    planned = {item.name: item for item in items}
    pairs = [*zip(sources, tables, strict=True)]
    composers = {name: _Composer(name, one, live, planned, pairs) for name, one in live.optimizers.items()}
    states = {name: state for name, composer in composers.items() if (state := composer.state()) is not None}
    return states, [note for composer in composers.values() for note in composer.notes]


class _Composer:
    """Composes the state of one dense optimizer; ``notes`` lists what starts fresh."""

    def __init__(
        self,
        name: str,
        optimizer: NamedOptimizer,
        live: LiveState,
        planned: Mapping[Name, Planned],
        sources: Sequence[tuple[OpenSource, TableTensors]],
    ) -> None:
        self._name, self._optimizer, self._live = name, optimizer, live
        self._planned, self._sources = planned, [source for source, _ in sources]
        self._tables = [tables for _, tables in sources]
        self._parameters, self._names = optimizer.parameters, {names[0]: names for names in optimizer.names}
        self._uses = Counter((item.offer, item.source) for item in planned.values() if item.name.parameter)
        self._saved: dict[tuple[int, str], _States] = {}
        self.notes: list[str] = []

    def state(self) -> Any:
        settings = self._planned[Name("dense_opt", self._name)]
        groups = None
        if settings.offer is not None and not settings.thing.table:
            source = self._sources[settings.offer]
            saved = self._value(source, settings.source)
            if not is_named(saved):  # state by position, as torch saves it
                return as_here(saved, partial(self._live.extra.beside, self._name, saved), source)
            groups = self._renamed(saved["param_groups"], source)
        elif settings.offer is not None:
            groups = [
                {**self._tables[settings.offer].settings(item), NAMES: [name]}
                for name in self._parameters
                if (item := self._planned[state_name(name, self._name)]).thing.table and item.offer == settings.offer
            ]
        states: dict[str, Mapping[str, Any] | None] = {}
        for parameter in self._parameters:
            item = self._planned[state_name(parameter, self._name)]
            named = (self._planned.get(Name("dense", name)) for name in self._names[parameter])
            loaded = next((each.offer for each in named if each and each.offer is not None), None)
            if item.offer is not None:
                states[parameter] = self._state_of(parameter, item, item.offer)
            elif loaded is not None and self._sources[loaded].at.entry.wants(item.name):  # requested, but not saved
                states[parameter] = None
        if any(states.values()) and _GO_BY_PLACE.intersection(lineage_of(self._optimizer.optimizer)):
            saved_at = self._saved_at()
            if saved_at is None or not self._is_in_order(*saved_at):
                self.notes.append(f"{self._name!r} starts fresh: {_ELSEWHERE}")
                states = dict.fromkeys(states)
        shared = self._shared(settings)
        if groups is None and any(states.values()):
            groups = self._counted()
        is_loaded = states or groups is not None or shared is not None
        return self._optimizer.composed(states, groups, shared) if is_loaded else None

    def _counted(self) -> list[dict[str, Any]] | None:
        """Return the counts in the saved groups, which belong to the states; None unless one source gives all."""
        saved_at = self._saved_at()
        if saved_at is None:
            return None
        saved: Any = self._value(self._sources[saved_at[0]], saved_at[1])
        if not is_named(saved):
            return None
        known = {key for group in self._optimizer.optimizer.param_groups for key in group} | {"initial_lr"}
        settings = known - counted_in_groups(self._optimizer.optimizer) - {NAMES}
        groups = [{key: each for key, each in group.items() if key not in settings} for group in saved["param_groups"]]
        return self._renamed(groups, self._sources[saved_at[0]])

    def _shared(self, settings: Planned) -> Shared | None:
        """Return the state shared by all parameters; None to keep the optimizer's own."""
        saved_at = self._saved_at()
        if settings.offer is not None and not settings.thing.table:
            saved_at = settings.offer, settings.source
        if saved_at is None:
            return None
        number, name = saved_at
        saved = self._value(self._sources[number], name)
        if not is_named(saved):
            return None
        shared = shared_in(saved)
        left = set(shared.by_place)
        if not left or self._is_in_order(number, name):
            parts = shared.state, shared.entries
            return Shared(*as_here(parts, lambda: (parts, None), self._sources[number]))
        names = first_few(sorted(map(str, left)), len(left))
        self.notes.append(
            f"{self._name!r}: {names} in its state, which belongs to no single parameter, starts fresh: {_ELSEWHERE}"
        )
        return shared.without(left)

    def _saved_at(self) -> tuple[int, str] | None:
        items = [self._planned[state_name(parameter, self._name)] for parameter in self._parameters]
        places = {(item.offer, item.source.rpartition("@")[2]) for item in items if not item.thing.table}
        number, name = places.pop() if len(places) == 1 else (None, "")
        return None if number is None or any(item.thing.table for item in items) else (number, name)

    def _is_in_order(self, number: int, name: str) -> bool:
        source = self._sources[number]
        groups = self._value(source, name)["param_groups"]
        shapes = [list(map(tuple, group[SHAPES])) for group in groups]
        there = [[*zip(*pair, strict=False)] for pair in zip(self._names_here(groups, source), shapes, strict=True)]
        called = self._called_there({name for group in there for name, _ in group}, source)
        here = [[(called.get(name, name), shape) for name, shape in group] for group in self._optimizer.places]
        return here == there

    def _renamed(self, groups: Sequence[Mapping[str, Any]], source: OpenSource) -> list[dict[str, Any]]:
        called = self._names_here(groups, source)
        parameters: dict[str, list[str]] = {}
        for parameter, name in self._called_there(set().union(*called), source).items():
            parameters.setdefault(name, []).append(parameter)
        return [
            {**group, NAMES: [parameter for name in names for parameter in parameters.get(name, ())]}
            for group, names in zip(groups, called, strict=True)
        ]

    def _names_here(self, groups: Sequence[Mapping[str, Any]], source: OpenSource) -> list[list[str]]:
        named = {name: name for group in groups for name in group[NAMES]}
        here = {there: name for name, there in source.under_names_of(self._live.tensor_names, named).items()}
        return [[here.get(name, name) for name in group[NAMES]] for group in groups]

    def _called_there(self, known: Container[str], source: OpenSource) -> dict[str, str]:
        there: dict[str, list[str]] = {}
        for first, names in self._names.items():
            for name in names:
                try:
                    text = source.at.entry.renames.source(Name("dense", name))
                except ValueError:  # the rules give several names
                    text = name
                there.setdefault(first, []).append(text)
        for first, texts in there.items():
            item = self._planned[state_name(first, self._name)]
            if item.offer is not None and self._sources[item.offer] is source:
                texts.append(item.source.rpartition("@")[0])  # the parameter may be tied only in the checkpoint
        return {first: next((text for text in texts if text in known), "") for first, texts in there.items()}

    def _state_of(self, parameter: str, item: Planned, offer: int) -> Mapping[str, Any] | None:
        """Return the saved state of a parameter, None if none was saved. Tensors keep their saved dtypes."""
        tensor = self._parameters[parameter]
        if item.thing.table:
            of_rows = self._tables[offer].state(item)
            return self._cast(parameter, of_rows) if of_rows else None
        source, (there, is_listed, name) = self._sources[offer], item.source.rpartition("@")
        if not is_listed:  # the plan was to load the whole state
            found, expected = "the names of its parameters", "none, since the manifest lists none"
            raise source.corrupt(layout.EXTRA, repr(name), found=found, expected=expected)
        if (offer, name) not in self._saved:
            self._saved[offer, name] = self._read(offer, name)
        states = self._saved[offer, name]
        if there not in states:
            found, expected = f"no parameter {there!r}", "the one that the manifest names"
            raise source.corrupt(layout.EXTRA, repr(name), found=found, expected=expected)
        shape, values = states[there]
        if shape_of(tensor) not in (shape, (-1,)):  # only for parameters that are not in the state dict
            log.warning("%s: %r has another shape here: its state in %r starts fresh", source.at.label, there, name)
            return None
        if values is None:
            return None
        saved = values
        like = partial(self._optimizer.like, tensor, saved)
        here = as_here(saved, lambda: (saved, like()), source, is_spread=is_sharded(tensor))
        values = self._cast(parameter, here)
        return deepcopy(values) if self._uses[offer, item.source] > 1 else values  # torch keeps these tensors

    def _cast(self, parameter: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state whose moments are cast like the parameter, if a rule has cast the parameter."""
        items = (self._planned.get(Name("dense", name)) for name in self._names[parameter])
        saved = next((item.thing.dtype for item in items if item is not None and item.offer is not None), "")
        dtype = self._parameters[parameter].dtype
        if saved in ("", str(dtype).removeprefix("torch.")):
            return values
        return {
            key: value.to(dtype)
            if isinstance(value, Tensor) and value.dim() and str(value.dtype).removeprefix("torch.") == saved
            else value
            for key, value in values.items()
        }

    def _read(self, offer: int, name: str) -> _States:
        source, shard = self._sources[offer], self._live.shard
        is_gathered = name in source.at.extras_of_ranks and self._live.extra.gathers(self._name)
        items = [self._planned[state_name(parameter, self._name)] for parameter in self._parameters]
        needed = {item.source.rpartition("@")[0] for item in items if item.offer == offer}
        states: _States = {}
        for saved in source.registered_on_all(name, shard) if is_gathered else [self._value(source, name)]:
            if not is_named(saved):
                expected = "the state of an optimizer with the names of its parameters, as the manifest says"
                raise source.corrupt(layout.EXTRA, repr(name), found=type(saved).__name__, expected=expected)
            by_name = source.under_names_of(self._live.tensor_names, states_by_name(saved))
            for there, (shape, values) in by_name.items():
                if not is_gathered or (there in needed and (values or there not in states)):
                    states[there] = (shape, values)
            if all(there in states and states[there][1] for there in needed):
                break  # usually a rank has saved all that it needs
        return states

    def _value(self, source: OpenSource, name: str) -> Any:
        return source.registered(name, min(self._live.shard, source.at.shards - 1))


def as_here(saved: Any, beside: Callable[[], tuple[Any, Any]], source: OpenSource, *, is_spread: bool = False) -> Any:
    """Return state with its sharded tensors in the live layout; ``beside`` returns the saved and the live state."""
    try:
        may_be = is_spread or may_be_sharded() or has_stand_ins(saved)
        return fitted(*beside(), source.tensors) if may_be else saved
    except RecursionError:  # endlessly nested: the object that receives it may refuse it
        return saved
