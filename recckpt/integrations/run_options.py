"""The options of a callback, from which it makes the manager once the trainer has made the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from recckpt.live import live_tables
from recckpt.manager.manager import CheckpointManager
from recckpt.policies.when import When
from recckpt.saver import Saver
from recckpt.sparse.optim import SparseOptimizer

NONE: Mapping[str, Any] = MappingProxyType({})
GivenOptimizer = SparseOptimizer | Callable[[Any], SparseOptimizer] | None  # or what returns it, given the model


@dataclass(frozen=True)
class RunOptions:
    """The arguments of a callback, as they are given."""

    output_dir: str
    save_interval: int | When
    sparse_optimizer: GivenOptimizer
    saver: Mapping[str, Any]
    manager: Mapping[str, Any]
    restore: Mapping[str, Any]
    tables: Mapping[str, Any] | None = None

    def optimizer_of(self, model: nn.Module) -> SparseOptimizer | None:
        """Return the optimizer of the tables."""
        optimizer = self.sparse_optimizer
        return optimizer if optimizer is None or isinstance(optimizer, SparseOptimizer) else optimizer(model)

    def manager_of(
        self, model: nn.Module, optimizer: SparseOptimizer | None, trained_by: Iterable[Optimizer]
    ) -> CheckpointManager:
        """Return a manager that saves a model and that optimizer, and live tables that the others train."""
        tables = None if self.tables is None else live_tables(model, trained_by, **self.tables)
        saver = Saver(model, optimizer, self.output_dir, tables=tables, **self.saver)
        return CheckpointManager(saver, self.save_interval, **self.manager)
