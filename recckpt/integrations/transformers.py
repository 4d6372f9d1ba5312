"""Hugging Face's ``Trainer``: a callback that saves a model with its tables, and the point to resume from."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("recckpt.integrations.transformers needs more: pip install transformers accelerate") from error

from recckpt.manager.manager import CheckpointManager
from recckpt.output_dir.listing import list_checkpoints
from recckpt.policies.when import When
from recckpt.saver import Saver
from recckpt.sparse.optim import SparseOptimizer

_NONE: Mapping[str, Any] = MappingProxyType({})
_TRAINER_STATE = "trainer_state"


class _State:
    """What a trainer writes to its ``trainer_state.json``: epoch, losses so far, best metric."""

    def __init__(self) -> None:
        self.now: Any = None
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.now) if self.now is not None else self.loaded

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class RecckptCallback(TrainerCallback):
    """Saves the model of a ``Trainer`` and all that it needs to go on, and steps the optimizer of its tables.

    The trainer's own checkpoints are to be off, ``save_strategy="no"``: they cannot hold tables. To resume::

        callback = RecckptCallback("runs/clicks", 1000, sparse_optimizer=lambda model: SparseAdamW(...))
        trainer = Trainer(model, args, train_dataset=..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume_point(trainer))

    The trainer goes over the data that was seen, as it does for checkpoints of its own. Collective among its ranks.

    Args:
        output_dir: where the checkpoints go.
        save_interval: steps between them, or a policy.
        sparse_optimizer: that of the tables, or a function that returns it, given the model.
        saver: more arguments of :class:`recckpt.Saver`, such as ``{"max_keep": 3, "deltas": True}``.
        manager: more arguments of :class:`recckpt.CheckpointManager`, such as ``{"async_save": True}``.

    Attributes:
        checkpoints: the manager, from the beginning of training on.
    """

    checkpoints: CheckpointManager

    def __init__(
        self,
        output_dir: str,
        save_interval: int | When,
        *,
        sparse_optimizer: SparseOptimizer | Callable[[nn.Module], SparseOptimizer] | None = None,
        saver: Mapping[str, Any] = _NONE,
        manager: Mapping[str, Any] = _NONE,
    ) -> None:
        self._output_dir, self._save_interval, self._given = output_dir, save_interval, sparse_optimizer
        self._saver_options, self._manager_options = dict(saver), dict(manager)
        self._sparse_optimizer: SparseOptimizer | None = None
        self._state = _State()

    def resume_point(self, trainer: Trainer) -> str | None:
        """Return what ``train(resume_from_checkpoint=...)`` is to get: None where there is nothing to resume.

        It is a small temporary directory of the form that the trainer reads: its state and the random state. Rows,
        tensors and optimizers are restored when training begins.
        """
        found = _State()
        probe = Saver(nn.Module(), output_dir=self._output_dir)
        probe.register_for_checkpointing(_TRAINER_STATE, found)
        step = CheckpointManager(probe, self._save_interval).restore(
            load_conf={"load": [_TRAINER_STATE, "global_step"]}
        )
        if not step:
            return None
        point = Path(tempfile.mkdtemp(prefix="recckpt-resume-"))
        (point / "trainer_state.json").write_text(json.dumps(found.loaded))
        seeds = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            seeds["cuda"] = torch.cuda.get_rng_state()
        torch.save(seeds, point / "rng_state.pth")
        # The trainer insists on weights. Of these files it takes no value, and misses no name.
        weights = {"weight_map": dict.fromkeys(trainer.model.state_dict(), "none.bin")}
        (point / "pytorch_model.bin.index.json").write_text(json.dumps(weights))
        torch.save({}, point / "none.bin")
        return str(point)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the checkpoint that :meth:`resume_point` found."""
        if args.save_strategy != "no":
            raise ValueError(
                f"save_strategy={str(args.save_strategy)!r}: the trainer cannot write tables, and RecckptCallback "
                "saves all: give TrainingArguments save_strategy='no'"
            )
        if args.fp16:
            raise ValueError("fp16=True scales the loss, and only the trainer's own optimizer knows it: use bf16=True")
        model, given = kwargs["model"], self._given
        self._sparse_optimizer = given if given is None or isinstance(given, SparseOptimizer) else given(model)
        saver = Saver(model, self._sparse_optimizer, self._output_dir, **self._saver_options)
        saver.register_for_checkpointing("optimizer", kwargs["optimizer"])
        saver.register_for_checkpointing("lr_scheduler", kwargs["lr_scheduler"])
        saver.register_for_checkpointing(_TRAINER_STATE, self._state)
        self.checkpoints = CheckpointManager(saver, self._save_interval, **self._manager_options)
        if state.global_step:
            self.checkpoints.restore(state.global_step, rng=False)  # the trainer sets it where the seen data ends
        elif list_checkpoints(saver.storage).current:
            raise ValueError(
                f"{self._output_dir} holds checkpoints, and training begins at step 0: call "
                "trainer.train(resume_from_checkpoint=callback.resume_point(trainer)), or give another output_dir"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step the tables where the trainer steps the rest."""
        if self._sparse_optimizer is not None:
            self._sparse_optimizer.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step, and save if it is time."""
        self._state.now = state
        self.checkpoints.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the save that is under way."""
        self.checkpoints.close()
