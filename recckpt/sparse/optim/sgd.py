"""Stochastic gradient descent."""

from __future__ import annotations

from torch import Tensor

from recckpt.sparse.optim.optimizer import SparseOptimizer, Tables
from recckpt.sparse.optim.param_groups import Group, check_number


class SparseSGD(SparseOptimizer):
    """``weights -= lr * grads``: ``torch.optim.SGD`` on sparse gradients, without momentum.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
    """

    def __init__(self, tables: Tables, lr: float | Tensor = 1e-3) -> None:
        super().__init__(tables, {"lr": lr})

    def _check(self, group: Group) -> None:
        check_number(group, "lr")

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        weights.add_(grads, alpha=-group["lr"])
