"""Finds optimizers and schedulers that train a model but would be missing from a checkpoint."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from recckpt.dense.keyed_optimizer import fused_optimizers, is_keyed
from recckpt.dense.optimizers import groups_of, has_values, layers, lineage_of, scheduled_by, updater
from recckpt.dense.registered import Registry
from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.manifest import Unsaved
from recckpt.live.tables import NO_TABLES, LiveTables
from recckpt.save.choice import Choice
from recckpt.sparse.optim import optimizer as sparse_optimizers
from recckpt.sparse.optim.joint import parts_of
from recckpt.sparse.split import parameters_of, state_of
from recckpt.sparse.table.table import HashTable
from recckpt.text import first_few, plural
from recckpt.types import SavableTable

_Mark = tuple[Any, int]  # (identity of the value, number of writes)
_FEW = 3  # states of this many parameters stand for all states of an optimizer
_A_COPY = 1  # writes of a parameter when weights are copied into it
log = logging.getLogger("recckpt")
_MANY_PASSES = 2  # unused gradients of one backward pass are no sign of a missing optimizer: a user may step by hand
_NAMED = 3  # parameters in a message
_TRAIN_TABLES = (
    "model.parameters() has no rows of tables; make an optimizer of the tables, such as "
    "SparseAdam(recckpt.recis.filter_out_sparse_param(model)), give it to Saver(model, sparse_optim), and call step()"
)
_SPARSE = (
    "a sparse optimizer that was not given to the Saver trains {}: its steps and hyper-parameters are not saved; make "
    "the saver by Saver(model, sparse_optim), with one optimizer of all tables"
)
_UNREGISTERED = (
    "%s of the model (%s) train, and no registered optimizer has them: a resume starts their optimizer from scratch; "
    "call register_for_checkpointing('dense_optim', optimizer) before restore(), or attach(model, [optimizers]), or "
    "requires_grad_(False) on those that must not train"
)
_RESTING = (
    "registered optimizer {!r} has not stepped while its parameters changed: was another optimizer made later? The "
    "registered one is saved, not the one that trains; make the optimizer once, and give it to attach() or "
    "register_for_checkpointing('dense_optim', optimizer)"
)
_SCHEDULED = (
    "a scheduler sets the learning rate of optimizer {!r}, and is not saved: a resume starts its schedule over; call "
    "register_for_checkpointing('scheduler', scheduler) before restore(), or attach(..., schedulers=scheduler)"
)
_STRANGE = (
    "registered optimizer {!r} trains {} that the model does not have, which are not saved: call "
    "register_for_checkpointing('weights', torch.nn.ParameterList(parameters)) before restore(), or make the saver "
    "with a module that also has them"
)
_INSIDE = (
    "registered optimizer {!r} steps another one, its {}, whose state its own state_dict() lacks: a resume starts that "
    "from scratch; call register_for_checkpointing('{}', optimizer.{}) before restore()"
)
_LEFT_OUT = (
    "registered optimizer {!r} leaves the state of {} out of its state_dict(), so a resume starts it over: make a "
    "WarmupOptimizer of each KeyedOptimizer, and a CombinedOptimizer of these"
)
_savers = weakref.WeakValueDictionary[int, "Trainers"]()  # by id; other threads may add savers


class Steps:
    """Which parameters were trained, and which optimizers have not stepped, between two calls of :meth:`look`.

    A parameter counts as trained if, between two calls, it was written several times, or once while it has a gradient.
    A single write without a gradient may be a copy of weights, and a gradient without a write may never be used. Writes
    that torch does not count, by fused kernels or through ``parameter.data``, are not seen.

    Attributes:
        trained: names of the trained parameters.
        resting: names of the optimizers that have not stepped while their parameters were trained by something else.
        scheduled: names of the optimizers whose learning rate a scheduler sets.
    """

    def __init__(self, parameters: Mapping[str, Tensor], optimizers: Mapping[str, Optimizer]) -> None:
        self.trained, self.resting, self.scheduled = set[str](), set[str](), set[str]()
        self._seen = _seen(parameters, optimizers)

    def look(self, parameters: Mapping[str, Tensor], optimizers: Mapping[str, Optimizer]) -> None:
        (written, states, rates), self._seen = self._seen, _seen(parameters, optimizers)
        written_now, states_now, rates_now = self._seen
        moved = {name for name in rates.keys() & rates_now.keys() if rates[name] != rates_now[name]}
        self.scheduled |= {name for name, one in optimizers.items() if _is_scheduled(one, has_moved=name in moved)}
        now = set[str]()
        for name, one in parameters.items():
            (value, count), (before, n_before) = written_now[name], written.get(name, (None, 0))
            n_writes = count - n_before if value == before else 0
            if n_writes > _A_COPY or (n_writes > 0 and one.grad is not None):
                now.add(name)
        idle = {name for name, one in optimizers.items() if _rests(one, states.get(name, []), states_now[name])}
        own = {name: values_of(updater(one)) for name, one in optimizers.items()}
        stepped = {number for name in own.keys() - idle for number in own[name]}
        passed_over = {id(parameters[name]) for name in now} - stepped
        known = {name for name in self.resting & idle if own[name] - stepped}
        self.resting = known | {name for name in idle if own[name] & passed_over}
        self.trained |= now


def values_of(*optimizers: Optimizer) -> set[int]:
    """Return the ids of the parameters that have values; an empty parameter only marks a module."""
    groups = (group for optimizer in optimizers for group in groups_of(optimizer))
    return {id(parameter) for group in groups for parameter in group["params"] if has_values(parameter)}


def _rests(optimizer: Optimizer, before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return whether an optimizer's state shows that it has not stepped; False for optimizers without state."""
    inner = updater(optimizer)
    is_plain = isinstance(inner, SGD) and not any(group.get("momentum") for group in groups_of(inner))
    keeps_state = bool(now) or (type(inner).__module__.startswith("torch.optim.") and not is_plain)
    return keeps_state and before == now


def _is_scheduled(optimizer: Optimizer, *, has_moved: bool) -> bool:
    """Return whether a scheduler sets the rates: torch's wrap ``step``; others set ``initial_lr`` and ``lr``."""
    if any(hasattr(getattr(one, "step", None), "_wrapped_by_lr_sched") for one in layers(optimizer)):
        return True
    return has_moved and any("initial_lr" in group for group in groups_of(optimizer))


def _seen(
    parameters: Mapping[str, Tensor], optimizers: Mapping[str, Optimizer]
) -> tuple[dict[str, _Mark], dict[str, list[_Mark]], dict[str, list[_Mark]]]:
    """Return marks of parameters, optimizer states and learning rates, by name; a mark changes with its value."""
    states, rates = dict[str, list[_Mark]](), dict[str, list[_Mark]]()
    for name, one in optimizers.items():
        few = islice(getattr(updater(one), "state", {}).values(), _FEW)
        states[name] = [_mark(value) for state in few if isinstance(state, Mapping) for value in state.values()]
        rates[name] = [_mark(group.get("lr")) for group in groups_of(one)]
    return {name: _mark(one) for name, one in parameters.items()}, states, rates


def _mark(value: Any) -> tuple[Any, int]:
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    return value if isinstance(value, int | float) else id(value), 0


class Trainers:
    """Finds the optimizers that train a saver's model. Warns once per parameter or table if its optimizer is not saved.

    There is no warning if another saver of this process saves the optimizer, or if this saver leaves out optimizer
    slots on purpose. Parameters, tables and registered objects are looked up again at each save.
    """

    def __init__(
        self,
        model: nn.Module,
        sparse_optim: Optimizer | None,
        extra: Registry,
        choice: Choice,
        live_tables: LiveTables = NO_TABLES,
    ) -> None:
        self._model, self._sparse_optim, self._extra, self._live_tables = model, sparse_optim, extra, live_tables
        self._is_for_serving = choice.leaves_out_optimizers and sparse_optim is None
        self._keyed: list[Any] = [one for one in (*live_tables.optimizers, *fused_optimizers(model)) if is_keyed(one)]
        self._logged: set[Hashable] = set()
        self.look_anew()
        _savers[id(self)] = self

    def look_anew(self) -> None:
        """Start counting again, for example after a load, because loads write parameters, too."""
        self._steps = Steps(self._parameters(), self._optimizers())

    def unsaved(self, tables: Mapping[str, SavableTable], extras: Mapping[str, Any], *, is_logged: bool) -> Unsaved:
        """Return what a save with these states of registered objects lacks; log it if ``is_logged``."""
        if self._is_for_serving:
            return Unsaved()
        parameters, optimizers = self._parameters(), self._optimizers()
        self._steps.look(parameters, optimizers)
        known = [one for one in _objects() if isinstance(one, Optimizer)]
        keys, resting = self._keys_left(known), [name for name in optimizers if name in self._steps.resting]
        names = list(dict.fromkeys([*keys, *self._names_left(parameters, extras, known)]))
        trained, piled = self._tables_left(tables)
        scheduled, strange = self._schedules_left(optimizers, extras), self._strange()
        if is_logged:
            self._warn_of_dense(names, resting)
            for name in scheduled:
                self._warn(("scheduled", name), _SCHEDULED.format(name))
            for name, attribute in self._inside(extras):
                self._warn(("inside", name, attribute), _INSIDE.format(name, attribute, attribute, attribute))
            for name, number in strange.items():
                self._warn(("strange", name), _STRANGE.format(name, plural(number, "parameter")))
            for name, keys in self._left_out().items():
                self._warn(("left out", name), _LEFT_OUT.format(name, first_few(keys, _NAMED)))
            self._warn_of_tables(trained, piled)
        else:  # each rank has its own states of TorchRec's tables
            self._warn_of_dense(keys, ())
        return Unsaved(tuple(names), tuple(resting), trained, piled, scheduled, tuple(strange))

    def check_restore(self, *, is_logged: bool) -> None:
        """Warn of tables before a restore. Optimizers of dense parameters can only be checked at a save. Collective."""
        if self._is_for_serving:
            return
        tables, _ = state_of(self._model)  # on all ranks, because those of FullyShardedDataParallel gather it
        if is_logged:
            self._warn_of_tables(self._tables_left(tables)[0], ())

    def _parameters(self) -> dict[str, Tensor]:
        named = ((name, one) for name, one in parameters_of(self._model) if one.requires_grad and has_values(one))
        return {name: one for name, one in named if not is_lazy(one)}

    def _registered(self) -> dict[str, Optimizer]:
        return {name: obj for name, obj in self._extra.objects.items() if isinstance(obj, Optimizer)}

    def _optimizers(self) -> dict[str, Optimizer]:
        """Return the optimizers whose steps are watched, by name; without TorchRec's, which have another form."""
        listed = {f"optimizers[{i}] of live_tables": one for i, one in enumerate(self._live_tables.optimizers)}
        sparse = {SPARSE_OPTIM: self._sparse_optim} if self._sparse_optim is not None else {}
        named = {**listed, **self._registered(), **sparse}
        names = {id(updater(one)): name for name, one in named.items()}  # registered optimizers keep their own names
        return {name: named[name] for name in names.values() if not is_keyed(named[name])}

    def _names_left(
        self, parameters: Mapping[str, Tensor], extras: Mapping[str, Any], known: Sequence[Optimizer]
    ) -> list[str]:
        """Return the trained parameters whose optimizer state is in neither a registered object nor a table."""
        in_hand = values_of(*known) | {id(weight) for weight in self._live_tables.weights_with_states()}
        left = [name for name, one in parameters.items() if name in self._steps.trained and id(one) not in in_hand]
        if not left:
            return []
        own = _saved_parameters()  # wrappers may train copies of these, as SafeFP16Optimizer does
        named = {name for name, one in self._registered().items() if is_keyed(one) or values_of(one) & own}
        others = (extras.get(name) for name in self._extra.objects.keys() - named)
        return left if len({id(parameters[name]) for name in left}) > sum(map(_n_optimized, others)) else []

    def _keys_left(self, known: Sequence[Any]) -> list[str]:
        """Return the parameters whose state in a TorchRec optimizer is not saved."""
        saved = {key for one in known if is_keyed(one) for key in one.params}
        in_hand = values_of(*known)
        return [
            key
            for optimizer in self._keyed
            for key, state in optimizer.state_dict()["state"].items()
            if state and not self._live_tables.has_key(key) and key not in saved
            if id(optimizer.params[key]) not in in_hand
        ]

    def _tables_left(self, tables: Mapping[str, SavableTable]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tables whose optimizer is not saved, and those whose gradients no optimizer uses."""
        optimizers, saved = _alive(sparse_optimizers.made), [saver._sparse_optim for saver in _alive(_savers)]
        trained, piled = list[str](), list[str]()
        for name, table in tables.items():
            if isinstance(table, HashTable):
                own = [optimizer for optimizer in optimizers if optimizer.trains(table)]
                if own and not any(optimizer is one for optimizer in own for one in saved):
                    trained.append(name)
                if not own and table.pending_gradients.passes_waiting(table.store) >= _MANY_PASSES:
                    piled.append(name)
        return tuple(trained), tuple(piled)

    def _schedules_left(self, optimizers: Mapping[str, Optimizer], extras: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the optimizers whose scheduler is neither registered nor in the state of a registered object."""
        left = [name for name in optimizers if name in self._steps.scheduled]
        others = [name for name, obj in self._extra.objects.items() if not scheduled_by(obj)] if left else []
        if any("last_epoch" in state for name in others for state in _mappings_in(extras.get(name))):
            return ()
        of_schedulers = (one for obj in _objects() for one in scheduled_by(obj))
        known = {id(one) for scheduled in of_schedulers for one in parts_of(*layers(scheduled))}
        return tuple(name for name in left if known.isdisjoint(map(id, layers(optimizers[name]))))

    def _inside(self, extras: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (name, attribute) of optimizers inside registered ones, such as SAM, whose state is saved nowhere."""
        known, of_tables = set(map(id, _objects())), {id(weight) for weight in self._live_tables.weights_with_states()}
        for name, outer in ((name, one) for name, one in self._registered().items() if not is_keyed(one)):
            for attribute, one in vars(outer).items():
                if isinstance(one, Optimizer) and id(one) not in known:
                    own = ((key, state) for key, state in one.state.items() if isinstance(state, Mapping))
                    kinds = {frozenset(s) for key, s in own if isinstance(key, Tensor) and id(key) not in of_tables}
                    saved = set(map(frozenset, _mappings_in(extras.get(name)))) if kinds else set()
                    if any(not any(kind <= each for each in saved) for kind in kinds):
                        yield name, attribute

    def _strange(self) -> dict[str, int]:
        """Return how many unsaved parameters each registered optimizer has trained."""
        stepped = {
            name: values_of(one) & {id(key) for key in getattr(updater(one), "state", ())}
            for name, one in self._registered().items()
            if not is_keyed(one)
        }
        known = _saved_parameters() if any(stepped.values()) else set()
        return {name: number for name, some in stepped.items() if (number := len(some - known))}

    def _left_out(self) -> dict[str, list[str]]:
        """Return the keys whose state a registered TorchRec optimizer has, and its state dict lacks, by optimizer.

        A WarmupOptimizer puts the state of its schedule into a copy if a CombinedOptimizer is inside it.
        """
        left = dict[str, list[str]]()
        for name, one in ((name, one) for name, one in self._registered().items() if is_keyed(one)):
            optimizer: Any = one
            kept = optimizer.state_dict()["state"]
            if keys := [key for key, value in optimizer.params.items() if key not in kept and value in optimizer.state]:
                left[name] = keys
        return left

    def _warn_of_dense(self, names: Sequence[str], resting: Sequence[str]) -> None:
        if new := [name for name in names if name not in self._logged]:
            self._logged.update(new)
            log.warning(_UNREGISTERED, plural(len(new), "parameter"), first_few(new, _NAMED))
        for name in resting:
            self._warn(("resting", name), _RESTING.format(name))

    def _warn_of_tables(self, trained: Sequence[str], piled: Sequence[str]) -> None:
        # Registered optimizers of nothing but empty parameters.
        registered = (one for one in self._registered().values() if any(group["params"] for group in groups_of(one)))
        idle = [lineage_of(one)[0] for one in registered if not values_of(one)]
        for kind in idle:
            self._warn(("idle", kind), f"{kind} trains nothing: all its parameters are empty, because {_TRAIN_TABLES}")
        for name in () if idle else piled:
            self._warn(
                ("piled", name), f"no optimizer trains table {name!r}, so its gradients are never used: {_TRAIN_TABLES}"
            )
        if trained:
            self._warn(("trained", *trained), _SPARSE.format(", ".join(map(repr, trained))))

    def _warn(self, key: Hashable, text: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            log.warning("%s", text)


def _alive(known: weakref.WeakValueDictionary[int, Any]) -> list[Any]:
    return [one for reference in known.valuerefs() if (one := reference()) is not None]


def _objects() -> list[Any]:
    return [obj for saver in _alive(_savers) for obj in saver._extra.objects.values()]


def _saved_parameters() -> set[int]:
    """Return the ids of the parameters that savers of this process save, by model or registered module."""
    modules = [*(saver._model for saver in _alive(_savers)), *(obj for obj in _objects() if isinstance(obj, nn.Module))]
    return {id(one) for module in modules for one in module.parameters()}


def _mappings_in(state: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(state, Mapping):
        yield state
    for value in state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ():
        yield from _mappings_in(value)


def _n_optimized(state: Any) -> int:
    """Return how many parameters are in optimizer states in ``state``, the state of an object that may have some."""
    lists = (groups for each in _mappings_in(state) if isinstance(groups := each.get("param_groups"), list))
    return sum(len(group.get("params", ())) for groups in lists for group in groups if isinstance(group, Mapping))
