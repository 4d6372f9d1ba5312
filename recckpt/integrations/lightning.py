"""Lightning: a callback that saves a module with its tables, and resumes the loops at their saved positions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

try:
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.fabric.utilities.types import _Stateful
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint, GradientAccumulationScheduler
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
except ImportError as error:
    raise ImportError("recckpt.integrations.lightning needs lightning: pip install 'recckpt[lightning]'") from error

from recckpt.dense.data_loaders import dump_rng, load_rng, position_of
from recckpt.integrations.run_options import NONE, SavesRun, numbers_in
from recckpt.manager.manager import CheckpointManager
from recckpt.manager.resume import RestoreOptions
from recckpt.sparse.optim import JointOptimizer, SparseOptimizer
from recckpt.sparse.optim.joint import parts_of, refuse_accumulation
from recckpt.types import is_hashtable

__all__ = ["LightningCallback"]

log = logging.getLogger("recckpt")
EMERGENCY = "emergency"  # key in the state of a manifest
_LONGEST = 500  # most characters of an error to keep in the state


class LightningCallback(SavesRun, Callback):
    """Saves a ``LightningModule`` and all state that its fit needs; ``fit`` resumes from the newest checkpoint.

    Saves all that Lightning's own checkpoints restore: the module, optimizers and schedulers, the callbacks, the data
    module, what ``on_save_checkpoint`` adds, and the loops, with the positions of loaders that have a ``state_dict``.
    A batch counts as a step once an optimizer has stepped, so that no save happens while gradients accumulate. If a
    validation follows the step, the save waits for it, so that the checkpoint has its metrics, for policies such as
    ``Best(3, "val_auc")``. The last step of a fit that ends normally is saved; ``fast_dev_run`` neither restores nor
    saves.

    With automatic optimization, ``sparse_optimizer`` steps whenever the module's optimizer does, and the gradients of
    both are clipped and scaled together; with manual optimization the module must do that. The files of a
    ``ModelCheckpoint`` of the same trainer have no tables.

    Arguments are those of :class:`recckpt.integrations.run_options.SavesRun`.

    Attributes:
        checkpoints: the manager; available once training begins.
    """

    _sparse_optimizer: SparseOptimizer | None = None
    _rng: Mapping[str, Any] = NONE  # restored state, until the first batch is available

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move this callback to the front, so that it restores before ``fit`` begins for the other callbacks."""
        trainer.callbacks = sorted(trainer.callbacks, key=lambda callback: callback is not self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest checkpoint of the output dir, if there is one."""
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) and LightningCallback would both restore: omit ckpt_path, "
                "or the callback"
            )
        self._sparse_optimizer = optim = self._optimizer_of(pl_module)
        if optim is not None:
            _check(trainer, pl_module, optim)
        if trainer.fast_dev_run:
            return
        others = [one for one in parts_of(*trainer.optimizers) if not isinstance(one, SparseOptimizer)]
        optimizers = {"sparse": optim, **{f"optimizer_{number}": one for number, one in enumerate(others)}}
        schedulers = {f"lr_scheduler_{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
        self.checkpoints = manager = self._manager_of(pl_module, optimizers, schedulers)
        manager.register_for_checkpointing("trainer", state := TrainerState(trainer), per_rank=trainer.world_size > 1)
        finetunings = [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]
        of_trainer: RestoreOptions = {**self._restore, "load_conf": {"load": ["trainer", "global_step"]}}
        if finetunings and manager.restore(**of_trainer):
            for callback in finetunings:  # which give the optimizers the groups that are restored next
                callback.on_fit_start(trainer, pl_module)
        is_resumed = manager.restore(**self._restore)
        for callback in finetunings:
            callback._restarting = False  # else they put back the learning rates of the beginning of their epochs
        self._rng = dump_rng() if is_resumed and not state.is_between_epochs else NONE
        if state.is_between_epochs and manager.epochs < trainer.current_epoch:  # its last step was saved, not its end
            manager.epoch()
        _leave(trainer)
        # After a resume, Lightning makes the iterator before it passes the epoch to samplers.
        vars(trainer.fit_loop)["_load_combined_loader_states"] = partial(_load_positions, trainer.fit_loop)
        last = SavesLast(trainer, manager, state)
        # Lightning calls this at the end of each batch, after all hooks and the batch's validation.
        vars(trainer.fit_loop.epoch_loop)["update_lr_schedulers"] = partial(last.update_lr_schedulers, trainer)
        trainer.callbacks = [*trainer.callbacks, last]  # a new list: Lightning walks the old one

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Restore the random generators, which starting loaders have advanced; join the optimizers."""
        if self._rng:
            load_rng(self._rng)
            self._rng = NONE
        if self._sparse_optimizer is not None and pl_module.automatic_optimization:
            # At each batch, because setting trainer.optimizers, as a learning rate finder does, undoes it.
            stepped = trainer.strategy._lightning_optimizers[0]
            if self._sparse_optimizer not in parts_of(stepped.optimizer):
                stepped._optimizer = _StepOfBoth(stepped.optimizer, self._sparse_optimizer)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Clear the gradients of tables when Lightning clears the others, also after a skipped step."""
        if self._sparse_optimizer is not None:
            self._sparse_optimizer.zero_grad()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remove tables from the files of ``ModelCheckpoint``, because tables cannot be pickled."""
        for weights in (checkpoint["state_dict"], checkpoint.get("current_model_state", {})):  # the second: averages
            for name in [name for name, value in weights.items() if is_hashtable(value)]:
                del weights[name]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the running save."""
        _leave(trainer)
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save if ``save_on_exception`` is set, and wait for the running save; the exception is raised afterwards."""
        last = next((callback for callback in trainer.callbacks if isinstance(callback, SavesLast)), None)
        _leave(trainer)
        problem = last.save_for(trainer, exception) if last is not None and self._saves_on_exception else None
        if hasattr(self, "checkpoints"):  # like the end of ``with``, but begins no save, because this rank may be alone
            self.checkpoints.__exit__(type(exception), exception, exception.__traceback__)
        if problem is not None:
            try:
                newest = f"step {self.checkpoints.latest_step() or 0}"
            except Exception as failure:
                newest = f"an unknown step: {type(failure).__name__}: {failure}"
            log.error("%s; a restart resumes from %s", problem, newest)


def _leave(trainer: Trainer) -> None:
    """Remove from the trainer the callbacks and the methods of loops that this module added.

    Lightning would treat a remaining ``SavesLast`` callback as a ``ModelCheckpoint``.
    """
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, SavesLast)]
    vars(trainer.fit_loop).pop("_load_combined_loader_states", None)
    vars(trainer.fit_loop.epoch_loop).pop("update_lr_schedulers", None)


class _StepOfBoth(JointOptimizer):
    """Steps Lightning's own optimizer and the tables' optimizer; ``param_groups`` has copies of the tables' groups.

    So hooks such as ``optimizer_step`` that set the learning rate of all groups change only the module's optimizer.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        dense, sparse = self.optimizers
        return [*dense.param_groups, *map(dict, sparse.param_groups)]


def _check(trainer: Trainer, module: LightningModule, sparse: SparseOptimizer) -> None:
    """Refuse or warn of setups that step tables at another time, or with other gradient scaling, than the rest."""
    name, scaler = type(module).__name__, getattr(trainer.precision_plugin, "scaler", None)
    if not module.automatic_optimization:
        if scaler is not None and not any(isinstance(optimizer, JointOptimizer) for optimizer in trainer.optimizers):
            log.warning(
                "%s: manual_backward scales the loss, and only the optimizers of configure_optimizers are unscaled, "
                "each on its own: return recckpt.sparse.JointOptimizer(dense, sparse) there, and step that",
                name,
            )
        return
    refuse_accumulation(sparse)
    if trainer.strategy.handles_gradient_accumulation:
        raise ValueError(
            f"{type(trainer.strategy).__name__} steps in its own engine, which does not know tables: use another "
            "strategy, or manual optimization"
        )
    if type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping:
        log.warning(
            "%s.configure_gradient_clipping: tables are in optimizer.param_groups, which self.clip_gradients(optimizer"
            ", ...) clips, but not in self.parameters()",
            name,
        )


# Parts of a Lightning checkpoint that a saver saves separately, or that a resume does not read.
_SAVED_ELSEWHERE = ("state_dict", "optimizer_states", "lr_schedulers")
_HYPER_PARAMETERS = ("hparams_name", "hyper_parameters", "hparams_type")
# Parts that this module adds.
_LENGTH, _METRICS, _FROZEN = "recckpt_batches_of_epoch", "recckpt_callback_metrics", "recckpt_frozen_parameters"


class TrainerState:
    """The state in a Lightning checkpoint besides weights, optimizers and schedulers; registered with the manager.

    Lightning's own code collects and restores this state: the loops, the data module, the precision, the callbacks, and
    what the module and callbacks add in ``on_save_checkpoint``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.is_between_epochs = False  # whether the loaded loops were between epochs
        self.length: float | None = None  # batches of the epoch that the loaded loops were in
        self.metrics: dict[str, Tensor] = {}  # metrics that callbacks had when the state was saved

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state; collective if a callback's or the strategy's state is collective in Lightning."""
        connector = _WithoutTables(self._trainer)
        checkpoint = connector.dump_checkpoint(weights_only=False)
        put_in_place = {k: v for k, v in checkpoint["state_dict"].items() if connector.weights.get(k) is not v}
        fit = checkpoint["loops"]["fit_loop"]
        if "combined_loader" in fit["state_dict"]:
            fit["state_dict"]["combined_loader"] = [one.state_dict() for one in _positions(self._trainer.fit_loop)]
        if _is_epoch_over(self._trainer):
            # A resume continues with the next epoch, but would pass it to loaders that are at their end. What Lightning
            # counts at the end of an epoch is not counted yet.
            fit["state_dict"].pop("combined_loader", None)
            for count in fit["epoch_progress"].values():
                count["processed"] = count["completed"] = count["started"]
            batches = fit["epoch_loop.batch_progress"]
            # A save by hand in a hook of the last batch, which Lightning has not counted as completed:
            if batches["total"]["completed"] < batches["total"]["processed"]:
                batches["total"]["completed"] += 1
                fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
        elif _is_batch_failed(self._trainer.fit_loop):  # loaders are past it, so the loops must be too
            for count in fit["epoch_loop.batch_progress"].values():
                if isinstance(count, dict):
                    count.update(dict.fromkeys(count, max(count["ready"], count["completed"] + 1)))
        elif 0 < fit["epoch_progress"]["current"]["started"] == fit["epoch_progress"]["current"]["processed"]:
            _undo_end_of_epoch(self._trainer, fit)
        for name in (*_SAVED_ELSEWHERE, *_HYPER_PARAMETERS):
            checkpoint.pop(name, None)
        metrics = {name: value.detach().cpu() for name, value in self._trainer.callback_metrics.items()}
        own: dict[str, Any] = {_LENGTH: self._trainer.num_training_batches, _METRICS: metrics}
        if _is_finetuned(self._trainer):
            parameters = self._trainer.lightning_module.named_parameters()
            own[_FROZEN] = [name for name, parameter in parameters if not parameter.requires_grad]
        return {**checkpoint, **own, **({"state_dict": put_in_place} if put_in_place else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state into the trainer's parts; ``on_load_checkpoint`` gets the restored weights."""
        trainer = self._trainer
        connector = _WithoutTables(trainer)
        weights = connector._get_lightning_module_state_dict()
        connector._loaded_checkpoint = {
            **state,
            "state_dict": {**weights, **state.get("state_dict", {})},
            "optimizer_states": [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", connector._loaded_checkpoint)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        if _is_finetuned(trainer) and _FROZEN in state:
            for name, parameter in trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name not in state[_FROZEN])
        self.is_between_epochs = _is_epoch_over(trainer)
        self.length = None if self.is_between_epochs else state.get(_LENGTH)
        self.metrics = state.get(_METRICS, {})
        if self.is_between_epochs:  # the next epoch begins as in an uninterrupted run
            fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
            epoch.restarting = fit._restarting = False


def _load_positions(loop: Any) -> None:
    """Restore the positions of a loop's loaders before it makes iterators; replaces a method of the loop."""
    for loader in loop._combined_loader.flattened:
        _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    positions, states = _positions(loop), loop._combined_loader_states_to_load
    type(loop)._load_combined_loader_states(loop)
    if not loop._combined_loader_states_to_load:  # already restored
        for position, state in zip(positions, states, strict=False):
            position.load_state_dict(state)


def _positions(loop: Any) -> list[Any]:
    return [position_of(loader) for loader in loop._combined_loader.flattened if isinstance(loader, _Stateful)]


class SavesLast(Checkpoint):
    """Counts a step or epoch after all of its hooks, validation and schedulers have run.

    Lightning calls ``Checkpoint`` callbacks at the end of an epoch after the module and ``EarlyStopping``; this
    callback must be the last of them.
    """

    def __init__(self, trainer: Trainer, manager: CheckpointManager, resumed: TrainerState) -> None:
        self._manager, self._resumed = manager, resumed
        self._stepped = trainer.global_step
        self._is_batch_open = self._is_validated = False  # a batch was made but has not ended; it was validated
        self._is_step_open = False  # whether a step was made but not counted
        self._has_stepped = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set state that Lightning does not set in a resumed run; warn if the size of batches has changed."""
        trainer._logger_connector._callback_metrics.update(self._resumed.metrics)  # the sanity check has cleared them
        if self._resumed.length not in (None, trainer.num_training_batches):
            log.warning(
                "resumed within an epoch that had %s batches when it was saved, and has %s now. Lightning counts "
                "batches, so if their size has changed, this epoch may omit data, its validation and its schedulers: "
                "resume with the batch size of before, and change it between two epochs",
                self._resumed.length,
                trainer.num_training_batches,
            )
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):  # else called at an epoch's start
                callback.on_train_epoch_start(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note a step, which is counted at the end of its batch."""
        self._is_batch_open, self._is_validated = True, False
        if trainer.global_step != self._stepped:
            self._stepped = trainer.global_step
            self._is_step_open = self._has_stepped = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the batch was validated."""
        if not trainer.sanity_checking:
            self._is_batch_open = self._is_validated = True

    def update_lr_schedulers(self, trainer: Trainer, interval: str, update_plateau_schedulers: bool) -> None:
        """Update as Lightning does, and then count the step, since Lightning calls this last for a batch.

        Replaces a method of the epoch loop. A resume calls it once more for a batch that was saved, which is over.
        """
        loop = trainer.fit_loop.epoch_loop
        if not update_plateau_schedulers:
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers=False)
        elif interval == "step" and self._is_batch_open:  # those of an epoch are updated in on_train_epoch_end
            self._is_batch_open = False
            type(loop).update_lr_schedulers(loop, interval, update_plateau_schedulers=True)
            if not _is_last_of_epoch(trainer):
                with _as_resumed(loop, is_validated=self._is_validated):
                    self._count_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the last step of an epoch, and the epoch unless training ends within it."""
        loop = trainer.fit_loop.epoch_loop
        if loop._num_ready_batches_reached():  # Lightning would do so later, and after a resume not at all
            type(loop).update_lr_schedulers(loop, "epoch", update_plateau_schedulers=True)
        self._count_step(trainer)
        if _is_epoch_over(trainer):
            self._manager.epoch(metrics=numbers_in(trainer.callback_metrics))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step of a fit that has ended normally."""
        if self._has_stepped:
            self._manager.save(metrics=numbers_in(trainer.callback_metrics))

    def save_for(self, trainer: Trainer, exception: BaseException) -> str | None:
        """Save the last step when an exception ends ``fit``; return why it was not saved, or None.

        The save has no metrics, so that it is never the best checkpoint. Several ranks save nothing, because a rank
        that fails alone would wait for the others.
        """
        is_ahead = self._is_step_open or trainer.global_step != self._stepped  # of the manager's count
        if not (is_ahead or self._has_stepped):
            return None
        manager, batches = self._manager, trainer.fit_loop.epoch_loop.batch_progress.current
        error = f"{type(exception).__name__}: {exception}"[:_LONGEST]
        missing = f"fit ended by {error}, and no emergency checkpoint is saved"
        if trainer.world_size > 1:
            rank = f"rank {trainer.global_rank} of {trainer.world_size}"
            return f"{missing}: {rank} cannot know whether the other ranks have failed too, and a save needs all ranks"
        try:
            manager.wait_until_finished()
        except Exception as failure:  # an error of the previous save is no reason not to save
            log.error("%s", failure)
        mark = {"error": error, "within_step": batches.started > batches.processed}
        try:
            saved = manager.save(manager.global_step + is_ahead, state={EMERGENCY: mark})
        except Exception as failure:
            return f"{missing}: {type(failure).__name__}: {failure}"
        if saved is not None:
            log.warning("fit ended by %s: saved step %d, marked as emergency", error, manager.global_step)
        return None

    def _count_step(self, trainer: Trainer) -> None:
        if self._is_step_open:
            self._is_step_open = False
            self._manager.step(metrics=numbers_in(trainer.callback_metrics))


@contextmanager
def _as_resumed(loop: Any, *, is_validated: bool) -> Iterator[None]:
    """Count a batch as not completed, unless it was validated: as Lightning resumes from a save at its end."""
    counts = () if is_validated else (loop.batch_progress.total, loop.batch_progress.current)
    for count in counts:
        count.completed -= 1
    try:
        yield
    finally:
        for count in counts:
            count.completed += 1


class _WithoutTables(_CheckpointConnector):
    """Lightning's own connector, without a file; its weights exclude the tables, because recckpt saves these."""

    weights: dict[str, Tensor]

    def _get_lightning_module_state_dict(self) -> dict[str, Tensor]:
        state = super()._get_lightning_module_state_dict()
        self.weights = {name: value for name, value in state.items() if not is_hashtable(value)}
        return dict(self.weights)


def _is_finetuned(trainer: Trainer) -> bool:
    """Return whether a callback freezes parameters; in a resumed run it does not thaw them again."""
    return any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)


def _is_batch_failed(loop: Any) -> bool:
    """Return whether loaders gave a batch, or took it from their samplers, that was not processed."""
    batches = loop.epoch_loop.batch_progress.current
    return batches.ready > batches.processed or any(getattr(one, "has_failed", False) for one in _positions(loop))


def _is_epoch_over(trainer: Trainer) -> bool:
    """Return whether the last batch ended an epoch, so that loaders start again in the next epoch."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def _is_last_of_epoch(trainer: Trainer) -> bool:
    """Return whether an epoch ends after this step, because its batches or training end."""
    is_stopped = trainer.should_stop and trainer.fit_loop._can_stop_early
    return bool(trainer.fit_loop.epoch_loop._is_training_done or is_stopped)


def _is_validation_next(trainer: Trainer) -> bool:
    loop = trainer.fit_loop
    has_batches = trainer.val_dataloaders is None or sum(trainer.num_val_batches) > 0
    return bool(has_batches and loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def _undo_end_of_epoch(trainer: Trainer, fit: dict[str, Any]) -> None:
    """Set the loops back into the epoch that training has left, so that a longer run continues that epoch."""
    for count in fit["epoch_progress"].values():
        count["processed"] = count["completed"] = count["started"] - 1
    if _is_validation_next(trainer):  # a resume skips the validation, and counts the step for the loggers again
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
