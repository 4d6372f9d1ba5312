"""Adam and AdamW on the rows that had a gradient."""

from __future__ import annotations

import math

from torch import Tensor

from recckpt.sparse.optim.optimizer import SparseOptimizer, Tables
from recckpt.sparse.optim.param_groups import Group, check_betas, check_number


class SparseAdam(SparseOptimizer):
    """Adam by the rule of ``torch.optim.SparseAdam``: moments and weights change only in touched rows.

    The bias correction follows the steps of the table, not of the row, and comes after ``eps``::

        weights -= lr * sqrt(1 - beta2 ** step) / (1 - beta1 ** step) * exp_avg / (sqrt(exp_avg_sq) + eps)

    The moments are the slots ``sparse_adam_exp_avg`` and ``sparse_adam_exp_avg_sq``.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        betas: decay of the two moments, each of [0, 1).
        eps: keeps the divisor from 0.
    """

    slot_names = ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq")

    def __init__(
        self,
        tables: Tables,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps})

    def _check(self, group: Group) -> None:
        check_number(group, "lr")
        check_number(group, "eps")
        check_betas(group)

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        adam_update(weights, grads, slots, step, group)


class SparseAdamW(SparseOptimizer):
    """Adam with decoupled weight decay, by the rule of ``torch.optim.AdamW``, on touched rows only.

    Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019; made lazy as in RecIS: a row
    decays, and its moments move, in the steps in which it has a gradient. Where every row has one in every
    step, this is ``torch.optim.AdamW``::

        weights -= lr * weight_decay * weights
        weights -= lr / (1 - beta1 ** step) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2 ** step)) + eps)

    The moments are the slots ``sparse_adamw_exp_avg`` and ``sparse_adamw_exp_avg_sq``.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        betas: decay of the two moments, each of [0, 1).
        eps: keeps the divisor from 0.
        weight_decay: part of a weight that is lost in a step at learning rate 1, at least 0.
    """

    slot_names = ("sparse_adamw_exp_avg", "sparse_adamw_exp_avg_sq")

    def __init__(
        self,
        tables: Tables,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _check(self, group: Group) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(group, name)
        check_betas(group)

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        correction1, correction2 = _follow(grads, slots, step, group)
        exp_avg, exp_avg_sq = slots
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        divisor = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(group["eps"])
        weights.addcdiv_(exp_avg, divisor, value=-group["lr"] / correction1)


def adam_update(weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
    """Apply the rule of Adam in place, whose ``eps`` comes before the bias is corrected."""
    correction1, correction2 = _follow(grads, slots, step, group)
    exp_avg, exp_avg_sq = slots
    step_size = group["lr"] * math.sqrt(correction2) / correction1
    weights.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(group["eps"]), value=-step_size)


def _follow(grads: Tensor, slots: list[Tensor], step: int, group: Group) -> tuple[float, float]:
    """Move the two moments towards the gradients; return what their bias is corrected with."""
    beta1, beta2 = group["betas"]
    slots[0].lerp_(grads, 1 - beta1)
    slots[1].mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    return 1 - beta1**step, 1 - beta2**step
