"""The state of dense optimizers, put together from the checkpoints that their parameters come from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

from recckpt.dense.loader import fitted, has_stand_ins
from recckpt.dense.optimizers import NAMES, NamedOptimizer, is_named, states_by_name
from recckpt.dense.sharded import may_be_sharded
from recckpt.format import layout
from recckpt.load.live_state import Target
from recckpt.load.matching import Planned
from recckpt.load.selection import Name, state_name
from recckpt.load.source import Source

log = logging.getLogger("recckpt")
_T = TypeVar("_T")
_States = dict[str, tuple[tuple[int, ...], Mapping[str, Any]]]  # parameter -> (its shape, its state)


def dense_optimizer_states(
    target: Target,
    live: Mapping[str, Any],
    items: Iterable[Planned],
    sources: Sequence[Source],
) -> dict[str, Any]:
    """Return the states to load.

    A parameter that is loaded takes the state it has there; where it has none, its state starts fresh. All others
    keep what they have, and so do the settings of the groups, where they are not planned.

    Args:
        target: what is to be filled.
        live: the model's dense state.
        items: the plan.
        sources: where it takes things from.

    Raises:
        CorruptCheckpointError: a file is damaged.
    """
    planned = {item.name: item for item in items}
    states = {}
    for name, optimizer in target.extra.optimizers.items():
        state = _Reader(name, optimizer, target, live=live, planned=planned, sources=sources).state()
        if state is not None:
            states[name] = state
    return states


class _Reader:
    """Puts the state of one optimizer together."""

    def __init__(
        self,
        name: str,
        optimizer: NamedOptimizer,
        target: Target,
        *,
        live: Mapping[str, Any],
        planned: Mapping[Name, Planned],
        sources: Sequence[Source],
    ) -> None:
        self._name, self._optimizer, self._target, self._live = name, optimizer, target, live
        self._planned, self._sources = planned, sources
        self._parameters = optimizer.parameters
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
                return _fitted(saved, partial(self._target.extra.beside, self._name, saved), source)
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
        parameter = self._planned.get(Name("dense", item.name.parameter))
        if parameter is None or parameter.offer is None:
            return False
        return self._sources[parameter.offer].entry.wants(item.name)

    def _renamed(self, groups: Sequence[Mapping[str, Any]], source: Source) -> list[dict[str, Any]]:
        """Return saved groups with the names that their parameters have here."""
        there = {parameter: _source(parameter, source) for parameter in self._optimizer.names}
        called = [set(self._by_model_names(source, {name: name for name in group[NAMES]})) for group in groups]
        return [
            {**group, NAMES: [parameter for parameter, name in there.items() if name in names]}
            for group, names in zip(groups, called, strict=True)
        ]

    def _state_of(self, parameter: str, item: Planned, offer: int) -> Mapping[str, Any]:
        source, (there, _, name) = self._sources[offer], item.source.rpartition("@")
        if (offer, name) not in self._saved:
            self._saved[offer, name] = self._read(offer, name)
        states = self._saved[offer, name]
        if there not in states:
            found, expected = f"no parameter {there!r}", "the one that the manifest names"
            raise source.corrupt(layout.EXTRA, repr(name), found=found, expected=expected)
        shape, values = states[there]
        if shape != tuple(self._parameters[parameter].shape):  # only of those that are not in the state dict
            log.warning("%s: %r has another shape here: its state in %r starts fresh", source.label, there, name)
            return {}
        values = _fitted(values, lambda: (values, self._optimizer.like(parameter, values)), source)
        return deepcopy(values) if self._uses[offer, item.source] > 1 else values  # torch takes the tensors over

    def _read(self, offer: int, name: str) -> _States:
        """Return the states that an optimizer has in a checkpoint, by the names in the plan."""
        source = self._sources[offer]
        if name not in source.extras_of_ranks or not self._target.extra.gathers(self._name):
            return self._named(source, name, self._value(source, name))
        items = [self._planned[state_name(parameter, self._name)] for parameter in self._parameters]
        wanted = {item.source.rpartition("@")[0] for item in items if item.offer == offer}
        found: _States = {}
        for shard in sorted(range(source.shards), key=lambda shard: shard != self._target.shard):
            if all(there in found and found[there][1] for there in wanted):
                break  # most often a rank has saved all that it needs
            state = source.read_once(layout.extra_of(shard)).get(name)
            for there, (shape, values) in (self._named(source, name, state) if state is not None else {}).items():
                if there in wanted and (values or there not in found):
                    found[there] = (shape, values)
        return found

    def _value(self, source: Source, name: str) -> Any:
        if name not in source.extras_of_ranks:
            return source.value(layout.EXTRA, name)
        return source.own_state(layout.extra_of, name, min(self._target.shard, source.shards - 1))

    def _named(self, source: Source, name: str, saved: Any) -> _States:
        if not is_named(saved):
            expected = "the state of an optimizer with the names of its parameters, as the manifest says"
            raise source.corrupt(layout.EXTRA, repr(name), found=type(saved).__name__, expected=expected)
        return self._by_model_names(source, states_by_name(saved))

    def _by_model_names(self, source: Source, found: Mapping[str, _T]) -> dict[str, _T]:
        """Return what is known by saved names of parameters by the names in the plan."""
        return source.under_names_of(self._live, found)


def _fitted(saved: Any, beside: Callable[[], tuple[Any, Any]], source: Source) -> Any:
    """Return state with its sharded tensors as they lie here; what is beside it here is asked for where it matters."""
    try:
        return fitted(*beside(), source.tensors) if may_be_sharded() or has_stand_ins(saved) else saved
    except RecursionError:  # nested without end: the optimizer may refuse it
        return saved


def _source(parameter: str, source: Source) -> str:
    """Return what a parameter of the model is called in a checkpoint, where the rules agree on it."""
    try:
        return source.entry.renames.source(Name("dense", parameter))
    except ValueError:
        return parameter
