"""Lightning: a callback that saves a module with its tables, and resumes its loops where they were."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import LightningModule, Trainer
except ImportError as error:
    raise ImportError("recckpt.integrations.lightning needs lightning: pip install 'recckpt[lightning]'") from error

from recckpt.dense.state_copy import dump_rng, load_rng
from recckpt.integrations.habits import CALLBACK_ARGUMENTS, CALLBACK_INSTEAD
from recckpt.integrations.lightning_averages import AveragedTables
from recckpt.integrations.run_options import NONE, GivenOptimizer, RunOptions, numbers_in
from recckpt.manager.answers import answers
from recckpt.manager.manager import CheckpointManager
from recckpt.policies.when import When
from recckpt.sparse.optim import JointOptimizer, SparseOptimizer
from recckpt.sparse.optim.joint import parts_of, refuse_accumulation
from recckpt.types import is_hashtable

log = logging.getLogger("recckpt")


class LightningCallback(AveragedTables):
    """Saves a ``LightningModule`` and all that its fit needs to go on; ``fit`` resumes from the newest checkpoint.

    Saved are the module, the optimizers and schedulers, the states of the other callbacks, and the loops, with the
    positions of loaders that have a ``state_dict``. Batches count as steps once an optimizer has stepped, so that no
    save falls into an accumulation of gradients. What the module has logged by then is among the metrics of a
    checkpoint, for policies such as ``Best(3, "val_auc")``.

    With automatic optimization ``sparse_optimizer`` steps whenever the optimizer of the module does, and both are
    clipped and scaled as one; with manual optimization the module does that. The files of a ``ModelCheckpoint`` beside
    it hold no tables.

    Args:
        output_dir: where the checkpoints go.
        save_interval: steps between them, or a policy.
        sparse_optimizer: that of the tables, or a function that returns it, given the module; None for the one that
            has been made for them.
        saver: more arguments of :class:`recckpt.Saver`, such as ``{"max_keep": 3}``; the defaults of this and the next
            are those of :meth:`recckpt.CheckpointManager.attach`.
        manager: more arguments of :class:`recckpt.CheckpointManager`, such as ``{"save_on_signal": ("SIGTERM",)}``.
        restore: more arguments of its ``restore()``, such as ``{"hyper_parameters": "keep"}``.
        tables: more arguments of :func:`recckpt.live.live_tables`; None leaves embeddings dense.

    Attributes:
        checkpoints: the manager, from the beginning of ``fit`` on.
    """

    checkpoints: CheckpointManager

    @answers(f"LightningCallback{CALLBACK_ARGUMENTS}", CALLBACK_INSTEAD)
    def __init__(
        self,
        output_dir: str,
        save_interval: int | When,
        *,
        sparse_optimizer: GivenOptimizer = None,
        saver: Mapping[str, Any] = NONE,
        manager: Mapping[str, Any] = NONE,
        restore: Mapping[str, Any] = NONE,
        tables: Mapping[str, Any] | None = NONE,
    ) -> None:
        self._options = RunOptions(output_dir, save_interval, sparse_optimizer, saver, manager, restore, tables)
        self._sparse_optimizer: SparseOptimizer | None = None
        self._stepped = 0
        self._rng: Mapping[str, Any] = NONE  # as restored, until the first batch is there

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest checkpoint of the output dir, where there is one."""
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) and LightningCallback would both restore: leave ckpt_path "
                "out, or the callback"
            )
        self._sparse_optimizer = optim = self._options.optimizer_of(pl_module)
        if optim is not None:
            _check(trainer, pl_module, optim)
        self.take_averages(trainer, pl_module)
        others = [one for one in parts_of(*trainer.optimizers) if not isinstance(one, SparseOptimizer)]
        optimizers = {"sparse": optim, **{f"optimizer_{number}": one for number, one in enumerate(others)}}
        schedulers = {f"lr_scheduler_{i}": config.scheduler for i, config in enumerate(trainer.lr_scheduler_configs)}
        self.checkpoints = manager = self._options.manager_of(pl_module, optimizers, schedulers)
        self.register_average(manager)
        for callback in trainer.callbacks:
            if callback is not self and callback.state_dict():
                manager.register_for_checkpointing(f"callback {callback.state_key}", callback)
        if trainer.precision_plugin.state_dict():  # of a scaler
            manager.register_for_checkpointing("precision", trainer.precision_plugin)
        manager.register_for_checkpointing("loops", _Loops(trainer), per_rank=trainer.world_size > 1)
        is_resumed = manager.restore(**self._options.restore)
        self._rng = dump_rng() if is_resumed and not _is_epoch_over(trainer) else NONE
        self._stepped = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Bring the random generators back, after the loaders that begin have drawn from them; join the optimizers."""
        if self._rng:
            load_rng(self._rng)
            self._rng = NONE
        if self._sparse_optimizer is not None and pl_module.automatic_optimization:
            _join(trainer, self._sparse_optimizer)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Forget the gradients of tables where Lightning forgets the others: those of a skipped step, too."""
        if self._sparse_optimizer is not None:
            self._sparse_optimizer.zero_grad()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Count a step, and save if it is time."""
        if trainer.global_step != self._stepped:
            self._stepped = trainer.global_step
            self.checkpoints.step(metrics=numbers_in(trainer.callback_metrics))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count an epoch, whose validation is over, and save if it is time."""
        self.checkpoints.epoch(metrics=numbers_in(trainer.callback_metrics))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Leave tables out of the files of ``ModelCheckpoint``: they cannot be pickled."""
        for weights in (checkpoint["state_dict"], checkpoint.get("current_model_state", {})):  # one of averages
            for name in [name for name, value in weights.items() if is_hashtable(value)]:
                del weights[name]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the save that is under way."""
        self.checkpoints.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Wait for the save that is under way; the exception is raised on."""
        self.swap_back()
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()


class _Loops:
    """The loops of a fit, with the positions of its loaders while they are within an epoch.

    Lightning resumes behind the last batch of an epoch with the next epoch, and would give it loaders that are at their
    end: it would have no batch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        if _is_epoch_over(self._trainer):
            state["state_dict"].pop("combined_loader", None)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state)


def _is_epoch_over(trainer: Trainer) -> bool:
    """Say whether the last batch was that of an epoch, so that loaders begin anew with the next one."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


class _StepOfBoth(JointOptimizer):
    """Lightning's own optimizer and that of the tables, whose hyper-parameters it leaves alone.

    Hooks such as ``optimizer_step`` that set the learning rate of all groups mean those of the module's optimizer.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        dense, sparse = self.optimizers
        return [*dense.param_groups, *map(dict, sparse.param_groups)]


def _join(trainer: Trainer, sparse: SparseOptimizer) -> None:
    """Let what Lightning unscales, clips and steps be both optimizers; ``trainer.optimizers`` stays as it is.

    At each batch, since whoever sets ``trainer.optimizers``, such as a finder of learning rates, undoes it.
    """
    stepped = trainer.strategy._lightning_optimizers[0]
    if sparse not in parts_of(stepped.optimizer):
        stepped._optimizer = _StepOfBoth(stepped.optimizer, sparse)


def _check(trainer: Trainer, module: LightningModule, sparse: SparseOptimizer) -> None:
    """Refuse, or warn of, what would step tables at another moment than the rest, or by gradients of another scale."""
    name, scaler = type(module).__name__, getattr(trainer.precision_plugin, "scaler", None)
    if not module.automatic_optimization:
        if scaler is not None and not any(isinstance(optimizer, JointOptimizer) for optimizer in trainer.optimizers):
            log.warning(
                "%s: manual_backward scales the loss, and only the optimizers of configure_optimizers are unscaled, "
                "each by itself: return recckpt.sparse.JointOptimizer(dense, sparse) there, and step that",
                name,
            )
        return
    refuse_accumulation(sparse)
    if trainer.strategy.handles_gradient_accumulation:
        raise ValueError(
            f"{type(trainer.strategy).__name__} steps by its own engine, which knows no tables: use another strategy, "
            "or manual optimization"
        )
    if type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping:
        log.warning(
            "%s.configure_gradient_clipping: the tables are in optimizer.param_groups, as self.clip_gradients(optimizer"
            ", ...) clips them, and not in self.parameters()",
            name,
        )
