"""The states of optimizers, put together from the checkpoints that their parameters and tables come from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from recckpt.dense.loader import fitted, has_stand_ins
from recckpt.dense.optimizers import NAMES, NamedOptimizer, is_named, states_by_name
from recckpt.dense.sharded import may_be_sharded
from recckpt.format import layout
from recckpt.format.names import Name, state_name
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource
from recckpt.load.report import Planned
from recckpt.load.table_tensors import TableTensors

log = logging.getLogger("recckpt")
_States = dict[str, tuple[tuple[int, ...], Mapping[str, Any]]]  # parameter -> (its shape, its state)


def dense_optimizer_states(
    live: LiveState, items: Iterable[Planned], sources: Sequence[OpenSource], tables: Sequence[TableTensors]
) -> dict[str, Any]:
    """Return the states to load into the registered dense optimizers.

    A parameter that is loaded takes the state it has there; where it has none, its state starts fresh. All others
    keep what they have, and so do the settings of the groups, where they are not planned. ``tables`` are those of each
    source that are dense tensors here.
    """
    planned = {item.name: item for item in items}
    pairs = [*zip(sources, tables, strict=True)]
    states = {name: _Composer(name, one, live, planned, pairs).state() for name, one in live.optimizers.items()}
    return {name: state for name, state in states.items() if state is not None}


class _Composer:
    """Puts the state of one dense optimizer together."""

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

    def state(self) -> Any:
        """Return the state to load, None where the optimizer keeps what it has."""
        settings = self._planned[Name("dense_opt", self._name)]
        groups = None
        if settings.offer is not None and settings.thing.table:
            groups = [
                {**self._tables[settings.offer].settings(item), NAMES: [name]}
                for name in self._parameters
                if (item := self._planned[state_name(name, self._name)]).thing.table and item.offer == settings.offer
            ]
        elif settings.offer is not None:
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
        called = [set(source.under_names_of(self._live.tensor_names, dict.fromkeys(group[NAMES]))) for group in groups]
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
        if item.thing.table:
            return self._tables[offer].state(item)
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
        return source.under_names_of(self._live.tensor_names, states_by_name(saved))


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
