"""Adagrad whose sums take the squared gradient of each rank, where Adagrad squares their sum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recckpt.sparse.optim.adagrad import SparseAdagrad, SparseRowWiseAdagrad, learning_rate
from recckpt.sparse.optim.optimizer import SparseOptimizer, Tables
from recckpt.sparse.optim.param_groups import Group
from recckpt.sparse.table.gradients import RowGradients
from recckpt.sparse.table.table import HashTable


class _SquaresByRank(SparseOptimizer):
    """What the rules have in common, in front of that of the same name which squares sums."""

    def _check(self, group: Group) -> None:
        super()._check(group)
        if group["weight_decay"]:
            raise ValueError(f"found weight_decay={group['weight_decay']!r}, expected 0: a decay is of no one rank")

    def _check_tables(self, tables: list[Any]) -> None:
        super()._check_tables(tables)
        for table in tables:
            gradients = getattr(table, "gradients", "sum")
            if gradients != "sum":
                what = f"table {table.name!r} was made with gradients={gradients!r}"
                raise ValueError(f"{what}, expected 'sum' for a {type(self).__name__}")

    def _add_slots(self, table: HashTable, group: Group) -> None:
        super()._add_slots(table, group)
        table.pending_gradients.keep_squares()


class SparseAdagradSum(_SquaresByRank, SparseAdagrad):
    """Adagrad of summed gradients, by the rule of RecIS's optimizer of this name.

    With ``g`` the gradient that one rank has for a row: ``sum += sum of g ** 2; weights -= lr / (1 + (step - 1) *
    lr_decay) * sum of g / (sqrt(sum) + eps)``, over the ranks, and over the look-ups of a table since the last step.
    One rank that looks each table up once a step does what :class:`SparseAdagrad` does, whose slot it shares. Clipping
    and scaling of the gradients count for their squares too.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``; sharded
            ones are made with ``gradients="sum"``.
        lr: learning rate, at least 0.
        lr_decay: how fast the learning rate falls with the steps of a table, at least 0.
        eps: keeps the divisor from 0.
        initial_accumulator_value: what ``sum`` starts at in a new row, at least 0.
        maximize: whether to go up the gradients.

    Raises:
        ValueError: a table divides its gradients by the number of ranks.
    """

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

    def _apply(self, weights: Tensor, taken: RowGradients, slots: list[Tensor], step: int, group: Group) -> None:
        grads = -taken.grads if group["maximize"] else taken.grads
        sums = slots[0].add_(taken.squares())
        weights.addcdiv_(grads, sums.sqrt().add_(group["eps"]), value=-learning_rate(step, group))


class SparseRowWiseAdagradSum(_SquaresByRank, SparseRowWiseAdagrad):
    """As :class:`SparseAdagradSum`, with one sum a row, in the slot ``sparse_rowwise_adagrad_sum_by_rank``.

    ``sum`` takes the mean over the row of the summed squares.

    Args:
        tables: as of :class:`SparseAdagradSum`.
        lr: learning rate, at least 0.
        eps: keeps the divisor from 0.
        initial_accumulator_value: what ``sum`` starts at in a new row, at least 0.
        lr_decay: how fast the learning rate falls with the steps of a table, at least 0.
        maximize: whether to go up the gradients.

    Raises:
        ValueError: a table divides its gradients by the number of ranks.
    """

    slot_names = ("sparse_rowwise_adagrad_sum_by_rank",)

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

    def _apply(self, weights: Tensor, taken: RowGradients, slots: list[Tensor], step: int, group: Group) -> None:
        grads = -taken.grads if group["maximize"] else taken.grads
        sums = slots[0].add_(taken.squares().flatten(1).mean(1))
        roots = sums.sqrt().add_(group["eps"]).view(-1, *[1] * (grads.dim() - 1))
        weights.addcdiv_(grads, roots, value=-learning_rate(step, group))
