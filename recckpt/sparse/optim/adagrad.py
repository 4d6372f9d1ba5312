"""Adagrad, with one sum a value or one a row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recckpt.sparse.optim.optimizer import SparseOptimizer, Tables, slot_dtype
from recckpt.sparse.optim.param_groups import Group, check_number
from recckpt.sparse.table.table import HashTable
from recckpt.types import flag

_NUMBERS = ("lr", "lr_decay", "eps", "initial_accumulator_value", "weight_decay")


class _Adagrad(SparseOptimizer):
    """A rule of Adagrad, whose ``numbers`` are the hyper-parameters in the order of ``_NUMBERS``."""

    def __init__(self, tables: Tables, numbers: Sequence[float | Tensor], maximize: bool) -> None:
        defaults = dict(zip(_NUMBERS, numbers, strict=True))
        super().__init__(tables, {**defaults, "maximize": flag("maximize", maximize)})

    def _check(self, group: Group) -> None:
        for name in _NUMBERS:
            check_number(group, name)


class SparseAdagrad(_Adagrad):
    """Adagrad, by the rule of ``torch.optim.Adagrad``, on touched rows only.

    ``sum += grads ** 2; weights -= lr / (1 + (step - 1) * lr_decay) * grads / (sqrt(sum) + eps)``, with
    ``sum`` in the slot ``sparse_adagrad_sum``; ``grads`` are ``grads + weight_decay * weights`` where there is a decay,
    of rows that have a gradient. torch refuses a decay on sparse gradients; where every row has one in every step, this
    is its rule on dense ones.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        lr_decay: how fast the learning rate falls with the steps of a table, at least 0.
        eps: keeps the divisor from 0.
        initial_accumulator_value: what ``sum`` starts at in a new row, at least 0.
        weight_decay: part of the weights that is added to their gradients, at least 0.
        maximize: whether to go up the gradients.
    """

    slot_names = ("sparse_adagrad_sum",)

    def __init__(
        self,
        tables: Tables,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(tables, (lr, lr_decay, eps, initial_accumulator_value, weight_decay), maximize)

    def _add_slots(self, table: HashTable, group: Group) -> None:
        initial = group["initial_accumulator_value"]
        table.add_slot(self.slot_names[0], table.embedding_shape, slot_dtype(table), initial)

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        grads = _adjusted(grads, weights, group)
        sums = slots[0].addcmul_(grads, grads)
        weights.addcdiv_(grads, sums.sqrt().add_(group["eps"]), value=-learning_rate(step, group))


class SparseRowWiseAdagrad(_Adagrad):
    """Adagrad with one sum a row, by the rule of FBGEMM (``OptimType.EXACT_ROWWISE_ADAGRAD``), TorchRec and RecIS.

    ``sum += mean(grads ** 2)`` over the row, ``weights -= lr / (1 + (step - 1) * lr_decay) * grads / (sqrt(sum) +
    eps)``, with ``sum`` in the scalar slot ``sparse_rowwise_adagrad_sum``; ``grads`` are ``grads + weight_decay *
    weights`` where there is a decay, of rows that have a gradient.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        eps: keeps the divisor from 0.
        initial_accumulator_value: what ``sum`` starts at in a new row, at least 0.
        lr_decay: how fast the learning rate falls with the steps of a table, at least 0.
        weight_decay: part of the weights that is added to their gradients, at least 0.
        maximize: whether to go up the gradients.
    """

    slot_names = ("sparse_rowwise_adagrad_sum",)

    def __init__(
        self,
        tables: Tables,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
        *,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(tables, (lr, lr_decay, eps, initial_accumulator_value, weight_decay), maximize)

    def _add_slots(self, table: HashTable, group: Group) -> None:
        table.add_slot(self.slot_names[0], (), slot_dtype(table), group["initial_accumulator_value"])

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        grads = _adjusted(grads, weights, group)
        sums = slots[0].add_(grads.flatten(1).square().mean(1))
        roots = sums.sqrt().add_(group["eps"]).view(-1, *[1] * (grads.dim() - 1))
        weights.addcdiv_(grads, roots, value=-learning_rate(step, group))


def _adjusted(grads: Tensor, weights: Tensor, group: Group) -> Tensor:
    """Return the gradients with their sign and with the decay of the weights."""
    grads = -grads if group["maximize"] else grads
    return grads.add(weights, alpha=group["weight_decay"]) if group["weight_decay"] else grads


def learning_rate(step: int, group: Group) -> float:
    """Return the learning rate of a step."""
    return float(group["lr"] / (1 + (step - 1) * group["lr_decay"]))
