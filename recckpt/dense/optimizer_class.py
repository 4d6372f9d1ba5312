"""The class of an optimizer, which says whether it can go on with the state of another one."""

from __future__ import annotations

from torch.optim import Optimizer

from recckpt.format.training import Lineage

_INNER = ("optimizer", "optim")  # what accelerate's wrapper and ZeRO call the optimizer that updates


def updater(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that updates parameters: the innermost one of wrappers."""
    inner = next((wrapped for name in _INNER if isinstance(wrapped := getattr(optimizer, name, None), Optimizer)), None)
    return optimizer if inner is None or inner is optimizer else updater(inner)


def lineage_of(optimizer: Optimizer) -> Lineage:
    """Return the names of the optimizer's class and of the optimizers that it inherits from, without modules.

    A class that has moved to another module is the same one.
    """
    kinds = (kind for kind in type(updater(optimizer)).__mro__ if issubclass(kind, Optimizer) and kind is not Optimizer)
    return tuple(kind.__name__ for kind in kinds) or (type(optimizer).__name__,)
