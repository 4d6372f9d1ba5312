"""Options of the checkpoint managers of others, each with what to write in its place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec

from recckpt.saver import Saver
from recckpt.text import nearest

_P = ParamSpec("_P")

_KEEP = "max_keep=Newest(2) | Best(3, 'auc') of recckpt.policies.keep, and step(metrics={'auc': ...})"
_INSTEAD = {
    "best_fn": _KEEP,
    "best_mode": _KEEP,
    "mode": _KEEP,
    "monitor": _KEEP,
    "save_top_k": _KEEP,
    "keep_period": "max_keep=Newest(2) | EveryNth(1000) of recckpt.policies.keep",
    "keep_time_interval": "max_keep=Newest(2) | OnePer(86400) of recckpt.policies.keep",
    "max_to_keep": "max_keep=...",
    "read_only": "CheckpointManager.attach(model, output_dir=..., read_only=True)",
    "save_total_limit": "max_keep=...",
    "save_last": "nothing: the newest checkpoint is always kept",
    "checkpoint_dir": "output_dir=...",
    "directory": "output_dir=...",
    "dirpath": "output_dir=...",
    "every_n_train_steps": "save_interval=...",
    "save_interval_steps": "save_interval=...",
    "save_steps": "save_interval=...",
    "every_n_epochs": "save_interval=EveryEpochs(1) of recckpt.policies.when, and epoch() at the end of each",
    "train_time_interval": "save_interval=EverySeconds(600) of recckpt.policies.when",
    "enable_async_checkpointing": "async_save=True, which is the default of attach",
    "save_weights_only": "save_slots=[]",
    "options": "each option by itself, such as max_keep=3",
    "data_loader": "loader=...",
    "dataloader": "loader=...",
    "dataset": "loader=...",
    "train_dataloader": "loader=...",
    "lr_scheduler": "schedulers=...",
    "optimizer": "optimizers=...",
    "scheduler": "schedulers=...",
    "sparse_optim": "optimizers=[...], which takes all of them",
}

MADE_BY_ATTACH = "CheckpointManager.attach(model, optimizers, output_dir=..., save_interval=...) makes one"
_ATTRIBUTES = {
    "best_step": "recckpt.find_checkpoint(output_dir, 'best', 'auc').step",
    "best_model_path": "recckpt.find_checkpoint(output_dir, 'best', 'auc').path",
    "last_model_path": "recckpt.find_checkpoint(output_dir, 'latest').path",
    "directory": "saver.output_dir",
    "metadata": "recckpt.find_checkpoint(output_dir, step).state",
    "item_metadata": "recckpt.find_checkpoint(output_dir, step).state",
    "metrics": "recckpt.find_checkpoint(output_dir, step).state",
    "reload": "restore()",
}


def unknown_attribute(name: str) -> str:
    """Return what to say of an attribute that a manager does not have, and what to write instead."""
    return f"a CheckpointManager has no {name!r}{f': write {_ATTRIBUTES[name]}' if name in _ATTRIBUTES else ''}"


def unknown_when_read_only(name: str) -> str:
    """Return what to say of an attribute that a manager does not have which only reads."""
    instead = (
        f"write {_ATTRIBUTES[name].removeprefix('saver.')}"
        if name in _ATTRIBUTES
        else "it restores and follows, and writes nothing"
    )
    return f"a CheckpointManager with read_only=True has no {name!r}: {instead}"


def answers_habits(init: Callable[_P, None]) -> Callable[_P, None]:
    """Return a constructor that answers options of the managers of others with what to write instead."""
    known = inspect.signature(init).parameters.keys()

    @functools.wraps(init)
    def answering(*args: _P.args, **options: _P.kwargs) -> None:
        if unknown := sorted(options.keys() - known):
            raise TypeError("; ".join([*(_wrong(name, known) for name in unknown), MADE_BY_ATTACH]))
        init(*args, **options)

    return answering


def _wrong(name: str, known: Collection[str]) -> str:
    is_of_saver = name in inspect.signature(Saver).parameters
    return f"{name!r} is an option of Saver: give it there" if is_of_saver else unknown_option(name, known)


def unknown_option(name: str, known: Collection[str]) -> str:
    """Return what is wrong with an option that is not one, and what to write instead."""
    if name in _INSTEAD:
        return f"{name!r} is not an option: write {_INSTEAD[name]}"
    return f"{name!r} is an option of neither Saver nor CheckpointManager{nearest(name, known)}"
