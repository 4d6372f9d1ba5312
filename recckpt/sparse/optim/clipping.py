"""The gradients of a model and of its tables, clipped by the norm of all of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.sparse.optim.joint import parts_of
from recckpt.sparse.optim.optimizer import SparseOptimizer
from recckpt.sparse.optim.param_groups import TableParameter
from recckpt.sparse.table.table import HashTable


def clip_grad_norm_(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients of a model and of its tables so that their total norm is at most ``max_norm``, in place.

    It is ``torch.nn.utils.clip_grad_norm_`` over ``model.parameters()``, which have no tables, and the tables. With a
    ``GradScaler`` call ``scaler.unscale_`` of each optimizer before. Collective where tables are sharded.

    Args:
        model: a model with or without tables; may be wrapped.
        optimizers: that of its tables, if it has some, or more than one; those of dense parameters may be among them.
        max_norm: the greatest norm to leave, as the gradients have it; ``float("inf")`` to find it only.
        norm_type: of the p-norm, which may be ``float("inf")``.

    Returns:
        The norm before, of all gradients as one vector; a scalar.

    Raises:
        ValueError: a table of the model has gradients and is in none of the optimizers, or an optimizer accumulates
            them (``set_grad_accum_steps``) and will not use them in its next step. Nothing has been changed.
    """
    chosen = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    trained = [p for optimizer in chosen for group in optimizer.param_groups for p in group["params"]]
    _refuse_untrained(model, {id(p.table) for p in trained if isinstance(p, TableParameter)})
    for optimizer in parts_of(*chosen):
        if isinstance(optimizer, SparseOptimizer) and not optimizer.is_due:
            raise ValueError(
                f"{type(optimizer).__name__} accumulates gradients, set_grad_accum_steps("
                f"{optimizer.grad_accum_steps}), and clipping now would clip their sum so far, again with each batch: "
                "clip before the call of step() that updates only"
            )
    parameters = {id(parameter): parameter for parameter in (*model.parameters(), *trained)}
    return nn.utils.clip_grad_norm_(parameters.values(), max_norm, norm_type)


def _refuse_untrained(model: nn.Module, trained: set[int]) -> None:
    tables = [m for m in model.modules() if isinstance(m, HashTable) and id(m) not in trained]
    untrained = [table.name for table in tables if table.grad is not None]
    if untrained:
        raise ValueError(
            f"clip_grad_norm_: the tables {untrained} of the model have gradients, and none of the optimizers trains "
            "them: give the sparse optimizer, or call zero_grad() of these tables"
        )
