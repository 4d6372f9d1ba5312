"""The states of optimizers, put together from the checkpoints that their parameters and tables come from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from torch.optim import Optimizer

from recckpt.dense.loader import fitted, has_stand_ins
from recckpt.dense.optimizers import NAMES, NamedOptimizer, is_named, states_by_name
from recckpt.dense.sharded import may_be_sharded
from recckpt.format import layout
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import ID, Name, state_name
from recckpt.live.optimizers import RowOptimizers
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource
from recckpt.load.report import Planned
from recckpt.types import EMBEDDING

log = logging.getLogger("recckpt")
_SCALARS = Name("sparse_opt", SPARSE_OPTIM)
_States = dict[str, tuple[tuple[int, ...], Mapping[str, Any]]]  # parameter -> (its shape, its state)


def dense_optimizer_states(live: LiveState, items: Iterable[Planned], sources: Sequence[OpenSource]) -> dict[str, Any]:
    """Return the states to load into the registered dense optimizers.

    A parameter that is loaded takes the state it has there; where it has none, its state starts fresh. All others
    keep what they have, and so do the settings of the groups, where they are not planned.
    """
    planned = {item.name: item for item in items}
    states = {name: _Composer(name, one, live, planned, sources).state() for name, one in live.optimizers.items()}
    return {name: state for name, state in states.items() if state is not None}


class _Composer:
    """Puts the state of one dense optimizer together."""

    def __init__(
        self,
        name: str,
        optimizer: NamedOptimizer,
        live: LiveState,
        planned: Mapping[Name, Planned],
        sources: Sequence[OpenSource],
    ) -> None:
        self._name, self._optimizer, self._live = name, optimizer, live
        self._planned, self._sources = planned, sources
        self._parameters, self._names = optimizer.parameters, {names[0]: names for names in optimizer.names}
        self._uses = Counter((item.offer, item.source) for item in planned.values() if item.name.parameter)
        self._saved: dict[tuple[int, str], _States] = {}

    def state(self) -> Any:
        """Return the state to load, None where the optimizer keeps what it has."""
        settings = self._planned[Name("dense_opt", self._name)]
        groups = None
        if settings.offer is not None:
            source = self._sources[settings.offer]
            saved = self._value(source, settings.source)
            if not is_named(saved):  # by the places of the parameters, as torch has it
                return as_here(saved, partial(self._live.extra.beside, self._name, saved), source)
            groups = self._renamed(saved["param_groups"], source)
        states: dict[str, Mapping[str, Any]] = {}
        for parameter in self._parameters:
            item = self._planned[state_name(parameter, self._name)]
            if item.offer is not None:
                states[parameter] = self._state_of(parameter, item, item.offer)
            elif self._starts_fresh(item):
                states[parameter] = {}
        return self._optimizer.composed(states, groups) if states or groups is not None else None

    def _starts_fresh(self, item: Planned) -> bool:
        """Say whether the parameter is loaded and its state is asked for, but not there."""
        parameters = (self._planned.get(Name("dense", name)) for name in self._names[item.name.parameter])
        offer = next((each.offer for each in parameters if each and each.offer is not None), None)
        return offer is not None and self._sources[offer].at.entry.wants(item.name)

    def _renamed(self, groups: Sequence[Mapping[str, Any]], source: OpenSource) -> list[dict[str, Any]]:
        """Return saved groups with the names that their parameters have here."""
        called = [set(source.under_names_of(self._live.dense, dict.fromkeys(group[NAMES]))) for group in groups]
        known = set().union(*called)
        there = {first: [_source(name, source) for name in names] for first, names in self._names.items()}
        for first, names in there.items():
            item = self._planned[state_name(first, self._name)]
            if item.offer is not None and self._sources[item.offer] is source:
                names.append(item.source.rpartition("@")[0])  # it may be tied there alone
        called_there = {
            parameter: next((name for name in names if name in known), "") for parameter, names in there.items()
        }
        return [
            {**group, NAMES: [parameter for parameter, name in called_there.items() if name in names]}
            for group, names in zip(groups, called, strict=True)
        ]

    def _state_of(self, parameter: str, item: Planned, offer: int) -> Mapping[str, Any]:
        source, (there, is_listed, name) = self._sources[offer], item.source.rpartition("@")
        if not is_listed:  # it was planned to come whole
            found, expected = "the names of its parameters", "none, since the manifest lists none"
            raise source.corrupt(layout.EXTRA, repr(name), found=found, expected=expected)
        if (offer, name) not in self._saved:
            self._saved[offer, name] = self._read(offer, name)
        states = self._saved[offer, name]
        if there not in states:
            found, expected = f"no parameter {there!r}", "the one that the manifest names"
            raise source.corrupt(layout.EXTRA, repr(name), found=found, expected=expected)
        shape, values = states[there]
        if shape != tuple(self._parameters[parameter].shape):  # only of those that are not in the state dict
            log.warning("%s: %r has another shape here: its state in %r starts fresh", source.at.label, there, name)
            return {}
        values = as_here(values, lambda: (values, self._optimizer.like(parameter, values)), source)
        return deepcopy(values) if self._uses[offer, item.source] > 1 else values  # torch takes the tensors over

    def _read(self, offer: int, name: str) -> _States:
        """Return the states that an optimizer has in a checkpoint, by the names in the plan."""
        source = self._sources[offer]
        if name not in source.at.extras_of_ranks or not self._live.extra.gathers(self._name):
            return self._by_name(source, name, self._value(source, name))
        items = [self._planned[state_name(parameter, self._name)] for parameter in self._parameters]
        needed = {item.source.rpartition("@")[0] for item in items if item.offer == offer}
        states: _States = {}
        for state in source.registered_on_all(name, self._live.shard):
            for there, (shape, values) in self._by_name(source, name, state).items():
                if there in needed and (values or there not in states):
                    states[there] = (shape, values)
            if all(there in states and states[there][1] for there in needed):
                break  # most often a rank has saved all that it needs
        return states

    def _value(self, source: OpenSource, name: str) -> Any:
        return source.registered(name, min(self._live.shard, source.at.shards - 1))

    def _by_name(self, source: OpenSource, name: str, saved: Any) -> _States:
        if not is_named(saved):
            expected = "the state of an optimizer with the names of its parameters, as the manifest says"
            raise source.corrupt(layout.EXTRA, repr(name), found=type(saved).__name__, expected=expected)
        return source.under_names_of(self._live.dense, states_by_name(saved))


def as_here(saved: Any, beside: Callable[[], tuple[Any, Any]], source: OpenSource) -> Any:
    """Return state, its sharded tensors as they lie here; where there are any, ``beside`` gives live state."""
    try:
        return fitted(*beside(), source.tensors) if may_be_sharded() or has_stand_ins(saved) else saved
    except RecursionError:  # nested without end: whoever gets it may refuse it
        return saved


def _source(parameter: str, source: OpenSource) -> str:
    """Return what a parameter of the model is called in a checkpoint, where the rules agree on it."""
    try:
        return source.at.entry.renames.source(Name("dense", parameter))
    except ValueError:
        return parameter


def sparse_optimizer_state(
    optimizer: Optimizer | RowOptimizers | None, items: Sequence[Planned], sources: Sequence[OpenSource]
) -> dict[str, Any] | None:
    """Return the scalars to load into the sparse optimizer, None where there are none to take.

    The step of a table comes from where its slots come from, since they belong together; it starts from 0 where the
    table is emptied and its slots start fresh. The hyper-parameters come from the checkpoint that ``sparse_optim`` is
    taken from, group by group where one there holds all of its tables; from another run that has to be asked for.
    """
    if optimizer is None:
        return None
    scalars = next((i.offer for i in items if i.name == _SCALARS), None)
    saved = None if scalars is None else _scalars(sources[scalars])
    live = optimizer.state_dict()
    slots: dict[str, list[Planned]] = {name: [] for g in live.get("param_groups", []) for name in g.get("tables", [])}
    if not slots:
        return saved if saved is not None else _foreign_steps(live, items, sources)
    for item in items:
        slots.get(item.name.table, []).append(item)
    steps = dict(live["state"])
    for table, its_slots in slots.items():
        origin = _origin(its_slots, live, sources)
        if origin is not None:
            steps[table] = _scalars(sources[origin[0]]).get("state", {}).get(origin[1])
        elif _is_emptied(its_slots, sources):
            steps[table] = None
    steps = {table: step for table, step in steps.items() if step is not None}
    if saved is None:
        return None if steps == live["state"] else {**live, "state": steps}
    there = {item.name.table: item.source.rpartition("@")[0] for item in items if item.offer == scalars}
    groups = [_with_settings(group, saved.get("param_groups", []), there) for group in live["param_groups"]]
    return {**live, "state": steps, "param_groups": groups}


def _origin(slots: Sequence[Planned], live: Mapping[str, Any], sources: Sequence[OpenSource]) -> tuple[int, str] | None:
    """Return the checkpoint and table that the step of a table belongs to, None where it is not loaded."""
    own = [item for item in slots if item.name.group == "sparse_opt"]
    rows = [item for item in slots if item.name.slot == EMBEDDING and _gives_steps(item, live, sources)]
    taken = own or rows  # a rule without slots has a step all the same
    return next(((i.offer, i.source.rpartition("@")[0]) for i in taken if i.offer is not None), None)


def _gives_steps(item: Planned, live: Mapping[str, Any], sources: Sequence[OpenSource]) -> bool:
    """Say whether the step of a table without slots of the optimizer comes along with its rows."""
    if item.offer is None or any(pattern.matches(_SCALARS) for pattern in sources[item.offer].at.entry.exclude):
        return False
    return bool(_scalars(sources[item.offer]).get("slots") == live.get("slots"))


def _foreign_steps(
    live: Mapping[str, Any], items: Iterable[Planned], sources: Sequence[OpenSource]
) -> dict[str, Any] | None:
    """Return the state of an optimizer that is not ours with the settings it has, from where the last slots come."""
    offers = [item.offer for item in items if item.name.is_slot and item.name.group == "sparse_opt"]
    taken = [offer for offer in offers if offer is not None]
    saved = _scalars(sources[max(taken)]) if taken else {}
    groups = [[len(group.get("params", ())) for group in state.get("param_groups", ())] for state in (saved, live)]
    return {**saved, "param_groups": live["param_groups"]} if saved and groups[0] and groups[0] == groups[1] else None


def _is_emptied(slots: Iterable[Planned], sources: Sequence[OpenSource]) -> bool:
    """Say whether the rows of a table are replaced."""
    ids = next((item.offer for item in slots if item.name.slot == ID), None)
    return ids is not None and sources[ids].at.entry.hashtable_clear


def _with_settings(
    live: Mapping[str, Any], saved_groups: Iterable[Mapping[str, Any]], there: Mapping[str, str]
) -> dict[str, Any]:
    """Return a group with the hyper-parameters of the saved one that holds its tables, under their names there."""
    tables = {there.get(table, table) for table in live["tables"]}
    saved = next((group for group in saved_groups if tables <= set(group.get("tables", ()))), None)
    if saved is None:
        log.warning("sparse optimizer: %s were in no one group; their hyper-parameters stay", sorted(tables))
    return {**live, **(saved or {}), "tables": live["tables"]}


def _scalars(source: OpenSource) -> dict[str, Any]:
    """Return the scalars in a checkpoint, of the shape that optimizers give; {} where it has none."""
    is_there = SPARSE_OPTIM in source.at.checkpoint.manifest.names.extra
    state = source.value(layout.EXTRA, SPARSE_OPTIM) if is_there else {}
    if not _is_state(state):
        expected = "the state dict of an optimizer"
        raise source.corrupt(layout.EXTRA, repr(SPARSE_OPTIM), found=f"{state!s:.80}", expected=expected)
    return dict(state)


def _is_state(state: Any) -> bool:
    if not isinstance(state, dict) or not isinstance(state.get("state", {}), dict):
        return False
    groups = state.get("param_groups", [])
    return isinstance(groups, list) and all(isinstance(group, dict) and _has_names(group) for group in groups)


def _has_names(group: Mapping[str, Any]) -> bool:
    names = group.get("tables", [])
    return isinstance(names, list) and all(isinstance(name, str) for name in names)
