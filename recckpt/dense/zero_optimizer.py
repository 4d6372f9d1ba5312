"""An optimizer whose state lies on many ranks, as with ZeRO: each saves its part, and finds its own again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from torch import Tensor

from recckpt.dense.named_optimizer import NamedOptimizer, is_named, names_by_index


def is_zero(optimizer: object) -> bool:
    """Say whether an optimizer is a ``ZeroRedundancyOptimizer``, or another that gathers its state as that does."""
    return callable(getattr(optimizer, "consolidate_state_dict", None))


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
        self.optimizer.state.clear()  # torch keeps a second copy there, which nobody reads

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
