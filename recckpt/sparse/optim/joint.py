"""Joins several optimizers into one, so that dense parameters and tables are scaled, clipped and stepped together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from recckpt.sparse.optim.optimizer import Group, SparseOptimizer, TableParameter
from recckpt.sparse.table.table import HashTable


class JointOptimizer(Optimizer):
    """Makes one optimizer from the optimizer of the dense parameters and the optimizers of tables.

    A ``torch.amp.GradScaler``, accelerate or a trainer then sees one optimizer: an overflow in any gradient skips the
    step of all, ``param_groups`` lists everything to unscale and clip, and :meth:`zero_grad` clears all gradients. The
    optimizers themselves do not change: save them as before, ``Saver(model, sparse)`` with the dense one registered.

    Args:
        optimizers: the optimizers, in the order in which they step; the first gets the closure of :meth:`step`.

    Attributes:
        optimizers: the optimizers that were passed.

    Raises:
        TypeError: an argument is not a ``torch.optim.Optimizer``.
        ValueError: there is no optimizer; two of them share a parameter or table; accelerate has prepared one of them.
    """

    optimizers: tuple[Optimizer, ...]
    _step_supports_amp_scaling = False  # a GradScaler then unscales before it steps, even a fused optimizer

    def __init__(self, *optimizers: Optimizer) -> None:
        _check(optimizers)
        self.optimizers = optimizers  # no super().__init__: parameters and their state belong to these optimizers

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        """The groups of all optimizers; changing an entry changes the optimizer that has it."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The states of all optimizers, by parameter."""
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default hyper-parameters of the first optimizer."""
        return self.optimizers[0].defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers, and return what ``closure`` returned.

        Raises:
            ValueError: one optimizer accumulates steps (``set_grad_accum_steps(n)``). Nothing has been changed.
        """
        for optimizer in self.optimizers:
            refuse_accumulation(optimizer)
        loss = self.optimizers[0].step(closure)
        for optimizer in self.optimizers[1:]:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Raise TypeError: add the group to one of :attr:`optimizers`."""
        raise TypeError("a JointOptimizer has no groups of its own: add the group to one of its optimizers")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers, in order, without the rows and slots of tables."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict` of equally many optimizers in the same order."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def share_overflow(scaler: GradScaler, *optimizers: Optimizer) -> None:
    """Unscale the gradients that are still scaled, and make an overflow in one optimizer skip the steps of all.

    For trainers whose optimizer cannot be replaced by a :class:`JointOptimizer`. Collective for sharded tables.
    """
    if not scaler.is_enabled():
        return
    states = [scaler._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
    for optimizer, state in zip(optimizers, states, strict=True):
        if state["stage"].name == "READY":
            scaler.unscale_(optimizer)
    overflows = [overflow for state in states for overflow in state["found_inf_per_device"].values()]
    for state in states if overflows else ():
        devices = {overflow.device for overflow in overflows}
        state["found_inf_per_device"] = {
            device: torch.stack([overflow.to(device) for overflow in overflows]).amax(0) for device in devices
        }


def refuse_accumulation(optimizer: Optimizer) -> None:
    """Raise ValueError for a sparse optimizer that accumulates steps, because the dense optimizers would not."""
    if isinstance(optimizer, SparseOptimizer) and (n := optimizer.grad_accum_steps) > 1:
        raise ValueError(
            f"found set_grad_accum_steps({n}) of {type(optimizer).__name__}, expected 1, because tables must step with "
            "the dense parameters: leave it at 1, and let the trainer accumulate (accumulate_grad_batches, "
            "gradient_accumulation_steps), or call step() on each n-th batch only"
        )


def parts_of(*optimizers: Optimizer) -> list[Optimizer]:
    """Return the optimizers, with each joint one replaced by its parts."""
    return [
        part
        for optimizer in optimizers
        for part in (parts_of(*optimizer.optimizers) if isinstance(optimizer, JointOptimizer) else [optimizer])
    ]


def _check(optimizers: tuple[Optimizer, ...]) -> None:
    if not optimizers:
        raise ValueError("a JointOptimizer needs optimizers, found none")
    seen: set[int] = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"a JointOptimizer takes optimizers, found a {type(optimizer).__name__}")
        if type(optimizer).__module__.startswith("accelerate."):  # could skip steps that the other optimizers make
            raise ValueError("accelerate has prepared one of these optimizers: prepare the JointOptimizer instead")
        refuse_accumulation(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {id(p.table if isinstance(p, TableParameter) else p) for p in parameters}
        if own & seen:
            raise ValueError(f"{type(optimizer).__name__} has a parameter or table of another one of these optimizers")
        seen |= own


def clip_grad_norm_(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients of a model and of its tables so that their total norm is at most ``max_norm``, in place.

    This is ``torch.nn.utils.clip_grad_norm_`` over ``model.parameters()`` and the tables, whose rows are not among the
    parameters. With a ``GradScaler``, first call ``scaler.unscale_(optimizer)`` for each optimizer. Collective if
    tables are sharded.

    Args:
        model: a model with or without tables; may be wrapped.
        optimizers: all optimizers of its tables, and optionally those of dense parameters.
        max_norm: the largest norm allowed; ``float("inf")`` only measures.
        norm_type: p of the p-norm; may be ``float("inf")``.

    Returns:
        The norm of all gradients together before clipping; a scalar.

    Raises:
        ValueError: a table has gradients and belongs to none of the optimizers; or an optimizer accumulates gradients
            (``set_grad_accum_steps``), and its next step does not update. Nothing has been changed.
    """
    chosen = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    trained = [p for optimizer in chosen for group in optimizer.param_groups for p in group["params"]]
    own = {id(p.table) for p in trained if isinstance(p, TableParameter)}
    tables = [m for m in model.modules() if isinstance(m, HashTable) and id(m) not in own]
    if untrained := [table.name for table in tables if table.grad is not None]:
        raise ValueError(
            f"clip_grad_norm_: the tables {untrained} of the model have gradients, and none of the optimizers trains "
            "them: pass their sparse optimizer too, or call zero_grad() of these tables"
        )
    for optimizer in parts_of(*chosen):
        if isinstance(optimizer, SparseOptimizer) and not optimizer.is_due:
            raise ValueError(
                f"{type(optimizer).__name__} accumulates gradients, set_grad_accum_steps("
                f"{optimizer.grad_accum_steps}), and clipping now would clip the sum so far, again at each batch: "
                "clip only before the call of step() that updates"
            )
    parameters = {id(parameter): parameter for parameter in (*model.parameters(), *trained)}
    return nn.utils.clip_grad_norm_(parameters.values(), max_norm, norm_type)
