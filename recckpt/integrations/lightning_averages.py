"""Lightning's averaging of weights with tables: it averages them by ``AveragedModel``, and swaps parameters alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch.optim.swa_utils import AveragedModel

from recckpt.manager.manager import CheckpointManager
from recckpt.sparse.average.models import paired, trained_tables
from recckpt.sparse.average.swapping import apply, swapped
from recckpt.types import is_hashtable

try:
    from lightning.pytorch.callbacks import WeightAveraging
except ImportError:  # before Lightning 2.6
    WeightAveraging = None


class DenseAverage:
    """What is not a table of an averaged model, registered at a saver."""

    def __init__(self, averaged: AveragedModel) -> None:
        self._averaged = averaged

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged parameters, buffers, and how often they were averaged."""
        return {name: value for name, value in self._averaged.state_dict().items() if not is_hashtable(value)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self._averaged.load_state_dict(state, strict=False)


class AveragedTables(Callback):
    """Gives tables the part in ``WeightAveraging`` and its subclasses that Lightning gives parameters.

    Their averages are saved beside them, are what validation looks up, and are what the module has in the end.
    """

    _averaged: AveragedModel | None = None
    _swapped: ExitStack | None = None

    def take_averages(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the checkpoints of the module have the averages of its tables.

        Raises:
            ValueError: a callback averages in a way that leaves tables out, or after this one has saved.
        """
        self._averaged = None
        if not list(trained_tables(pl_module)):
            return
        for number, callback in enumerate(trainer.callbacks):
            if isinstance(callback, StochasticWeightAveraging):
                raise ValueError(
                    "StochasticWeightAveraging averages parameters alone, so that tables would stay as they are under "
                    "averaged layers: use WeightAveraging(avg_fn=torch.optim.swa_utils.get_swa_avg_fn())"
                )
            if WeightAveraging is not None and isinstance(callback, WeightAveraging):
                if number > trainer.callbacks.index(self):
                    raise ValueError(
                        f"{type(callback).__name__} comes after LightningCallback, which would save the averages of "
                        "the step before: put it first in callbacks=[...]"
                    )
                self._averaged = callback._average_model
        for average, table in self._pairs(pl_module):
            average.name = f"{table.name}.average"
            table.averages.add(average)

    def register_average(self, manager: CheckpointManager) -> None:
        """Save the averages of the parameters too."""
        if self._averaged is not None:
            manager.register_for_checkpointing("averaged model", DenseAverage(self._averaged))

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look averages up in validation, where Lightning has the averaged parameters in place."""
        if self._averaged is not None and self._swapped is None:
            self._swapped = ExitStack()
            self._swapped.enter_context(swapped(self._pairs(pl_module)))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train on with the rows of training."""
        self.swap_back()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module the averages of its rows, as Lightning does those of its parameters."""
        for average, table in self._pairs(pl_module):
            apply(average, table)
        self._averaged = None

    def swap_back(self) -> None:
        """End what a validation has begun, however it ends."""
        if self._swapped is not None:
            self._swapped.close()
            self._swapped = None

    def _pairs(self, pl_module: LightningModule) -> list[Any]:
        return [] if self._averaged is None else paired(self._averaged.module, pl_module)
