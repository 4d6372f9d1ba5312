"""Saves and loads the states of torch optimizers by parameter name, also of wrapped optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from inspect import signature
from itertools import chain, count
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from recckpt.dense.keyed_optimizer import KeyedOptimizer, is_keyed
from recckpt.dense.sharded import laid_out_as
from recckpt.format.manifest import Lineage
from recckpt.types import GEOMETRY

NAMES = "param_names"  # part of the format; torch uses the same key
SHAPES = "param_shapes"  # part of the format: shapes of parameters, because moments may have other shapes
_INNER = ("optimizer", "optim")  # attributes in which accelerate's wrapper and ZeRO hold the wrapped optimizer
_STEP = "step"  # torch converts this entry itself if kernels need float32 on the device


def updater(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that updates parameters: the innermost optimizer if ``optimizer`` is a wrapper."""
    inner = next((wrapped for name in _INNER if isinstance(wrapped := getattr(optimizer, name, None), Optimizer)), None)
    return optimizer if inner is None or inner is optimizer else updater(inner)


def layers(optimizer: Any) -> tuple[Optimizer, Optimizer]:
    return (optimizer, updater(optimizer))


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups, or those of a wrapper's inner optimizer (``SafeFP16Optimizer``)."""
    own = (getattr(one, "param_groups", None) for one in layers(optimizer))
    return next((groups for groups in own if groups is not None), [])


def counted_in_groups(optimizer: Any) -> set[str]:
    """Return the entries of groups that training sets, such as ``k`` of schedule-free optimizers: users pass none.

    A class with ``**kwargs`` for an inner optimizer does not name its settings: only ``step`` counts there.
    """
    one = updater(optimizer)
    kinds = [kind for kind in type(one).__mro__ if issubclass(kind, Optimizer)]
    settings = {name for kind in kinds for name in signature(kind.__init__).parameters}
    return {_STEP, *(set(getattr(one, "defaults", ())) - settings if "lr" in settings else ())}


def lineage_of(optimizer: Optimizer) -> Lineage:
    """Return the names of the optimizer's class and its base classes that are optimizers.

    The names have no modules, so that a class that moved to another module counts as the same class.
    """
    kinds = (kind for kind in type(updater(optimizer)).__mro__ if issubclass(kind, Optimizer) and kind is not Optimizer)
    return tuple(kind.__name__ for kind in kinds) or (type(optimizer).__name__,)


def schedulers_in(obj: Any) -> Iterator[LRScheduler]:
    """Yield a scheduler, or the ``scheduler`` of a wrapper, and then all schedulers inside it."""
    if not isinstance(obj, LRScheduler):
        obj = getattr(obj, "scheduler", None)
    if isinstance(obj, LRScheduler):
        yield obj
        for inner in getattr(obj, "_schedulers", ()):
            yield from schedulers_in(inner)


def scheduled_by(obj: Any) -> list[Optimizer]:
    """Return the optimizers that a scheduler of any kind refers to; accelerate's schedulers have several."""
    if isinstance(obj, Optimizer):
        return []
    several = getattr(obj, "optimizers", None)
    named = [getattr(one, "optimizer", None) for one in (obj, *schedulers_in(obj))]
    named += several if isinstance(several, list | tuple) else []
    return [one for one in named if isinstance(one, Optimizer)]


def is_zero(optimizer: Optimizer) -> bool:
    return callable(getattr(optimizer, "consolidate_state_dict", None))


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the whole shape of a parameter; (-1,) before the first batch of a lazy module."""
    return (-1,) if is_lazy(parameter) else tuple(getattr(parameter, GEOMETRY[0], parameter.shape))


def has_values(parameter: Tensor) -> bool:
    """Return whether a parameter is not empty, as placeholders of tables are; ``ShardedTensor`` has no ``numel``."""
    return is_lazy(parameter) or 0 not in parameter.size()


def give_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Call ``load_state_dict`` so that tensors keep their dtype: float32 momentum of bfloat16 weights stays float32.

    A hook undoes the casts of torch's own ``load_state_dict`` before the optimizer's class uses the state. The function
    does the same for optimizers that are attributes of this optimizer.
    """
    optimizers, known = [optimizer], {id(optimizer)}
    with ExitStack() as hooks:
        for each in optimizers:  # the loop appends inner optimizers
            inner = [one for one in vars(each).values() if isinstance(one, Optimizer) and id(one) not in known]
            optimizers += {id(one): one for one in inner}.values()
            known |= set(map(id, inner))
            loading: list[dict[str, Any]] = []  # the state that torch is about to load
            try:
                before = each.register_load_state_dict_pre_hook(partial(_note, loading))
                after = each.register_load_state_dict_post_hook(partial(_mend, loading), prepend=True)
            except AttributeError:  # a wrapper that never called Optimizer.__init__ does not use torch's load either
                continue
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        optimizer.load_state_dict(state)


def _note(loading: list[dict[str, Any]], optimizer: Optimizer, state: dict[str, Any]) -> None:
    loading[:] = [state]


def _mend(loading: list[dict[str, Any]], optimizer: Optimizer) -> None:
    groups, own_groups = loading[-1]["param_groups"], optimizer.param_groups
    indices = chain.from_iterable(group["params"] for group in groups)
    for index, parameter in zip(indices, chain.from_iterable(group["params"] for group in own_groups), strict=False):
        saved, own = loading[-1]["state"].get(index), optimizer.state.get(parameter)
        if isinstance(saved, Mapping) and isinstance(own, dict):
            own.update({key: _as_saved(own[key], saved[key]) for key in own if key in saved and key != _STEP})


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return the saved value, on the device of ``loaded``, if torch cast it to another dtype; otherwise ``loaded``."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        is_cast = loaded.dtype != saved.dtype and loaded.shape == saved.shape
        return saved.to(device=loaded.device) if is_cast else loaded
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {key: _as_saved(value, saved[key]) if key in saved else value for key, value in loaded.items()}
    if type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(loaded) == len(saved):
        return type(loaded)(map(_as_saved, loaded, saved))
    return saved if isinstance(saved, str) else loaded  # torch makes another string by iterating over one


def is_named(saved: Any) -> bool:
    """Return whether a saved state has parameter names, like the state of a :class:`NamedOptimizer`."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        return False
    groups = saved.get("param_groups")
    if not isinstance(groups, list) or not groups:
        return False
    for group in groups:
        lists = [group.get(key) if isinstance(group, Mapping) else None for key in (NAMES, SHAPES, "params")]
        if not all(isinstance(names, list) for names in lists) or len({len(names) for names in lists if names}) > 1:
            return False
    return True


@dataclass(frozen=True)
class Shared:
    """The part of an optimizer's state that belongs to no single parameter, such as a count of steps."""

    state: Mapping[Any, Any]  # entries of ``state`` other than the states of parameters
    entries: Mapping[str, Any]  # entries of the state dict other than ``state`` and ``param_groups``

    @property
    def by_place(self) -> list[Any]:
        """Keys of values that may depend on the order of parameters: all but plain values such as numbers."""
        return [key for key, value in {**self.state, **self.entries}.items() if not _is_plain(value)]

    def without(self, keys: Container[Any]) -> Shared:
        rest = [{key: value for key, value in part.items() if key not in keys} for part in (self.state, self.entries)]
        return Shared(*rest)


def shared_in(state: Mapping[str, Any]) -> Shared:
    numbers = {index for group in state["param_groups"] for index in group["params"]}
    return Shared(
        {key: values for key, values in state["state"].items() if key not in numbers},
        {key: value for key, value in state.items() if key not in ("state", "param_groups")},
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(isinstance(item, int | float | str) for item in value)
    return value.dim() == 0 if isinstance(value, Tensor) else True


def states_by_name(saved: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], Mapping[str, Any] | None]]:
    """Return name of a parameter -> (shape, state or None) from a saved state with names."""
    return {
        name: (tuple(shape), saved["state"].get(index))
        for group in saved["param_groups"]
        for name, shape, index in zip(group[NAMES], group[SHAPES], group["params"], strict=True)
    }


def state_names(extra: Mapping[str, Any]) -> tuple[str, ...]:
    named = {name: states_by_name(state) for name, state in extra.items() if is_named(state)}
    return tuple(f"{parameter}@{name}" for name, states in named.items() for parameter in states)


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in (NAMES, SHAPES)}


class NamedOptimizer:
    """Wraps an optimizer for checkpoints: its state is torch's state dict with ``param_names`` added to each group.

    A state that does not have the structure of torch's stays unchanged. ``named_parameters`` returns (name, parameter)
    of the model, a tied parameter once per name. ``is_table`` says whether a parameter is saved as a table, together
    with its state; this class leaves such parameters out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Callable[[], Iterable[tuple[str, Tensor]]],
        is_table: Callable[[Tensor], bool] = lambda parameter: False,
    ) -> None:
        self.optimizer = optimizer
        self._named_parameters, self._is_table = named_parameters, is_table

    def state_dict(self) -> dict[str, Any]:
        state = self._state_dict()
        groups = state.get("param_groups")
        if not isinstance(groups, list) or any(type(index) is not int for group in groups for index in group["params"]):
            return state  # in torch's own states, these keys are indices
        named = [
            {**group, NAMES: [names[0] for names, _ in own], SHAPES: [list(shape_of(one)) for _, one in own]}
            for group, own in zip(groups, self._named_groups(), strict=True)
        ]
        indices = (index for group in groups for index in group["params"])
        moments = dict(state.get("state", {}))
        for index, (_, one) in zip(indices, self._flat(), strict=False):
            if hasattr(one, GEOMETRY[1]) and index in moments:
                items = moments[index].items()
                moments[index] = {k: laid_out_as(one, v) if isinstance(v, Tensor) else v for k, v in items}
        return {**state, **({"state": moments} if moments else {}), "param_groups": named}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from :meth:`composed`, or a state without names; torch refuses the latter if it does not fit."""
        if not is_named(state):
            self._give(dict(state), self.optimizer.load_state_dict)
            return
        groups = []
        for live, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            # A load of tables has already set the settings of groups that contain only tables.
            is_of_tables = len(live["params"]) > 0 and all(map(self._is_table, live["params"]))
            groups.append({**live, **({"params": saved["params"]} if is_of_tables else _without_names(saved))})
        self._give({**state, "param_groups": groups}, partial(give_state, self.optimizer))

    def composed(
        self,
        states: Mapping[str, Mapping[str, Any] | None],
        settings: Sequence[Mapping[str, Any]] | None,
        shared: Shared | None = None,
    ) -> dict[str, Any]:
        """Return the state dict with some parts replaced.

        Args:
            states: name of a parameter -> its new state; None resets the state.
            settings: saved groups; each group gets the settings of the saved group that shares most names with it. None
                keeps the settings.
            shared: the new part of the state that belongs to no single parameter; None keeps the present one.
        """
        live = self.state_dict()
        groups, numbers = live["param_groups"], dict[str, list[int]]()
        for number, group in enumerate(settings or []):
            for name in dict.fromkeys(group[NAMES]):
                numbers.setdefault(name, []).append(number)
        state = {index: live["state"].get(index) for group in groups for index in group["params"]}
        for group in groups:
            in_both = Counter(number for name in set(group[NAMES]) for number in numbers.get(name, ()))
            if settings and in_both:
                best = _without_names(settings[min(in_both, key=lambda number: (-in_both[number], number))])
                for key, value in best.items():
                    is_member = isinstance(group.get(key), Enum) and not isinstance(value, Enum)
                    if key != "params":
                        group[key] = type(group[key])(value) if is_member else value
            state |= {i: states[name] for i, name in zip(group["params"], group[NAMES], strict=True) if name in states}
        own = {index: values for index, values in state.items() if values is not None}
        kept = shared or shared_in(live)
        return {**live, **kept.entries, "state": {**kept.state, **own}}

    def beside(self, saved: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return (the entries of a nameless state whose index is that of a parameter, live values as templates)."""
        if not isinstance(saved.get("state"), Mapping):
            return saved, {}
        if "param_groups" not in saved:
            return saved, self.optimizer.state_dict()
        indices = (index for group in saved["param_groups"] for index in group["params"])
        here = {index: parameter for index, (_, parameter) in zip(indices, self._flat(), strict=False)}
        taken = {index: values for index, values in saved["state"].items() if index in here}
        like = {i: self.like(here[i], values) for i, values in taken.items() if isinstance(values, Mapping)}
        return {**saved, "state": taken}, {"state": like}

    def like(self, parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return live tensors with the layouts that the saved ``values`` of a parameter should get, by equal keys."""
        if hasattr(parameter, GEOMETRY[1]):  # zeros, because values outside all shards, such as padding, have no state
            return dict.fromkeys(values, laid_out_as(parameter, parameter.detach().new_zeros(parameter.shape)))
        own = self.optimizer.state.get(parameter, {})
        return {key: own.get(key, parameter) for key in values}  # moments have the layout of the parameter

    @property
    def goes_by_name(self) -> bool:
        """Whether the state has torch's structure, so that a load can set the state of each parameter by name."""
        try:
            return is_named(self.state_dict())
        except ValueError:  # ZeRO before its first step; saves and loads refuse it
            return False

    @property
    def names(self) -> list[tuple[str, ...]]:
        """All names of each parameter on all ranks; the first name of a tied parameter is the one used in saves.

        Empty parameters are left out, because they stand for tables and have no state.
        """
        return [
            names
            for group in self._named_groups()
            for names, one in group
            if has_values(one) and not self._is_table(one)
        ]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> parameter; if the states are distributed among ranks, only parameters whose state this rank has."""
        return {name: some for name, some in self._flat() if has_values(some) and self._is_own(some)}

    @property
    def places(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        """(Name, shape) of each parameter: one list per group, in torch's order."""
        return [[(names[0], shape_of(one)) for names, one in group] for group in self._named_groups()]

    def _state_dict(self) -> dict[str, Any]:
        state, tables = self.optimizer.state_dict(), self._states_of_tables()
        if not tables or "state" not in state:  # the state of a wrapper may have another structure: keep it whole
            return state
        return {**state, "state": {i: one for i, one in state["state"].items() if i not in tables}}

    def _give(self, state: dict[str, Any], load: Callable[[dict[str, Any]], object]) -> None:
        tables = self._states_of_tables()
        if tables and "state" in state:
            others = {key: values for key, values in state["state"].items() if type(key) is not int}
            numbered = {index: state["state"][index] for index in state["state"].keys() - others.keys()} | tables
            state = {**state, "state": {**others, **dict(sorted(numbered.items()))}}
        load(state)

    def _is_own(self, parameter: Tensor) -> bool:
        return not self._is_table(parameter)

    def _states_of_tables(self) -> dict[int, Any]:
        # Like torch, number a parameter that is listed twice by its last place.
        live = {id(one): (i, one) for i, (_, one) in enumerate(self._flat()) if self._is_table(one)}
        own = updater(self.optimizer).state if live else {}
        return {i: own[one] for i, one in live.values() if one in own}

    def _flat(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((names[0], one) for group in self._named_groups() for names, one in group)

    def _named_groups(self) -> list[list[tuple[tuple[str, ...], Tensor]]]:
        known: dict[int, tuple[str, ...]] = {}
        for name, parameter in self._named_parameters():
            known[id(parameter)] = (*known.get(id(parameter), ()), name)
        return [
            [(known.get(id(one), (f"group {group}, parameter {i}",)), one) for i, one in enumerate(live["params"])]
            for group, live in enumerate(self.optimizer.param_groups)
        ]


def by_name(
    obj: Any,
    named_parameters: Callable[[], Any],
    is_table: Callable[[Tensor], bool] = lambda parameter: False,
    is_table_key: Callable[[str], bool] = lambda name: False,
) -> Any:
    """Wrap an optimizer so that its state is keyed by parameter name; return any other object unchanged.

    :class:`NamedOptimizer` gets ``is_table``; :class:`KeyedOptimizer` gets ``is_table_key`` as its ``is_table``.
    """
    if not isinstance(obj, Optimizer) or not hasattr(obj, "param_groups"):  # some wrappers lack these groups
        return obj
    if is_keyed(obj):
        return KeyedOptimizer(obj, is_table_key)
    return (ZeroOptimizer if is_zero(obj) else NamedOptimizer)(obj, named_parameters, is_table)


class ZeroOptimizer(NamedOptimizer):
    """Wraps a ``ZeroRedundancyOptimizer``: the states of the parameters that this rank updates, by name.

    Ranks send each other nothing. The parameters of a rank depend on the number of ranks, so a load searches the saved
    states of all ranks for the parameters of this rank.
    """

    def _state_dict(self) -> dict[str, Any]:
        own, numbers = self._local.state, count()
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]} for group in self.optimizer.param_groups
        ]
        state = {index: own[parameter] for index, (_, parameter) in enumerate(self._flat()) if parameter in own}
        shared = {key: values for key, values in own.items() if not isinstance(key, Tensor)}
        return {"state": {**shared, **state}, "param_groups": groups}

    def _give(self, state: dict[str, Any], load: Callable[[dict[str, Any]], object]) -> None:
        shared = shared_in(state).state if is_named(state) else {}  # removed, because torch reads every key as an index
        self._local.state.clear()
        load({**state, "state": {key: values for key, values in state["state"].items() if key not in shared}})
        self._local.state.update(shared)
        self.optimizer.state.clear()  # torch keeps an unused second copy there

    def _is_own(self, parameter: Tensor) -> bool:
        return any(parameter is own for group in self._local.param_groups for own in group["params"])

    @property
    def _local(self) -> Any:
        local = getattr(self.optimizer, "optim", None)
        if local is None:
            raise ValueError(
                f"{type(self.optimizer).__name__} has no state before its first steps with overlap_with_ddp=True"
            )
        return local
