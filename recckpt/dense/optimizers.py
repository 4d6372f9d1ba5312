"""Torch optimizers whose state is saved by the names of parameters; with ZeRO, each rank saves its part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

NAMES = "param_names"  # part of the format, and torch's own word for it
SHAPES = "param_shapes"  # part of the format: moments need not have the parameter's shape, so it is kept beside


class NamedOptimizer:
    """Wraps an optimizer for checkpoints: torch's own state dict, with ``param_names`` beside the indices.

    An optimizer whose state is of another form, such as TorchRec's KeyedOptimizer, keeps that form.

    Args:
        optimizer: any dense optimizer of torch.
        named_parameters: gives (name, parameter) of the model as it is now.
    """

    def __init__(self, optimizer: Optimizer, named_parameters: Callable[[], Any]) -> None:
        self.optimizer = optimizer
        self._named_parameters = named_parameters
        self.fresh: list[str] = []  # parameters that the last load found no state for

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict with the names and shapes of the parameters in each group."""
        state = self._state_dict()
        if not _is_torchs(state):
            return state
        groups = [
            {**group, NAMES: names, SHAPES: [list(parameter.shape) for parameter in live["params"]]}
            for group, names, live in zip(
                state["param_groups"], self._group_names(), self.optimizer.param_groups, strict=True
            )
        ]
        return {**state, "param_groups": groups}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state dict by names where it has them, else as the optimizer does.

        A parameter without a partner of its name and shape starts fresh and is kept in :attr:`fresh`; a group takes
        the settings of the saved group that most of its parameters were in.

        Raises:
            ValueError: a state dict without names does not fit, as torch says.
        """
        self.fresh = []
        if not is_named(saved):
            self.optimizer.load_state_dict(dict(saved))
            return
        saved_at = {known: index for index, known in names_by_index(saved).items()}
        state: dict[int, Any] = {}
        for index, (name, parameter) in enumerate(self._flat()):
            at = saved_at.get((name, tuple(parameter.shape)))
            if at is None and self._is_own(parameter):
                self.fresh.append(name)
            elif at in saved["state"] and self._is_own(parameter):
                state[index] = saved["state"][at]
        groups, begin = [], 0
        for names, live in zip(self._group_names(), self.optimizer.param_groups, strict=True):
            indices = list(range(begin, begin + len(names)))
            groups.append({**live, **_settings_for(names, saved["param_groups"]), "params": indices})
            begin += len(names)
        self._give({**saved, "state": state, "param_groups": groups})

    def beside(self, saved: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Return what of a saved state has a parameter here, and the live values that have its form.

        What a parameter has no live state for is taken to be like the parameter itself, as moments are.
        """
        if not isinstance(saved.get("state"), Mapping):
            return saved, {}
        if "param_groups" not in saved:
            return saved, self.optimizer.state_dict()
        here, own = self._parameters_by_index(saved), self.optimizer.state
        taken = {i: values for i, values in saved["state"].items() if here.get(i) is not None}
        like = {
            i: {key: own.get(here[i], {}).get(key, here[i]) for key in values}
            for i, values in taken.items()
            if isinstance(values, Mapping)
        }
        return {**saved, "state": taken}, {"state": like}

    def _state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def _give(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def _is_own(self, parameter: Tensor) -> bool:
        """Say whether this rank has the state of a parameter."""
        return True

    def _parameters_by_index(self, state: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the parameter here that each index of a state dict means: by name and shape, or by its place."""
        if not is_named(state):
            flat = [parameter for _, parameter in self._flat()]
            return dict(zip((i for group in state["param_groups"] for i in group["params"]), flat, strict=False))
        named = {(name, tuple(parameter.shape)): parameter for name, parameter in self._flat()}
        return {index: named.get(known) for index, known in names_by_index(state).items()}

    def _flat(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) in the order of torch's indices."""
        for names, group in zip(self._group_names(), self.optimizer.param_groups, strict=True):
            yield from zip(names, group["params"], strict=True)

    @property
    def goes_by_name(self) -> bool:
        """Whether its state is of torch's form, so that each parameter's can come from another place."""
        try:
            return is_named(self.state_dict())
        except ValueError:  # ZeRO before its first step, which a save and a load refuse
            return False

    @property
    def names(self) -> list[str]:
        """The names of its parameters, on all ranks."""
        return [name for name, _ in self._flat()]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Its parameters by name: of those that are spread over ranks, the ones that this rank has the state of."""
        return {name: parameter for name, parameter in self._flat() if self._is_own(parameter)}

    def like(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return live values that lie as those of a parameter's saved state are to lie.

        What a parameter has no live state for is taken to be like the parameter itself, as moments are.
        """
        parameter = self.parameters[name]
        own = self.optimizer.state.get(parameter, {})
        return {key: own.get(key, parameter) for key in values}

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

    def _group_names(self) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        return [
            [names.get(id(parameter), f"group {number}, parameter {i}") for i, parameter in enumerate(group["params"])]
            for number, group in enumerate(self.optimizer.param_groups)
        ]


def is_named(saved: Any) -> bool:
    """Say whether a saved state tells the names of the parameters, as that of a :class:`NamedOptimizer` does."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
        return False
    groups = saved.get("param_groups")
    return (
        isinstance(groups, list)
        and len(groups) > 0
        and all(isinstance(group, Mapping) and _has_names(group) for group in groups)
    )


def names_by_index(state: Mapping[str, Any]) -> dict[Any, tuple[str, tuple[int, ...]]]:
    """Return (name, shape) of the parameter that each index of a saved state with names means."""
    return {
        index: (name, tuple(shape))
        for group in state["param_groups"]
        for name, shape, index in zip(group[NAMES], group[SHAPES], group["params"], strict=True)
    }


def _is_torchs(state: Mapping[str, Any]) -> bool:
    """Say whether the state of an optimizer names its parameters by number, as torch's own do."""
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(type(index) is int for group in groups for index in group["params"])


def states_by_name(saved: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], Mapping[str, Any]]]:
    """Return parameter -> (its shape, its state) of a saved state with names."""
    return {name: (shape, saved["state"].get(index, {})) for index, (name, shape) in names_by_index(saved).items()}


def state_names(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``parameter@optimizer`` of all dense optimizers among the states of registered objects."""
    named = {name: states_by_name(state) for name, state in extra.items() if is_named(state)}
    return tuple(f"{parameter}@{name}" for name, states in named.items() for parameter in states)


def _has_names(group: Mapping[str, Any]) -> bool:
    lists = [group.get(key) for key in (NAMES, SHAPES, "params")]
    return all(isinstance(found, list) for found in lists) and len({len(found) for found in lists if found}) <= 1


def _settings_for(names: list[str], saved_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of the saved group that shares most names, or nothing where none does."""
    best = max(saved_groups, key=lambda group: len(set(names) & set(group[NAMES])), default=None)
    if best is None or not set(names) & set(best[NAMES]):
        return {}
    return {key: value for key, value in best.items() if key not in ("params", NAMES, SHAPES)}


def by_name(obj: Any, named_parameters: Callable[[], Any]) -> Any:
    """Return what stands for a registered object: dense optimizers keep their state by the names of parameters."""
    if not isinstance(obj, Optimizer):
        return obj
    is_zero = callable(
        getattr(obj, "consolidate_state_dict", None)
    )  # ZeroRedundancyOptimizer, and what gathers like it
    return (ZeroOptimizer if is_zero else NamedOptimizer)(obj, named_parameters)


class ZeroOptimizer(NamedOptimizer):
    """Wraps a ``ZeroRedundancyOptimizer``: the state of the parameters that this rank updates, under their names.

    Nothing is sent between ranks. Which parameters are whose depends on the number of ranks, so a load looks for its
    own in what all ranks have saved.
    """

    def gathered(self, states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what this rank needs of the states of several ranks; asks for no more of them than that takes."""
        wanted = {(name, tuple(p.shape)) for name, p in self._flat() if self._is_own(p)}
        found: dict[str, Any] = {}
        for state in states:
            if not is_named(state):
                return dict(state)  # not of such an optimizer, which says so
            names = names_by_index(state)
            taken = {index: values for index, values in state["state"].items() if names[index] in wanted}
            found = found or {**state, "state": {}}
            found["state"] |= taken
            wanted -= {names[index] for index in taken}
            if not wanted:
                break
        return found

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
