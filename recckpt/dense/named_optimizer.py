"""A torch optimizer whose state is saved under its parameters' names, so that it survives a change of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

    def _group_names(self) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        return [
            [names.get(id(parameter), f"group {number}, parameter {i}") for i, parameter in enumerate(group["params"])]
            for number, group in enumerate(self.optimizer.param_groups)
        ]


def is_named(state: Mapping[str, Any]) -> bool:
    """Say whether a saved state has the names of its parameters."""
    groups = state.get("param_groups", ())
    return len(groups) > 0 and all(NAMES in group and SHAPES in group for group in groups)


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


def _settings_for(names: list[str], saved_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of the saved group that shares most names, or nothing where none does."""
    best = max(saved_groups, key=lambda group: len(set(names) & set(group[NAMES])), default=None)
    if best is None or not set(names) & set(best[NAMES]):
        return {}
    return {key: value for key, value in best.items() if key not in ("params", NAMES, SHAPES)}
