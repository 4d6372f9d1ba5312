"""Hugging Face's ``Trainer``: a callback that saves a model with its tables, and a directory to resume from."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError("recckpt.integrations.transformers needs more: pip install transformers accelerate") from error

from recckpt.dense.data_loaders import dump_rng, load_rng
from recckpt.errors import RecckptError
from recckpt.integrations.run_options import NONE, SavesRun, numbers_in
from recckpt.manager.manager import CheckpointManager
from recckpt.output_dir.listing import list_checkpoints
from recckpt.saver import Saver
from recckpt.sparse.optim import SparseOptimizer, clip_grad_norm_
from recckpt.sparse.optim.joint import refuse_accumulation, share_overflow

__all__ = ["TransformersCallback"]

_TRAINER_STATE = "trainer_state"
_OWN_LIMIT = "_max_grad_norm_of_the_trainer"  # attribute of its arguments, with its limit while it does not clip


class TransformersCallback(SavesRun, TrainerCallback):
    """Saves a ``Trainer``'s model and all state needed to resume, and steps the optimizer of the tables.

    The tables' optimizer steps right after the trainer's own optimizer, unless that skips a step. This callback clips
    the gradients of model and tables by their joint norm, and sets ``args.max_grad_norm`` to infinity during training,
    so that the trainer clips nothing.

    The trainer's own checkpoints must be off, ``save_strategy="no"``: they cannot hold tables. To resume::

        callback = TransformersCallback("runs/clicks", 1000, sparse_optimizer=lambda model: SparseAdamW(...))
        trainer = Trainer(model, args, train_dataset=..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_point(trainer))

    The trainer skips the data that was already seen, as for its own checkpoints.

    Arguments are those of :class:`recckpt.integrations.run_options.SavesRun`.

    Attributes:
        checkpoints: the manager; available once training begins.
    """

    _tables: _TablesBeside | None = None
    _trainer: Trainer | None = None  # set by resume_point()
    _resume_dir: tempfile.TemporaryDirectory[str] | None = None
    _rng: Mapping[str, Any] = NONE  # random state at the resume point
    _steps: StepCounter

    def resume_point(self, trainer: Trainer) -> str | None:
        """Return the argument for ``train(resume_from_checkpoint=...)``; None if there is no checkpoint to resume from.

        Makes this callback the trainer's first, and saves the states of the others. The result is a small temporary
        directory in the trainer's format, with its state and random state; rows, tensors and optimizers are restored
        when training begins.
        """
        self._trainer, callbacks = trainer, trainer.callback_handler.callbacks
        callbacks.sort(key=lambda callback: callback is not self)
        state = StateOfTrainer()
        near = self._near if self._restore.get("near", True) else None
        probe = Saver(nn.Module(), output_dir=self._output_dir, near=near, deltas=near is not None)
        probe.register_for_checkpointing(_TRAINER_STATE, state, per_rank=trainer.args.world_size > 1)
        manager = CheckpointManager(probe, self._save_interval)
        required = self._restore.get("required", False)
        if not manager.restore(load_conf={"load": [_TRAINER_STATE, "global_step"]}, required=required):
            return None
        self._rng = dump_rng()
        self._resume_dir = tempfile.TemporaryDirectory(prefix="recckpt-resume-")
        point = Path(self._resume_dir.name)
        (point / "trainer_state.json").write_text(json.dumps(state.loaded))
        seeds = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            seeds["cuda"] = torch.cuda.get_rng_state()
        of_rank = f"_{trainer.args.process_index}" if trainer.args.world_size > 1 else ""
        torch.save(seeds, point / f"rng_state{of_rank}.pth")
        # The trainer requires files of weights, but uses no values from them, and reports no name as missing.
        weights = {"weight_map": dict.fromkeys(trainer.model.state_dict(), "none.bin")}
        (point / "pytorch_model.bin.index.json").write_text(json.dumps(weights))
        torch.save({}, point / "none.bin")
        return str(point)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._tables is not None:  # left by a training that ended in an exception
            self._tables.leave()
        if args.save_strategy != "no":
            raise ValueError(
                f"save_strategy={str(args.save_strategy)!r}: the trainer cannot write tables, and TransformersCallback "
                "saves everything: pass save_strategy='no' to TrainingArguments"
            )
        others = [name for name in state.stateful_callbacks if name != "TrainerControl"]
        if self._trainer is None and others:
            raise ValueError(
                f"{', '.join(others)} has a state that only the trainer can restore: call "
                "trainer.train(resume_from_checkpoint=callback.resume_point(trainer)), also for the first training"
            )
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        sparse = self._optimizer_of(model)
        if sparse is not None:
            _check(optimizer, sparse)
        optimizers, schedulers = {"sparse": sparse, "optimizer": optimizer}, {"lr_scheduler": kwargs["lr_scheduler"]}
        self.checkpoints = manager = self._manager_of(model, optimizers, schedulers)
        if getattr(optimizer, "scaler", None) is not None:
            manager.register_for_checkpointing("grad_scaler", optimizer.scaler)
        of_trainer = StateOfTrainer()
        manager.register_for_checkpointing(_TRAINER_STATE, of_trainer, per_rank=args.world_size > 1)
        of_trainer.follow(state, self._trainer, manager)
        self._steps = StepCounter(manager)
        if state.global_step:
            # The trainer sets the generators once it has skipped the seen data.
            steps = {checkpoint.manifest.step for checkpoint in list_checkpoints(manager.saver.storage).current}
            step = state.global_step if state.global_step in steps else None  # a near save counts as the newest
            if (restored := manager.restore(step, rng=False, **self._restore)) != state.global_step:
                raise RecckptError(
                    f"{self._output_dir}: restored step {restored}, but the trainer continues at step "
                    f"{state.global_step}, because a near save could not be restored completely, as the log says: "
                    f"pass restore={{'near': False}} to continue from the newest checkpoint"
                )
            if manager.epochs < state.epoch and not state.epoch % 1:  # the epoch's last step was saved, but not its end
                with generators_at(self._rng):
                    manager.epoch()
        elif list_checkpoints(manager.saver.storage).current:
            raise ValueError(
                f"{self._output_dir} has checkpoints, but training begins at step 0: call "
                "trainer.train(resume_from_checkpoint=callback.resume_point(trainer)), or pass another output_dir"
            )

        if self._trainer is not None and state.global_step >= state.max_steps:  # the trainer would make one more step
            vars(self._trainer)["_run_epoch"] = lambda **_: None

        if sparse is not None:
            self._tables = _TablesBeside(optimizer.optimizer, optimizer.scaler, sparse, _clip_in_place_of(args))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clip the gradients of model and tables together; if any overflows, neither steps."""
        if self._tables is not None:
            self._tables.clip(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clear the tables' gradients when the trainer clears the others; the step is counted later."""
        if self._tables is not None:
            self._tables.sparse.zero_grad()
        self._steps.end_step(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.count()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.count()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not (control.should_training_stop and state.epoch % 1):
            self._steps.end_epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if hasattr(self, "_steps"):  # during training
            self._steps.evaluated(metrics or {})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log the norm of all gradients as ``grad_norm``, when the trainer logs the norm of the dense gradients."""
        if self._tables is not None and self._tables.norm is not None and logs and "grad_norm" in logs:
            logs["grad_norm"] = state.log_history[-1]["grad_norm"] = self._tables.norm.item()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps.finish()
        if self._trainer is not None:
            vars(self._trainer).pop("_run_epoch", None)
        if self._tables is not None:
            self._tables.leave()
            args.max_grad_norm = vars(args).pop(_OWN_LIMIT, args.max_grad_norm)
        self.checkpoints.close()
        if self._resume_dir is not None:
            self._resume_dir.cleanup()


class _TablesBeside:
    """Steps the tables' optimizer after the trainer's own, with gradients of the same scale and joint norm."""

    def __init__(self, dense: Optimizer, scaler: GradScaler | None, sparse: SparseOptimizer, max_norm: float) -> None:
        self.sparse = sparse
        self.norm: Tensor | None = None  # norm of the last step's gradients, before clipping
        self._dense, self._scaler, self._max_norm = dense, scaler, max_norm
        self._handle = dense.register_step_post_hook(self._step)
        sparse.zero_grad()

    def clip(self, model: nn.Module) -> None:
        if self._scaler is not None:
            share_overflow(self._scaler, self._dense, self.sparse)
        self.norm = clip_grad_norm_(model, [self._dense, self.sparse], self._max_norm)

    def leave(self) -> None:
        self._handle.remove()

    def _step(self, dense: Optimizer, *_: Any) -> None:
        if not getattr(dense, "found_inf", None):  # a fused optimizer itself skips the step
            self.sparse.step()


def _clip_in_place_of(args: Any) -> float:
    """Set the trainer's clipping limit to infinity, and return the previous limit."""
    # After an exception on_train_end is not called: a kept limit stays valid, unless another limit was set.
    if args.max_grad_norm != math.inf:
        setattr(args, _OWN_LIMIT, args.max_grad_norm)
        args.max_grad_norm = math.inf
    limit = getattr(args, _OWN_LIMIT, None)
    return limit if limit is not None and limit > 0 else math.inf


def _check(optimizer: Any, sparse: SparseOptimizer) -> None:
    """Refuse setups that would step tables at another time than the other parameters."""
    if type(optimizer) is not AcceleratedOptimizer or not isinstance(optimizer.optimizer, Optimizer):
        raise ValueError(
            f"found {type(optimizer).__name__} as the trainer's optimizer, expected one of torch: an engine that "
            "steps and clips on its own, such as DeepSpeed, does not know tables"
        )
    refuse_accumulation(sparse)


_SUMMARY = "train_runtime"  # in the line that a trainer logs after training, but omits from its own checkpoints


class StateOfTrainer:
    """The trainer's ``trainer_state.json``: epoch, losses so far, best metric, states of callbacks."""

    def __init__(self) -> None:
        self._now: TrainerState | None = None
        self._trainer: Any = None
        self._manager: CheckpointManager | None = None
        self.loaded: dict[str, Any] = {}

    def follow(self, state: TrainerState, trainer: Any, manager: CheckpointManager) -> None:
        """Read the state from a trainer from now on; ``trainer`` is None if only its state is known."""
        self._now, self._trainer, self._manager = state, trainer, manager

    def state_dict(self) -> dict[str, Any]:
        if self._now is None or self._manager is None:
            return self.loaded
        step, counted = self._now.global_step, self._manager.global_step
        if step != counted:  # no run could resume from it
            raise ValueError(
                f"the trainer is at step {step}, and the manager at step {counted}: a step is counted when the next "
                f"one begins; to save it before that, give its number: checkpoints.save({step})"
            )
        state = asdict(self._now)
        if state["log_history"] and _SUMMARY in state["log_history"][-1]:
            state["log_history"].pop()
        if self._trainer is not None:
            known = [*self._trainer.callback_handler.callbacks, self._trainer.control]
            stateful: Any = [callback for callback in known if isinstance(callback, ExportableState)]
            state["stateful_callbacks"] = TrainerState(stateful_callbacks=stateful).stateful_callbacks
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class StepCounter:
    """Counts a step or epoch when the trainer would save: after all callbacks have logged and evaluated it.

    No event marks that time, so the step is counted at the next event, before other callbacks. By then the next step's
    data may have been read, so this class keeps the earlier state of the random generators for the save.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        self._counts: list[Callable[..., None]] = []  # count steps and epochs that have ended
        self._metrics: Mapping[str, Any] = NONE  # metrics of the step
        self._rng: Mapping[str, Any] = NONE
        self._has_stepped = False

    def end_step(self, step: int) -> None:
        self._has_stepped, self._metrics = True, NONE
        self._note(partial(self._count_step, step))

    def end_epoch(self) -> None:
        self._note(self._manager.epoch)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of an evaluation; with several datasets, there is one for each."""
        self._metrics = {**self._metrics, **numbers_in(metrics)}
        if self._counts:
            self._rng = dump_rng()

    def count(self) -> None:
        counts, self._counts = self._counts, []
        if counts:
            with generators_at(self._rng):
                for count in counts:
                    count(metrics=self._metrics)

    def finish(self) -> None:
        self.count()
        if self._has_stepped:
            self._manager.save(metrics=self._metrics)

    def _count_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._manager.global_step < step:  # else it was saved by hand, under this number
            self._manager.step(metrics=metrics)

    def _note(self, count: Callable[..., None]) -> None:
        self._counts.append(count)
        self._rng = dump_rng()


@contextmanager
def generators_at(rng: Mapping[str, Any]) -> Iterator[None]:
    now = dump_rng()
    load_rng(rng)
    try:
        yield
    finally:
        load_rng(now)
