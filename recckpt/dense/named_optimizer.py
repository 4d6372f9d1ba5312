"""A torch optimizer whose state is saved under its parameters' names, so that it survives a change of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

NAMES = "param_names"  # part of the format, and torch's own word for it
SHAPES = "param_shapes"  # part of the format: moments need not have the parameter's shape, so it is kept beside


class NamedOptimizer:
    """Wraps an optimizer for checkpoints: torch's own state dict, with ``param_names`` beside the indices.

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
        state = self.optimizer.state_dict()
        groups = [
            {**group, NAMES: names, SHAPES: [list(parameter.shape) for parameter in live["params"]]}
            for group, names, live in zip(
                state["param_groups"], self._group_names(), self.optimizer.param_groups, strict=True
            )
        ]
        return {**state, "param_groups": groups}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state dict by names where it has them, else as torch does.

        A parameter without a partner of its name and shape starts fresh and is kept in :attr:`fresh`; a group takes
        the settings of the saved group that most of its parameters were in.

        Raises:
            ValueError: a state dict without names does not fit, as torch says.
        """
        self.fresh = []
        if not all(NAMES in group and SHAPES in group for group in saved["param_groups"]):
            self.optimizer.load_state_dict(dict(saved))
            return
        saved_at = {
            (name, tuple(shape)): index
            for group in saved["param_groups"]
            for name, shape, index in zip(group[NAMES], group[SHAPES], group["params"], strict=True)
        }
        live, state, param_groups = self.optimizer.state_dict(), {}, []
        groups = zip(live["param_groups"], self._group_names(), self.optimizer.param_groups, strict=True)
        for group, names, live_group in groups:
            param_groups.append({**group, **_settings_for(names, saved["param_groups"])})
            for index, name, parameter in zip(group["params"], names, live_group["params"], strict=True):
                at = saved_at.get((name, tuple(parameter.shape)))
                if at is None:
                    self.fresh.append(name)
                elif at in saved["state"]:
                    state[index] = saved["state"][at]
        self.optimizer.load_state_dict({**live, "state": state, "param_groups": param_groups})

    def beside(self, saved: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return what of a saved state has a parameter here, and the live values that have its form.

        What a parameter has no live state for is taken to be like the parameter itself, as moments are.
        """
        live, here = self.optimizer.state_dict(), self._parameters_by_index(saved)
        own = {id(p): live["state"].get(i, {}) for i, p in self._parameters_by_index(live).items() if p is not None}
        if not isinstance(saved.get("state"), Mapping):
            return saved, {}
        taken = {i: values for i, values in saved["state"].items() if here.get(i) is not None}
        like = {
            i: {key: own.get(id(here[i]), {}).get(key, here[i]) for key in values}
            for i, values in taken.items()
            if isinstance(values, Mapping)
        }
        return {**saved, "state": taken}, {"state": like}

    def _parameters_by_index(self, state: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the parameter here that each index of a state dict means: by name and shape, or by its place."""
        groups = list(zip(self._group_names(), self.optimizer.param_groups, strict=True))
        flat = [p for _, group in groups for p in group["params"]]
        if not all(NAMES in group and SHAPES in group for group in state["param_groups"]):
            return dict(zip((i for group in state["param_groups"] for i in group["params"]), flat, strict=False))
        named = {
            (name, tuple(p.shape)): p for names, group in groups for name, p in zip(names, group["params"], strict=True)
        }
        return {
            index: named.get((name, tuple(shape)))
            for group in state["param_groups"]
            for name, shape, index in zip(group[NAMES], group[SHAPES], group["params"], strict=True)
        }

    def _group_names(self) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self._named_parameters()}
        return [
            [names.get(id(parameter), f"group {number}, parameter {i}") for i, parameter in enumerate(group["params"])]
            for number, group in enumerate(self.optimizer.param_groups)
        ]


def _settings_for(names: list[str], saved_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of the saved group that shares most names, or nothing where none does."""
    best = max(saved_groups, key=lambda group: len(set(names) & set(group[NAMES])), default=None)
    if best is None or not set(names) & set(best[NAMES]):
        return {}
    return {key: value for key, value in best.items() if key not in ("params", NAMES, SHAPES)}
