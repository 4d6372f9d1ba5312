"""Torch optimizers whose state is saved by the names of parameters; with ZeRO, each rank saves its part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from recckpt.dense.keyed_optimizer import KeyedOptimizer, is_keyed
from recckpt.dense.optimizer_class import updater

NAMES = "param_names"  # part of the format, and torch's own word for it
SHAPES = "param_shapes"  # part of the format: moments need not have the parameter's shape, so it is kept beside


class NamedOptimizer:
    """Wraps an optimizer for checkpoints: torch's own state dict, with ``param_names`` beside the indices.

    An optimizer whose state is of another form keeps that form.
    ``named_parameters`` gives (name, parameter) of the model as it is now, of a tied parameter each of its names.
    ``is_table`` says of a parameter that it is saved as a table, with its states: they are not saved here, and a load
    leaves them as they are.
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
        """Return the optimizer's state dict with the names and shapes of the parameters in each group."""
        state = self._state_dict()
        if not _is_torchs(state):
            return state
        groups = []
        for group, live, names in zip(
            state["param_groups"], self.optimizer.param_groups, self._group_names(), strict=True
        ):
            shapes = [list(parameter.shape) for parameter in live["params"]]
            groups.append({**group, NAMES: [first for first, *_ in names], SHAPES: shapes})
        return {**state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`composed` has made, or a state without names, which torch refuses where it does not fit."""
        if is_named(state):
            groups = zip(self.optimizer.param_groups, state["param_groups"], strict=True)
            state = {**state, "param_groups": [self._loaded_group(live, saved) for live, saved in groups]}
        self._give(dict(state))

    def _loaded_group(self, live: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group with saved settings; those of tables alone have theirs by now, with their rows."""
        is_of_tables = len(live["params"]) > 0 and all(map(self._is_table, live["params"]))
        return {**live, **({"params": saved["params"]} if is_of_tables else _without_names(saved))}

    def composed(
        self, states: Mapping[str, Mapping[str, Any]], settings: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        """Return the state dict with other ``states`` of some parameters, empty where one starts fresh.

        The settings of each group come from that of the ``settings`` which shares most names; None keeps them.
        """
        live = self.state_dict()
        state = dict(live["state"])
        for group in live["param_groups"]:
            group.update(_settings_for(group[NAMES], settings or []))
            for index, name in zip(group["params"], group[NAMES], strict=True):
                if name in states:
                    state[index] = states[name]
        return {**live, "state": {index: values for index, values in state.items() if values}}

    def beside(self, saved: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return the entries of a state without names that fit a parameter here by place, and live values alike."""
        if not isinstance(saved.get("state"), Mapping):
            return saved, {}
        if "param_groups" not in saved:
            return saved, self.optimizer.state_dict()
        indices = (index for group in saved["param_groups"] for index in group["params"])
        here = {index: parameter for index, (_, parameter) in zip(indices, self._flat(), strict=False)}
        taken = {index: values for index, values in saved["state"].items() if index in here}
        like = {i: self._like(here[i], values) for i, values in taken.items() if isinstance(values, Mapping)}
        return {**saved, "state": taken}, {"state": like}

    def like(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return live values that lie as those of a parameter's saved state are to lie."""
        return self._like(self.parameters[name], values)

    def _like(self, parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        own = self.optimizer.state.get(parameter, {})
        return {key: own.get(key, parameter) for key in values}  # moments lie as the parameter does

    @property
    def goes_by_name(self) -> bool:
        """Whether its state is of torch's form, so that each parameter's can come from another place."""
        try:
            return is_named(self.state_dict())
        except ValueError:  # ZeRO before its first step, which a save and a load refuse
            return False

    @property
    def names(self) -> list[tuple[str, ...]]:
        """The names of its parameters, on all ranks: of a tied one first that by which its state is saved.

        Empty parameters have no state: those that stand for the rows of tables.
        """
        groups = zip(self._group_names(), self.optimizer.param_groups, strict=True)
        pairs = (pair for names, group in groups for pair in zip(names, group["params"], strict=True))
        return [names for names, parameter in pairs if has_values(parameter) and not self._is_table(parameter)]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Its parameters by name: of those that are spread over ranks, the ones that this rank has the state of."""
        return {name: some for name, some in self._flat() if has_values(some) and self._is_own(some)}

    def _state_dict(self) -> dict[str, Any]:
        state, tables = self.optimizer.state_dict(), self._states_of_tables()
        return {**state, "state": {i: one for i, one in state["state"].items() if i not in tables}} if tables else state

    def _give(self, state: dict[str, Any]) -> None:
        tables = self._states_of_tables()
        if tables:
            state = {**state, "state": dict(sorted({**state["state"], **tables}.items()))}
        self.optimizer.load_state_dict(state)

    def _is_own(self, parameter: Tensor) -> bool:
        """Say whether this rank has the state of a parameter that is saved here."""
        return not self._is_table(parameter)

    def _states_of_tables(self) -> dict[int, Any]:
        """Return torch's index -> state of the parameters that are saved as tables."""
        live = [(i, one) for i, (_, one) in enumerate(self._flat()) if self._is_table(one)]
        own = updater(self.optimizer).state if live else {}
        return {i: own[one] for i, one in live if one in own}

    def _flat(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) in the order of torch's indices."""
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        yield from zip((names[0] for group in self._group_names() for names in group), parameters, strict=True)

    def _group_names(self) -> list[list[tuple[str, ...]]]:
        known: dict[int, tuple[str, ...]] = {}
        for name, parameter in self._named_parameters():
            known[id(parameter)] = (*known.get(id(parameter), ()), name)
        return [
            [known.get(id(parameter), (f"group {group}, parameter {i}",)) for i, parameter in enumerate(live["params"])]
            for group, live in enumerate(self.optimizer.param_groups)
        ]


def is_named(saved: Any) -> bool:
    """Say whether a saved state has the names of the parameters, as that of a :class:`NamedOptimizer` does."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        return False
    groups = saved.get("param_groups")
    return (
        isinstance(groups, list)
        and len(groups) > 0
        and all(isinstance(group, Mapping) and _has_names(group) for group in groups)
    )


def _is_torchs(state: Mapping[str, Any]) -> bool:
    """Say whether the state of an optimizer names its parameters by number, as torch's own do."""
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(type(index) is int for group in groups for index in group["params"])


def states_by_name(saved: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], Mapping[str, Any]]]:
    """Return parameter -> (its shape, its state) of a saved state with names."""
    return {
        name: (tuple(shape), saved["state"].get(index, {}))
        for group in saved["param_groups"]
        for name, shape, index in zip(group[NAMES], group[SHAPES], group["params"], strict=True)
    }


def state_names(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``parameter@optimizer`` of all dense optimizers among the states of registered objects."""
    named = {name: states_by_name(state) for name, state in extra.items() if is_named(state)}
    return tuple(f"{parameter}@{name}" for name, states in named.items() for parameter in states)


def _has_names(group: Mapping[str, Any]) -> bool:
    lists = [group.get(key) for key in (NAMES, SHAPES, "params")]
    return all(isinstance(names, list) for names in lists) and len({len(names) for names in lists if names}) <= 1


def _settings_for(names: list[str], saved_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of the saved group that shares most names, or nothing where none does."""
    best = max(saved_groups, key=lambda group: len(set(names) & set(group[NAMES])), default=None)
    if best is None or not set(names) & set(best[NAMES]):
        return {}
    return {key: value for key, value in _without_names(best).items() if key != "params"}


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in (NAMES, SHAPES)}


def is_zero(optimizer: Optimizer) -> bool:
    """Say whether an optimizer has a part of the parameters: a ``ZeroRedundancyOptimizer``, or what gathers like it."""
    return callable(getattr(optimizer, "consolidate_state_dict", None))


def by_name(
    obj: Any,
    named_parameters: Callable[[], Any],
    is_table: Callable[[Tensor], bool] = lambda parameter: False,
    is_table_key: Callable[[str], bool] = lambda name: False,
) -> Any:
    """Return what stands for a registered object: dense optimizers keep their state by the names of parameters.

    ``is_table`` is as of :class:`NamedOptimizer`, and ``is_table_key`` as ``is_table`` of :class:`KeyedOptimizer`.
    """
    if not isinstance(obj, Optimizer):
        return obj
    if is_keyed(obj):
        return KeyedOptimizer(obj, is_table_key)
    return (ZeroOptimizer if is_zero(obj) else NamedOptimizer)(obj, named_parameters, is_table)


class ZeroOptimizer(NamedOptimizer):
    """Wraps a ``ZeroRedundancyOptimizer``: the state of the parameters that this rank updates, under their names.

    Nothing is sent between ranks. Which parameters are whose depends on the number of ranks, so a load looks for its
    own in what all ranks have saved.
    """

    def _state_dict(self) -> dict[str, Any]:
        own, numbers = self._local.state, count()
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]} for group in self.optimizer.param_groups
        ]
        state = {index: own[parameter] for index, (_, parameter) in enumerate(self._flat()) if parameter in own}
        return {"state": state, "param_groups": groups}

    def _give(self, state: dict[str, Any]) -> None:
        self._local.state.clear()
        self.optimizer.load_state_dict(state)
        self.optimizer.state.clear()  # torch keeps an unused second copy there

    def _is_own(self, parameter: Tensor) -> bool:
        return any(parameter is own for group in self._local.param_groups for own in group["params"])

    @property
    def _local(self) -> Any:
        """The optimizer that updates the parameters of this rank."""
        local = getattr(self.optimizer, "optim", None)
        if local is None:
            raise ValueError(
                f"{type(self.optimizer).__name__} has no state before its first steps with overlap_with_ddp=True"
            )
        return local


def has_values(parameter: Tensor) -> bool:
    """Say whether a parameter has values, as that of a table has not; ``ShardedTensor`` does not know its ``numel``."""
    return is_lazy(parameter) or 0 not in parameter.size()
