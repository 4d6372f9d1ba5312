"""The optimizers of torch whose states are slots of live tables: their names here, and which rows a step changes.

A rule says that no row without a gradient changes only where that follows from its arithmetic, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from recckpt.live.optimizer_slots import PREFIXES, slot_of

Group = Mapping[str, Any]


def _adam_keys(group: Group) -> list[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]


def _adam_reason(group: Group) -> str | None:
    return "its moments move every row at each step"


def _adagrad_reason(group: Group) -> str | None:
    if group["weight_decay"]:
        return "weight decay moves every row at each step"
    return "with eps=0 or maximize, rows without a gradient change" if group["maximize"] or not group["eps"] else None


def _sgd_reason(group: Group) -> str | None:
    if group["weight_decay"] or group["momentum"]:
        return f"{'weight decay' if group['weight_decay'] else 'momentum'} moves every row at each step"
    return "with maximize, rows without a gradient may change" if group["maximize"] else None


@dataclass(frozen=True)
class TorchRule:
    """One optimizer of torch.

    Attributes:
        prefix: of the names of its slots; its keys follow.
        keys: of the states that have a value a row, by the settings of a group.
        reason: why a step may change rows without a gradient, None where it does not.
        refusal: why a group cannot be saved as a table, None where it can.
        others: keys of the states that it has with other settings.
    """

    prefix: str
    keys: Callable[[Group], list[str]]
    reason: Callable[[Group], str | None]
    refusal: Callable[[Group], str | None] = lambda group: None
    others: tuple[str, ...] = ()

    def slots(self, group: Group) -> dict[str, str]:
        """Return key of a state -> slot."""
        return {key: slot_of(self.prefix, key) for key in self.keys(group)}


_AMSGRAD = ("max_exp_avg_sq",)
_RULES: Mapping[type[Optimizer], TorchRule] = {  # of exactly these classes: a subclass may do anything
    optim.SparseAdam: TorchRule(PREFIXES["SparseAdam"], _adam_keys, lambda group: None),
    optim.Adam: TorchRule(PREFIXES["Adam"], _adam_keys, _adam_reason, others=_AMSGRAD),
    optim.AdamW: TorchRule(PREFIXES["AdamW"], _adam_keys, _adam_reason, others=_AMSGRAD),
    optim.Adagrad: TorchRule(PREFIXES["Adagrad"], lambda group: ["sum"], _adagrad_reason),
    optim.SGD: TorchRule(
        PREFIXES["SGD"],
        lambda group: ["momentum_buffer"] if group["momentum"] else [],
        _sgd_reason,
        lambda group: (
            "dampening spares its first step: use dampening=0" if group["momentum"] and group["dampening"] else None
        ),
        others=("momentum_buffer",),
    ),
}
KNOWN = tuple(kind.__name__ for kind in _RULES)


def rule_of(optimizer: Optimizer) -> TorchRule | None:
    """Return what is known of an optimizer, None where that is nothing."""
    return _RULES.get(type(optimizer))


def make_state(optimizer: Optimizer, group: Group, parameter: Tensor, rule: TorchRule) -> None:
    """Give a parameter the state that its first step would make, so that its slots are there from the beginning."""
    keys = rule.keys(group)
    if not keys:  # SGD without momentum: optimizer.state would get an empty entry
        return
    state = optimizer.state[parameter]
    for key in keys:
        if state.get(key) is None:
            first = group.get("initial_accumulator_value", 0.0) if key == "sum" else 0.0
            state[key] = torch.full_like(parameter.detach(), first, memory_format=torch.preserve_format)
    if "step" not in state and not isinstance(optimizer, optim.SGD):
        state["step"] = 0 if isinstance(optimizer, optim.SparseAdam) else _zero_step(group, parameter)


def set_step(optimizer: Optimizer, parameter: Tensor, step: int) -> None:
    """Set the steps of a parameter, in place where torch keeps them in a tensor."""
    state = optimizer.state.get(parameter, {})
    if isinstance(state.get("step"), Tensor):
        state["step"].fill_(step)
    elif "step" in state:
        state["step"] = step


def _zero_step(group: Group, parameter: Tensor) -> Tensor:
    """Return the step 0 as torch makes it."""
    is_on_device = group.get("capturable") or group.get("fused")
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group.get("fused") else torch.float32
    return torch.zeros((), dtype=dtype, device=parameter.device if is_on_device else None)
