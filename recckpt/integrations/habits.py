"""What users of other checkpoint callbacks write, and what to write to one of ours in its place."""

from __future__ import annotations

from inspect import signature

from recckpt.manager.manager import CheckpointManager
from recckpt.saver import Saver

_KEEP = "saver={'max_keep': Newest(2) | Best(3, 'val_auc')} of recckpt.policies.keep"
_EPOCHS = "EveryEpochs(1) of recckpt.policies.when as save_interval"

CALLBACK_ARGUMENTS = "('runs/clicks', 1000, saver={'max_keep': 3}, manager={'save_on_signal': ('SIGTERM',)})"
CALLBACK_INSTEAD = {
    **{name: f"saver={{{name!r}: ...}}" for name in signature(Saver).parameters},
    **{name: f"manager={{{name!r}: ...}}" for name in signature(CheckpointManager).parameters},
    "dirpath": "output_dir=...",
    "directory": "output_dir=...",
    "filename": "manager={'step_prefix': 'model'} for model_300",
    "monitor": _KEEP,
    "mode": _KEEP,
    "save_top_k": _KEEP,
    "save_total_limit": "saver={'max_keep': ...}",
    "save_last": "omit it, since the newest checkpoint is always kept",
    "every_n_train_steps": "save_interval=...",
    "save_steps": "save_interval=...",
    "every_n_epochs": _EPOCHS,
    "save_on_train_epoch_end": _EPOCHS,
    "train_time_interval": "EverySeconds(600) of recckpt.policies.when as save_interval",
    "save_weights_only": "saver={'save_slots': []}",
    "verbose": "logging.basicConfig(level=logging.INFO): a line for each save",
    "optimizers": "omit it, since those of the trainer are saved; sparse_optimizer=... is that of tables",
    "read_only": "recckpt.load_into(model, output_dir), in a process that trains nothing",
}
