"""Rules for torch's optimizers with states that become slots of live tables: which rows a step changes.

A rule may declare that rows without a gradient stay unchanged only if a step keeps every bit of these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from recckpt.dense.keyed_optimizer import is_keyed
from recckpt.dense.optimizers import groups_of, is_zero, updater
from recckpt.errors import LiveTableError
from recckpt.live.optimizer_slots import PREFIXES

Group = Mapping[str, Any]
_LEAST_HALF = 2.0**-24  # the smallest positive float16


def _adam_keys(group: Group) -> list[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]


def _adam_reason(group: Group) -> str | None:
    return "its moments move every row at each step"


def _lr_reason(group: Group) -> str | None:
    """Return why a gradient of 0 times the learning rate may be NaN, or None. A rate on a device is not read."""
    lr = group["lr"]
    is_known = not isinstance(lr, Tensor) or lr.device.type == "cpu"
    return None if not is_known or math.isfinite(lr) else f"a learning rate of {float(lr)} turns every row into NaN"


def _adagrad_reason(group: Group) -> str | None:
    if group["eps"] < _LEAST_HALF and any(weight.dtype == torch.float16 for weight in group["params"]):
        return f"eps={group['eps']} is 0 in float16, so rows without a gradient change"
    if group["weight_decay"]:
        return "weight decay moves every row at each step"
    if group["maximize"] or not group["eps"]:
        return "with eps=0 or maximize, rows without a gradient change"
    return _lr_reason(group)


def _sgd_reason(group: Group) -> str | None:
    if group["weight_decay"] or group["momentum"]:
        return f"{'weight decay' if group['weight_decay'] else 'momentum'} moves every row at each step"
    return "with maximize, rows without a gradient may change" if group["maximize"] else _lr_reason(group)


@dataclass(frozen=True)
class TorchRule:
    prefix: str  # prefix of its slot names, before the key of a state
    keys: Callable[[Group], list[str]]  # returns the keys of a group's states that have values per row
    reason: Callable[[Group], str | None]  # why a step may change rows without a gradient; None if it does not
    # returns why a group's weights cannot be saved as tables; None if they can
    refusal: Callable[[Group], str | None] = lambda group: None
    others: tuple[str, ...] = ()  # keys of states that exist only with some settings


_AMSGRAD = ("max_exp_avg_sq",)
_RULES: Mapping[type[Optimizer], TorchRule] = {  # for exactly these classes: a subclass may do anything
    optim.SparseAdam: TorchRule(PREFIXES["SparseAdam"], _adam_keys, lambda group: None),
    optim.Adam: TorchRule(PREFIXES["Adam"], _adam_keys, _adam_reason, others=_AMSGRAD),
    optim.AdamW: TorchRule(PREFIXES["AdamW"], _adam_keys, _adam_reason, others=_AMSGRAD),
    optim.Adagrad: TorchRule(PREFIXES["Adagrad"], lambda group: ["sum"], _adagrad_reason),
    optim.SGD: TorchRule(
        PREFIXES["SGD"],
        lambda group: ["momentum_buffer"] if group["momentum"] else [],
        _sgd_reason,
        lambda group: (
            "dampening skips its first step: use dampening=0" if group["momentum"] and group["dampening"] else None
        ),
        others=("momentum_buffer",),
    ),
}
KNOWN = tuple(kind.__name__ for kind in _RULES)


def rule_of(optimizer: Optimizer) -> TorchRule | None:
    return _RULES.get(type(optimizer))


def make_state(optimizer: Optimizer, group: Group, parameter: Tensor, rule: TorchRule) -> None:
    """Create the states that the first step would create for a parameter, so that its slots exist from the start."""
    keys = rule.keys(group)
    if not keys:  # SGD without momentum: optimizer.state would get an empty entry
        return
    state = optimizer.state[parameter]
    for key in keys:
        if state.get(key) is None:
            first = group.get("initial_accumulator_value", 0.0) if key == "sum" else 0.0
            state[key] = torch.full_like(parameter.detach(), first, memory_format=torch.preserve_format)
    if "step" not in state and not isinstance(optimizer, optim.SGD):
        state["step"] = 0
        if not isinstance(optimizer, optim.SparseAdam):  # the same tensor that torch would make
            is_wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
            device = parameter.device if group.get("capturable") or group.get("fused") else None
            state["step"] = torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device=device)


def set_step(optimizer: Optimizer, parameter: Tensor, step: int) -> None:
    state = optimizer.state.get(parameter, {})
    if isinstance(state.get("step"), Tensor):
        state["step"].fill_(step)
    elif "step" in state:
        state["step"] = step


def optimizers_in(optimizers: Iterable[Optimizer], model: nn.Module) -> list[Optimizer]:
    """Return all torch optimizers among these, and the optimizers that a model steps in its backward pass."""
    in_backward = (one for parameter in model.parameters() for one in getattr(parameter, "_in_backward_optimizers", ()))
    inner = [one for outer in (*optimizers, *in_backward) for one in _inner(outer)]
    return list({id(one): one for one in inner}.values())


def _inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers inside one of TorchRec's optimizers; for any other optimizer, yield itself."""
    if is_keyed(optimizer):
        parts = [part for _, part in getattr(optimizer, "optimizers", ())]
        parts += [part for part in [getattr(optimizer, "_optimizer", None)] if part is not None]
        for part in parts:
            yield from _inner(part)
    else:
        yield optimizer if is_zero(optimizer) else updater(optimizer)


def trainer_of(weight: Tensor, optimizers: Sequence[Optimizer]) -> tuple[Optimizer | None, TorchRule | None]:
    """Return the optimizer that trains a weight, and its rule; (None, None) for a frozen weight.

    Raises LiveTableError, with the reason, if its state cannot be saved by rows.
    """
    own = [one for one in optimizers for group in groups_of(one) if any(weight is each for each in group["params"])]
    if len(own) > 1:
        kinds = ", ".join(type(one).__name__ for one in own)
        raise LiveTableError(f"{len(own)} optimizers train it ({kinds}), expected one: remove it from the others")
    if not own:
        if weight.requires_grad:
            raise LiveTableError("none of the optimizers trains it: give live_tables the one that does, or freeze it")
        return None, None
    [optimizer] = own
    rule = rule_of(optimizer)
    if rule is None:
        raise LiveTableError(
            f"{type(optimizer).__name__} trains it, but recckpt does not know its state per row: use one of exactly "
            f"these torch classes: {', '.join(KNOWN)}"
        )
    group = next(group for group in optimizer.param_groups if any(weight is each for each in group["params"]))
    if why := rule.refusal(group):
        raise LiveTableError(f"{type(optimizer).__name__}: {why}")
    return optimizer, rule
