"""The options of a callback, from which it makes the manager once the trainer has made the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.manager.attach import trainers_of
from recckpt.manager.manager import CheckpointManager
from recckpt.near.options import Near
from recckpt.policies.when import When
from recckpt.sparse.optim import SparseOptimizer
from recckpt.sparse.split import state_of

_COUNTED = {"event_time", "windows", "epochs"}  # by a manager
EXAMPLE = "('runs/clicks', 1000, saver={'max_keep': 3}, manager={'save_on_signal': ('SIGTERM',)})"  # arguments
NONE: Mapping[str, Any] = MappingProxyType({})
GivenOptimizer = SparseOptimizer | Callable[[Any], SparseOptimizer] | None  # or what returns it, given the model


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among the metrics of a trainer, such as those that a policy keeps the best by."""
    return {name: value for name, value in metrics.items() if name not in _COUNTED and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


@dataclass(frozen=True)
class RunOptions:
    """The arguments of a callback, as they are given."""

    output_dir: str
    save_interval: int | When
    sparse_optimizer: GivenOptimizer
    saver: Mapping[str, Any]
    manager: Mapping[str, Any]
    restore: Mapping[str, Any]
    tables: Mapping[str, Any] | None

    @property
    def near(self) -> Near | None:
        """Where near saves go that a restore may take; None where it is to take none."""
        return self.saver.get("near") if self.restore.get("near", True) else None

    def optimizer_of(self, model: nn.Module) -> SparseOptimizer | None:
        """Return the optimizer of the tables: the one that was given, else the one that has been made for them."""
        optimizer = self.sparse_optimizer
        if optimizer is None:
            return next(iter(trainers_of(state_of(model)[0])), None)
        return optimizer if isinstance(optimizer, SparseOptimizer) else optimizer(model)

    def manager_of(
        self, model: nn.Module, optimizers: Mapping[str, Optimizer | None], schedulers: Mapping[str, Any]
    ) -> CheckpointManager:
        """Return a manager of a model and all that trains it, as :meth:`CheckpointManager.attach` makes it."""
        return CheckpointManager.attach(
            model,
            {name: optimizer for name, optimizer in optimizers.items() if optimizer is not None},
            schedulers=schedulers,
            loader=(),  # the trainer's own state has them
            output_dir=self.output_dir,
            save_interval=self.save_interval,
            tables=self.tables,
            **self.saver,
            **self.manager,
        )
