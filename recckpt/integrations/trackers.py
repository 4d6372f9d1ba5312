"""Logs of saves for experiment trackers: functions for ``Saver(on_save=...)``.

Each function takes the tracker's own object, so this module imports no tracker. Background saves are logged by the
saving thread, at the step that was saved, not the one that training has reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from recckpt.save.save_info import SaveInfo

__all__ = ["to_tensorboard", "to_mlflow", "to_wandb"]

Log = Callable[[SaveInfo], None]

_PREFIX = "recckpt/"


def numbers(info: SaveInfo) -> dict[str, float]:
    """Return the numbers of a save, under names such as ``recckpt/write_sec``; ``recckpt/failed`` is 1 if it failed."""
    if info.error is not None:
        return {_PREFIX + "failed": 1.0} | ({} if info.step is None else {_PREFIX + "step": float(info.step)})
    values = {field.name: getattr(info, field.name) for field in fields(info) if not field.name.startswith("_")}
    values |= {"blocked_sec": info.blocked_sec, "max_blocked_sec": info.max_blocked_sec, "total_sec": info.seconds}
    values |= {"delta": info.kind == "delta"}
    return {_PREFIX + name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def to_tensorboard(writer: Any) -> Log:
    """Log saves to a ``torch.utils.tensorboard.SummaryWriter``, or to another object with its ``add_scalar``."""

    def log(info: SaveInfo) -> None:
        for name, value in numbers(info).items():
            writer.add_scalar(name, value, info.step)

    return log


def to_mlflow(client: Any, run_id: str) -> Log:
    """Log saves to a run of MLflow.

    Args:
        client: a ``mlflow.MlflowClient``, because the active run of ``mlflow`` belongs to one thread, and saves run in
            another.
        run_id: such as ``mlflow.active_run().info.run_id``.
    """

    def log(info: SaveInfo) -> None:
        for name, value in numbers(info).items():
            client.log_metric(run_id, name, value, step=info.step)

    return log


def to_wandb(run: Any) -> Log:
    """Log saves to a run of Weights & Biases, over ``recckpt/step``, because W&B drops values for past steps."""
    run.define_metric(f"{_PREFIX}*", step_metric=f"{_PREFIX}step")

    def log(info: SaveInfo) -> None:
        run.log(numbers(info))

    return log
