"""The update rules of sparse optimizers, applied to rows that had a gradient: SGD, variants of Adam and of Adagrad."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recckpt.sparse.optim.optimizer import Group, SparseOptimizer, Tables
from recckpt.sparse.table.gradients import RowGradients
from recckpt.sparse.table.table import HashTable
from recckpt.types import flag


class SparseSGD(SparseOptimizer):
    """``weights -= lr * grads``: ``torch.optim.SGD`` on sparse gradients, without momentum.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
    """

    def __init__(self, tables: Tables, lr: float | Tensor = 1e-3) -> None:
        super().__init__(tables, {"lr": lr})

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        weights.add_(grads, alpha=-group["lr"])


class SparseAdam(SparseOptimizer):
    """Adam by the rule of ``torch.optim.SparseAdam``: only rows with a gradient change, in moments and weights.

    The bias correction counts the steps of the table, not those of the row, and comes after ``eps``::

        weights -= lr * sqrt(1 - beta2 ** step) / (1 - beta1 ** step) * exp_avg / (sqrt(exp_avg_sq) + eps)

    The moments are the slots ``sparse_adam_exp_avg`` and ``sparse_adam_exp_avg_sq``.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        betas: decay of the two moments, each of [0, 1).
        eps: added to the divisor, so that it is not 0.
    """

    slot_names = ("sparse_adam_exp_avg", "sparse_adam_exp_avg_sq")
    _numbers = ("lr", "eps")

    def __init__(
        self,
        tables: Tables,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps})

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        adam_update(weights, grads, slots, step, group)


class SparseAdamW(SparseOptimizer):
    """Adam with decoupled weight decay, by the rule of ``torch.optim.AdamW``, on touched rows only.

    Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019; made lazy as in RecIS: weight decay and
    moments of a row advance only in steps in which the row has a gradient. If every row has a gradient in every step,
    this is ``torch.optim.AdamW``::

        weights -= lr * weight_decay * weights
        weights -= lr / (1 - beta1 ** step) * exp_avg / (sqrt(exp_avg_sq / (1 - beta2 ** step)) + eps)

    The moments are the slots ``sparse_adamw_exp_avg`` and ``sparse_adamw_exp_avg_sq``.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        betas: decay of the two moments, each of [0, 1).
        eps: added to the divisor, so that it is not 0.
        weight_decay: share of a weight that is subtracted in a step at learning rate 1, at least 0.
    """

    slot_names = ("sparse_adamw_exp_avg", "sparse_adamw_exp_avg_sq")
    _numbers = ("lr", "eps", "weight_decay")

    def __init__(
        self,
        tables: Tables,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(tables, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        correction1, correction2 = _follow(grads, slots, step, group)
        exp_avg, exp_avg_sq = slots
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        divisor = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(group["eps"])
        weights.addcdiv_(exp_avg, divisor, value=-group["lr"] / correction1)


def adam_update(weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
    """Adam in place, with ``eps`` added before the bias correction."""
    correction1, correction2 = _follow(grads, slots, step, group)
    exp_avg, exp_avg_sq = slots
    step_size = group["lr"] * math.sqrt(correction2) / correction1
    weights.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(group["eps"]), value=-step_size)


def _follow(grads: Tensor, slots: list[Tensor], step: int, group: Group) -> tuple[float, float]:
    beta1, beta2 = group["betas"]
    slots[0].lerp_(grads, 1 - beta1)
    slots[1].mul_(beta2).addcmul_(grads, grads, value=1 - beta2)
    return 1 - beta1**step, 1 - beta2**step


class SparseAdamWTF(SparseAdamW):
    """Adam with a weight decay that the learning rate does not scale, on touched rows only, as in RecIS.

    Two things differ from :class:`SparseAdamW`: the decay is ``weight_decay`` itself, and ``eps`` is added before the
    bias correction, as in :class:`SparseAdam`::

        weights *= 1 - weight_decay
        weights -= lr * sqrt(1 - beta2 ** step) / (1 - beta1 ** step) * exp_avg / (sqrt(exp_avg_sq) + eps)

    So a learning-rate schedule does not change the decay, and ``weight_decay=1e-3`` here equals ``weight_decay=1`` of
    ``SparseAdamW`` at ``lr=1e-3``. The moments are the slots ``sparse_adamw_tf_exp_avg`` and
    ``sparse_adamw_tf_exp_avg_sq``, as in RecIS.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        betas: decay of the two moments, each of [0, 1).
        eps: added to the divisor, so that it is not 0.
        weight_decay: share of a weight that is subtracted in a step, in [0, 1].
    """

    slot_names = ("sparse_adamw_tf_exp_avg", "sparse_adamw_tf_exp_avg_sq")

    def _check(self, group: Group) -> None:
        super()._check(group)
        if group["weight_decay"] > 1:
            raise ValueError(f"found weight_decay={group['weight_decay']!r}, expected a number of [0, 1]")

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        weights.mul_(1 - group["weight_decay"])
        adam_update(weights, grads, slots, step, group)


class _Adagrad(SparseOptimizer):
    """A variant of Adagrad; ``numbers`` are the hyper-parameters in the order of ``_numbers``."""

    _numbers = ("lr", "lr_decay", "eps", "initial_accumulator_value", "weight_decay")
    _is_row_wise = False  # whether a row has one sum, instead of one per value
    _squares_by_rank = False  # whether each rank's gradients are squared before summing, instead of their sum

    def __init__(self, tables: Tables, numbers: Sequence[float | Tensor], maximize: bool) -> None:
        defaults = dict(zip(self._numbers, numbers, strict=True))
        super().__init__(tables, {**defaults, "maximize": flag("maximize", maximize)})

    def _check(self, group: Group) -> None:
        super()._check(group)
        if self._squares_by_rank and group["weight_decay"]:
            raise ValueError(f"found weight_decay={group['weight_decay']!r}, expected 0: a decay belongs to no rank")

    def _check_tables(self, tables: list[Any]) -> None:
        super()._check_tables(tables)
        for table in tables if self._squares_by_rank else ():
            gradients = getattr(table, "gradients", "sum")
            if gradients != "sum":
                what = f"table {table.name!r} was made with gradients={gradients!r}"
                raise ValueError(f"{what}, expected 'sum' for a {type(self).__name__}")

    def _add_slots(self, table: HashTable, group: Group) -> None:
        shape = () if self._is_row_wise else table.embedding_shape
        dtype = torch.promote_types(table.dtype, torch.float32)
        table.add_slot(self.slot_names[0], shape, dtype, group["initial_accumulator_value"])
        if self._squares_by_rank:
            table.pending_gradients.keep_squares()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.declare_slots()  # new rows begin with the initial value that was loaded

    def _apply(self, weights: Tensor, taken: RowGradients, slots: list[Tensor], step: int, group: Group) -> None:
        grads = -taken.grads if group["maximize"] else taken.grads
        if group["weight_decay"]:
            grads = grads.add(weights, alpha=group["weight_decay"])
        if self._is_row_wise:
            squares = taken.squares() if self._squares_by_rank else grads.square()
            roots = slots[0].add_(squares.flatten(1).mean(1)).sqrt().add_(group["eps"])
            roots = roots.view(-1, *[1] * (grads.dim() - 1))
        elif self._squares_by_rank:
            roots = slots[0].add_(taken.squares()).sqrt().add_(group["eps"])
        else:
            roots = slots[0].addcmul_(grads, grads).sqrt().add_(group["eps"])
        rate = float(group["lr"] / (1 + (step - 1) * group["lr_decay"]))
        weights.addcdiv_(grads, roots, value=-rate)


class SparseAdagrad(_Adagrad):
    """Adagrad, by the rule of ``torch.optim.Adagrad``, on touched rows only.

    ``sum += grads ** 2; weights -= lr / (1 + (step - 1) * lr_decay) * grads / (sqrt(sum) + eps)``, with ``sum`` in the
    slot ``sparse_adagrad_sum``. With a decay, ``weight_decay * weights`` is first added to ``grads``, in rows that have
    a gradient; torch refuses a decay on sparse gradients. If every row has a gradient in every step, this is torch's
    rule on dense gradients.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        lr_decay: how fast the learning rate falls with the steps of a table, at least 0.
        eps: added to the divisor, so that it is not 0.
        initial_accumulator_value: initial ``sum`` of a new row, at least 0.
        weight_decay: share of the weights that is added to their gradients, at least 0.
        maximize: whether to ascend the gradients instead of descending.
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


class SparseRowWiseAdagrad(_Adagrad):
    """Adagrad with one sum per row, by the rule of FBGEMM (``OptimType.EXACT_ROWWISE_ADAGRAD``), TorchRec and RecIS.

    ``sum += mean(grads ** 2)`` over the row, ``weights -= lr / (1 + (step - 1) * lr_decay) * grads / (sqrt(sum) +
    eps)``, with ``sum`` in the scalar slot ``sparse_rowwise_adagrad_sum``. With a decay, ``weight_decay * weights`` is
    first added to ``grads``, in rows that have a gradient.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        eps: added to the divisor, so that it is not 0.
        initial_accumulator_value: initial ``sum`` of a new row, at least 0.
        lr_decay: how fast the learning rate falls with the steps of a table, at least 0.
        weight_decay: share of the weights that is added to their gradients, at least 0.
        maximize: whether to ascend the gradients instead of descending.
    """

    slot_names = ("sparse_rowwise_adagrad_sum",)
    _is_row_wise = True

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


class SparseAdagradSum(SparseAdagrad):
    """Adagrad of summed gradients, by the rule of RecIS's optimizer of this name.

    With ``g`` the gradient that one rank has for a row: ``sum += sum of g ** 2; weights -= lr / (1 + (step - 1) *
    lr_decay) * sum of g / (sqrt(sum) + eps)``. Both sums are over the ranks, and over the look-ups of a table since the
    last step. With one rank and one look-up per table and step, this equals :class:`SparseAdagrad`, whose slot it
    shares. Clipping and scaling of the gradients change their squares, too.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``; sharded
            tables must be made with ``gradients="sum"``.
        lr: learning rate, at least 0.
        lr_decay: how fast the learning rate falls with the steps of a table, at least 0.
        eps: added to the divisor, so that it is not 0.
        initial_accumulator_value: initial ``sum`` of a new row, at least 0.
        maximize: whether to ascend the gradients instead of descending.

    Raises:
        ValueError: a table divides its gradients by the number of ranks.
    """

    _squares_by_rank = True

    def __init__(
        self,
        tables: Tables,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(tables, lr, lr_decay, eps, initial_accumulator_value, maximize=maximize)


class SparseRowWiseAdagradSum(SparseRowWiseAdagrad):
    """Row-wise :class:`SparseAdagradSum`: one accumulator per row, in the slot ``sparse_rowwise_adagrad_sum_by_rank``.

    Each step adds to the accumulator the mean, over the columns of the row, of the summed squared gradients.

    Args:
        tables: as in :class:`SparseAdagradSum`.
        lr: learning rate, at least 0.
        eps: added to the divisor, so that it is not 0.
        initial_accumulator_value: initial ``sum`` of a new row, at least 0.
        lr_decay: how fast the learning rate falls with the steps of a table, at least 0.
        maximize: whether to ascend the gradients instead of descending.

    Raises:
        ValueError: a table divides its gradients by the number of ranks.
    """

    slot_names = ("sparse_rowwise_adagrad_sum_by_rank",)
    _squares_by_rank = True

    def __init__(
        self,
        tables: Tables,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
        *,
        lr_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(tables, lr, eps, initial_accumulator_value, lr_decay=lr_decay, maximize=maximize)
