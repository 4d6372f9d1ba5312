"""recckpt: checkpoints for recommendation models. Nothing is imported before it is used, torch least of all."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.inspect.diff import diff
    from recckpt.inspect.find import find_checkpoint, is_checkpoint, list_checkpoints
    from recckpt.inspect.follow import follow
    from recckpt.inspect.history import history
    from recckpt.inspect.reader import CheckpointReader, dataset
    from recckpt.inspect.report import report
    from recckpt.inspect.sql import connect, scan
    from recckpt.load.serving import Standby, load_into
    from recckpt.manager.manager import CheckpointManager
    from recckpt.near.options import Near
    from recckpt.policies.deltas import Deltas
    from recckpt.rewrite.compact import compact
    from recckpt.rewrite.forget import forget
    from recckpt.rewrite.mirror import mirror
    from recckpt.save.background import SaveHandle
    from recckpt.save.save_info import SaveInfo
    from recckpt.saver import Saver
    from recckpt.sparse.split import filter_out_sparse_param, split_sparse_dense_state_dict
    from recckpt.types import is_hashtable

__version__ = "1.0.0rc1"

_HOMES = {
    "Saver": "saver",
    "SaveHandle": "save.background",
    "SaveInfo": "save.save_info",
    "CheckpointManager": "manager.manager",
    "Deltas": "policies.deltas",
    "Near": "near.options",
    "CheckpointReader": "inspect.reader",
    "dataset": "inspect.reader",
    "load_into": "load.serving",
    "Standby": "load.serving",
    "list_checkpoints": "inspect.find",
    "find_checkpoint": "inspect.find",
    "follow": "inspect.follow",
    "is_checkpoint": "inspect.find",
    "split_sparse_dense_state_dict": "sparse.split",
    "filter_out_sparse_param": "sparse.split",
    "is_hashtable": "types",
    "compact": "rewrite.compact",
    "forget": "rewrite.forget",
    "mirror": "rewrite.mirror",
    "diff": "inspect.diff",
    "report": "inspect.report",
    "history": "inspect.history",
    "connect": "inspect.sql",
    "scan": "inspect.sql",
}

__all__ = [
    "Saver",
    "SaveHandle",
    "SaveInfo",
    "CheckpointManager",
    "Deltas",
    "load_into",
    "Standby",
    "Near",
    "CheckpointReader",
    "dataset",
    "list_checkpoints",
    "find_checkpoint",
    "follow",
    "is_checkpoint",
    "split_sparse_dense_state_dict",
    "filter_out_sparse_param",
    "is_hashtable",
    "compact",
    "forget",
    "mirror",
    "diff",
    "report",
    "history",
    "connect",
    "scan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from recckpt.text.foreign_words import unknown_name

        raise unknown_name(__name__, name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
