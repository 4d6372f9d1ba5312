"""The arguments of a callback, and the manager made from them once the trainer has a model and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.format import layout
from recckpt.manager.attach import FIND_ALL, TablesOption, trainers_of
from recckpt.manager.manager import CheckpointManager
from recckpt.manager.resume import RestoreOptions
from recckpt.policies.deltas import Deltas
from recckpt.policies.keep import Keep
from recckpt.policies.options import Choose, Near, OnSaveError, OnSignal, Signals, Transfers
from recckpt.policies.schedule import Backpressure
from recckpt.policies.when import When
from recckpt.save.job import OnSave
from recckpt.sparse.optim import SparseOptimizer
from recckpt.sparse.split import state_of
from recckpt.text.foreign_words import answers_by
from recckpt.types import flag

_COUNTED = {"event_time", "windows", "epochs"}  # counted by a manager
NONE: Mapping[str, Any] = MappingProxyType({})
_AS_SAVED: RestoreOptions = {}
_NO_EXCEPTIONS = (
    "this trainer does not report exceptions to callbacks: call callback.checkpoints.save(trainer.state.global_step) "
    "where you catch the exception of train()"
)
GivenOptimizer = SparseOptimizer | Callable[[Any], SparseOptimizer] | None  # or a function model -> optimizer


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among a trainer's metrics, without names that the manager counts."""
    return {name: value for name, value in metrics.items() if name not in _COUNTED and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


class SavesRun:
    """The options of a trainer callback, and the checkpoint manager built from them.

    Args:
        output_dir: directory or URL for the checkpoints.
        save_interval: steps between checkpoints, or a policy.
        sparse_optimizer: the optimizer of the tables, or a function that takes the model and returns it; None for the
            optimizer that was already made for the model's tables.
        restore: arguments of :meth:`recckpt.CheckpointManager.restore`, such as ``{"hyper_parameters": "keep"}``.
        save_on_exception: save the step at which an exception ends training, marked as ``emergency`` in its state.
            Works on one rank, with trainers that report exceptions to callbacks, such as Lightning's.
        max_keep: as for :meth:`recckpt.CheckpointManager.attach`, with the same default; so are all other arguments.

    Attributes:
        checkpoints: the manager; available once training begins.

    Raises:
        ValueError: ``save_on_exception`` is not a bool, or the trainer does not report exceptions to callbacks.
    """

    checkpoints: CheckpointManager

    @answers_by("('runs/clicks', 1000, max_keep=3, save_on_signal=('SIGTERM',))")
    def __init__(
        self,
        output_dir: str,
        save_interval: int | When,
        *,
        sparse_optimizer: GivenOptimizer = None,
        restore: RestoreOptions = _AS_SAVED,
        save_on_exception: bool = False,
        max_keep: int | Keep | None = 2,
        async_save: bool | Backpressure = True,
        deltas: bool | Deltas = True,
        tables: TablesOption = FIND_ALL,
        concurrency: int = 4,
        near: Near | None = None,
        choose: Choose | None = None,
        transfers: Transfers | None = None,
        on_save: OnSave | None = None,
        run: str | None = None,
        ephemeral: int | When | None = None,
        save_on_signal: Signals | OnSignal = (),
        on_save_error: OnSaveError = "raise",
        step_prefix: str = layout.STEP_PREFIX,
    ) -> None:
        self._output_dir, self._save_interval, self._given_optimizer = output_dir, save_interval, sparse_optimizer
        self._restore, self._near = restore, near
        self._saves_on_exception = flag("save_on_exception", save_on_exception)
        if save_on_exception and not hasattr(self, "on_exception"):
            raise ValueError(f"{type(self).__name__}(save_on_exception=True): {_NO_EXCEPTIONS}")
        self._attach = partial(
            CheckpointManager.attach,
            output_dir=output_dir,
            save_interval=save_interval,
            max_keep=max_keep,
            async_save=async_save,
            deltas=deltas,
            tables=tables,
            concurrency=concurrency,
            near=near,
            choose=choose,
            transfers=transfers,
            on_save=on_save,
            run=run,
            ephemeral=ephemeral,
            save_on_signal=save_on_signal,
            on_save_error=on_save_error,
            step_prefix=step_prefix,
        )

    def _optimizer_of(self, model: nn.Module) -> SparseOptimizer | None:
        optimizer = self._given_optimizer
        if optimizer is None:
            return next(iter(trainers_of(state_of(model)[0])), None)
        return optimizer if isinstance(optimizer, SparseOptimizer) else optimizer(model)

    def _manager_of(
        self, model: nn.Module, optimizers: Mapping[str, Optimizer | None], schedulers: Mapping[str, Any]
    ) -> CheckpointManager:
        """Return a manager of a model, its optimizers and schedulers; the trainer's own state includes its loaders."""
        present = {name: optimizer for name, optimizer in optimizers.items() if optimizer is not None}
        return self._attach(model, present, schedulers=schedulers, loader=())
