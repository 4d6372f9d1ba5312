"""What users of other checkpoint managers write, and what to write in its place."""

from __future__ import annotations

from collections.abc import Collection

from recckpt.text import nearest

_KEEP = "max_keep=Newest(2) | Best(3, 'auc') of recckpt.policies.keep, and step(metrics={'auc': ...})"
_WHEN = "save_interval=EverySteps(1000) | WhenTrue(predicate) of recckpt.policies.when"
_EPOCHS = "save_interval=EveryEpochs(1) of recckpt.policies.when, and epoch() at the end of each"
_REGISTER = "register_for_checkpointing(name, obj) once"
_ALL = "omit it, since all that was attached or registered is saved and restored"
INSTEAD = {
    "best_fn": _KEEP,
    "best_mode": _KEEP,
    "mode": _KEEP,
    "monitor": _KEEP,
    "save_top_k": _KEEP,
    "preservation_policy": _KEEP,
    "should_keep_fn": _KEEP,
    "keep_period": "max_keep=Newest(2) | EveryNth(1000) of recckpt.policies.keep",
    "keep_time_interval": "max_keep=Newest(2) | OnePer(86400) of recckpt.policies.keep",
    "max_to_keep": "max_keep=...",
    "read_only": "CheckpointManager.attach(model, output_dir=..., read_only=True)",
    "save_total_limit": "max_keep=...",
    "save_last": "omit it, since the newest checkpoint is always kept",
    "checkpoint_dir": "output_dir=...",
    "directory": "output_dir=...",
    "dirpath": "output_dir=...",
    "filename": "step_prefix='model' for model_300, and step(metrics={'auc': ...})",
    "step_format_fixed_length": "step_prefix='model' for model_300",
    "step_name_format": "step_prefix='model' for model_300",
    "create": "omit it, since the output dir is made",
    "verbose": "logging.basicConfig(level=logging.INFO): a line for each save",
    "every_n_train_steps": "save_interval=...",
    "save_interval_steps": "save_interval=...",
    "save_steps": "save_interval=...",
    "save_decision_policy": _WHEN,
    "save_on_steps": _WHEN,
    "should_save_fn": _WHEN,
    "every_n_epochs": _EPOCHS,
    "save_on_train_epoch_end": _EPOCHS,
    "train_time_interval": "save_interval=EverySeconds(600) of recckpt.policies.when",
    "async_options": "async_save=True, which is the default of attach",
    "enable_async_checkpointing": "async_save=True, which is the default of attach",
    "async_timeout_secs": "timeout_sec=...",
    "save_weights_only": "save_slots=[]",
    "options": "each option by itself, such as max_keep=3",
    "handler_registry": _REGISTER,
    "item_handlers": _REGISTER,
    "item_names": _REGISTER,
    "metadata": "state={...} of step() and save()",
    "data_loader": "loader=...",
    "dataloader": "loader=...",
    "dataset": "loader=...",
    "train_dataloader": "loader=...",
    "lr_scheduler": "schedulers=...",
    "optimizer": "optimizers=...",
    "scheduler": "schedulers=...",
    "sparse_optim": "optimizers=[...], which takes all of them",
}
SAVE_INSTEAD = {
    "args": _ALL,
    "items": _ALL,
    "save_kwargs": _ALL,
    "force": "omit it, since save() saves whatever should_save() says",
    "custom_metadata": "state={...}",
}
STEP_INSTEAD = {"step": "omit it, since step() counts; or save(step=N) in a loop that counts its own steps"}
RESTORE_INSTEAD = {
    "args": f"{_ALL}; load_conf={{'exclude': [...]}} takes a part",
    "items": f"{_ALL}; load_conf={{'exclude': [...]}} takes a part",
    "step": "restore(300)",
    "strict": "load_conf={'strict': False}",
}

ATTACH_LINE = "attach(model, [optimizers], output_dir=..., save_interval=100)"
SAVE_LINE = "save(), or save(300, metrics={'auc': 0.7}) in a loop that counts its own steps"
STEP_LINE = "step(), or step(metrics={'auc': 0.7})"
RESTORE_LINE = "restore(), or restore(300); a checkpoint of another run comes by load_model_bank([{'path': ...}])"
_FOUND_BEST = "recckpt.find_checkpoint(output_dir, 'best', 'auc')"
_ATTRIBUTES = {
    "best_step": f"{_FOUND_BEST}.step",
    "best_model_path": f"{_FOUND_BEST}.path",
    "best_model_score": f"{_FOUND_BEST}.state['auc']",
    "best_k_models": "recckpt.list_checkpoints(output_dir), whose state has the metrics",
    "checkpoints": "recckpt.list_checkpoints(output_dir)",
    "last_model_path": "recckpt.find_checkpoint(output_dir, 'latest').path",
    "last_checkpoint": "recckpt.find_checkpoint(output_dir, 'latest').path",
    "directory": "saver.output_dir",
    "dirpath": "saver.output_dir",
    "output_dir": "saver.output_dir",
    "max_keep": "saver.max_keep",
    "model": "saver.model",
    "metadata": "recckpt.find_checkpoint(output_dir, step).state",
    "item_metadata": "recckpt.find_checkpoint(output_dir, step).state",
    "metrics": "recckpt.find_checkpoint(output_dir, step).state",
    "check_for_errors": "wait_until_finished(), which raises the error of the save",
    "is_saving_in_progress": "saver.is_saving",
    "reload": "restore()",
    "register": "register_for_checkpointing(name, obj)",
    "load": "restore(), or saver.load(path) for a checkpoint elsewhere",
    "load_checkpoint": "restore(), or saver.load(path) for a checkpoint elsewhere",
    "load_state_dict": "restore(), which fills the model in place",
    "save_checkpoint": "save()",
    "state_dict": "save(), which takes the state of the model itself",
}


def advice(instead: str) -> str:
    """Return what a table here says, as an imperative."""
    return instead if instead.startswith("omit") else f"write {instead}"


def unknown_attribute(name: str, known: Collection[str] = ()) -> str:
    """Return what to say of an attribute that a manager does not have, and what to write instead."""
    instead = f": write {_ATTRIBUTES[name]}" if name in _ATTRIBUTES else nearest(name, known)
    return f"a CheckpointManager has no {name!r}{instead}"


def unknown_when_read_only(name: str) -> str:
    """Return what to say of an attribute that a manager does not have which only reads."""
    instead = f"write {_ATTRIBUTES[name].removeprefix('saver.')}" if name in _ATTRIBUTES else None
    what = instead or "it restores and follows, and writes nothing"
    return f"a CheckpointManager with read_only=True has no {name!r}: {what}"


def unknown_option(name: str, known: Collection[str]) -> str:
    """Return what is wrong with an option that is not one, and what to write instead."""
    if name in INSTEAD:
        return f"{name!r} is not an option: {advice(INSTEAD[name])}"
    return f"{name!r} is an option of neither Saver nor CheckpointManager{nearest(name, known)}"
