"""``nn.Embedding`` and ``nn.EmbeddingBag`` with an optimizer of torch as live tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.live.hooks import WeakDoor
from recckpt.live.torch_rules import TorchRule, make_state, set_step
from recckpt.types import EMBEDDING, Box, Door

_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a float


class TorchEmbedding:
    """The weight of an embedding, and what its optimizer keeps of each row.

    Args:
        name: in checkpoints.
        module: whose weight it is.
        optimizer: that trains it; None where the weight is frozen.
        rule: of the optimizer.
    """

    def __init__(
        self, name: str, module: nn.Embedding | nn.EmbeddingBag, optimizer: Optimizer | None, rule: TorchRule | None
    ) -> None:
        self.name, self.n_rows = name, len(module.weight)
        self._module, self._optimizer, self._rule = module, optimizer, rule
        if optimizer is not None and rule is not None:
            make_state(optimizer, self._group, module.weight, rule)

    @property
    def weight(self) -> Tensor:
        """The weight of now."""
        return self._module.weight

    @property
    def reason(self) -> str | None:
        """Why rows may change that have no gradient; None where none does."""
        return self._rule.reason(self._group) if self._rule else None

    def box(self) -> Box:
        """Return all rows."""
        return Box((0, self.n_rows))

    def prepare(self) -> None:
        """Do nothing: the memory is what it seems."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the weight and the states of the optimizer that have a value a row."""
        tensors = {EMBEDDING: self.weight.detach()}
        if self._optimizer is not None and self._rule is not None:
            state = self._optimizer.state.get(self.weight, {})
            slots = self._rule.slots(self._group)
            tensors |= {slot: state[key] for key, slot in slots.items() if isinstance(state.get(key), Tensor)}
        return tensors

    def attach(self, door: Door) -> Callable[[], object]:
        """Announce what a step, a load, and in forward passes ``max_norm`` are about to change."""
        announcer = _Announcer(self, WeakDoor(door))
        module: Any = self._module
        handles = [module.register_load_state_dict_pre_hook(announcer.before_load)]
        if self._optimizer is not None:
            handles.append(self._optimizer.register_step_pre_hook(announcer.before_step))
        if module.max_norm is not None:
            handles.append(module.register_forward_pre_hook(announcer.before_forward))
        return lambda: [handle.remove() for handle in handles]

    def scalars(self) -> Mapping[str, int | float]:
        """Return the steps of the optimizer."""
        step = self._state.get("step")
        return {} if step is None else {"step": int(step)}

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the group of the weight."""
        return {key: value for key, value in self._group.items() if key != "params"} if self._optimizer else {}

    def finish(self, scalars: Mapping[str, int | float], settings: Mapping[str, Any]) -> None:
        """Take over the steps, and what settings the group of the weight has."""
        if self._optimizer is None:
            return
        if "step" in scalars:
            set_step(self._optimizer, self.weight, int(scalars["step"]))
        group = self._group
        for key in group.keys() & settings.keys() - {"params"}:
            group[key] = settings[key]

    @property
    def _state(self) -> Mapping[str, Any]:
        return self._optimizer.state.get(self.weight, {}) if self._optimizer is not None else {}

    @property
    def _group(self) -> dict[str, Any]:
        """The group of the optimizer that has the weight."""
        groups = self._optimizer.param_groups if self._optimizer is not None else ()
        return next((group for group in groups if any(one is self.weight for one in group["params"])), {})


class _Announcer:
    """The hooks of one table; they never raise."""

    def __init__(self, table: TorchEmbedding, door: WeakDoor) -> None:
        self._table, self._door = table, door

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Announce the rows that have a gradient; where a closure makes it, once that has."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._announce_gradient()
            return None

        def announcing() -> Any:
            loss = closure()
            self._announce_gradient()
            return loss

        return ((args[0], announcing, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"})

    def before_load(self, *args: Any) -> None:
        """Announce that a state dict is about to be loaded."""
        self._door.announce_all()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Announce the rows that ``max_norm`` may shorten."""
        self._door.announce(args[0])

    def _announce_gradient(self) -> None:
        grad = self._table.weight.grad
        if grad is None:
            return  # torch's optimizers leave such a parameter as it is
        if self._table.reason is not None:
            self._door.announce_all()
        elif grad.is_sparse:
            self._door.announce(grad._indices()[0])
        else:
            # By bits: a gradient of -0.0 may turn a weight of -0.0 into 0.0.
            bits = grad.detach().contiguous().view(_INT[grad.element_size()])
            self._door.announce(bits.flatten(1).any(1).nonzero())
