"""AdamW as TensorFlow has it, and RecIS's ``SparseAdamWTF``, whose runs go on with it."""

from __future__ import annotations

from torch import Tensor

from recckpt.sparse.optim.adam import SparseAdamW, adam_update
from recckpt.sparse.optim.param_groups import Group


class SparseAdamWTF(SparseAdamW):
    """Adam with a weight decay that the learning rate does not scale, on touched rows only, as in RecIS.

    It differs from :class:`SparseAdamW` in two things: the decay is by ``weight_decay`` itself, and ``eps`` is added
    before the bias is corrected, as in :class:`SparseAdam`::

        weights *= 1 - weight_decay
        weights -= lr * sqrt(1 - beta2 ** step) / (1 - beta1 ** step) * exp_avg / (sqrt(exp_avg_sq) + eps)

    So with a learning-rate schedule the decay stays the same, and a ``weight_decay`` of one thousandth here is what
    ``SparseAdamW`` makes of 1 at ``lr=1e-3``. The moments are the slots ``sparse_adamw_tf_exp_avg`` and
    ``sparse_adamw_tf_exp_avg_sq``, which are RecIS's.

    Args:
        tables: ``{name: table}``, a list of tables, or a list of groups ``{"tables": ..., "lr": ...}``.
        lr: learning rate, at least 0.
        betas: decay of the two moments, each of [0, 1).
        eps: keeps the divisor from 0.
        weight_decay: part of a weight that is lost in a step, of [0, 1].
    """

    slot_names = ("sparse_adamw_tf_exp_avg", "sparse_adamw_tf_exp_avg_sq")

    def _check(self, group: Group) -> None:
        super()._check(group)
        if group["weight_decay"] > 1:
            raise ValueError(f"found weight_decay={group['weight_decay']!r}, expected a number of [0, 1]")

    def _update(self, weights: Tensor, grads: Tensor, slots: list[Tensor], step: int, group: Group) -> None:
        weights.mul_(1 - group["weight_decay"])
        adam_update(weights, grads, slots, step, group)
