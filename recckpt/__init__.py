"""recckpt: checkpoints for recommendation models. Nothing is imported before it is used, torch least of all."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.compaction.compact import compact
    from recckpt.forgetting.forget import forget
    from recckpt.inspect.diff.diff import diff
    from recckpt.inspect.find import find_checkpoint, is_checkpoint, list_checkpoints
    from recckpt.inspect.follow import follow
    from recckpt.inspect.over_time.first import first
    from recckpt.inspect.over_time.history import history
    from recckpt.inspect.reader import CheckpointReader, dataset
    from recckpt.inspect.report.report import report
    from recckpt.inspect.sql import connect, scan
    from recckpt.load.load_into import load_into
    from recckpt.load.standby import Standby
    from recckpt.manager.manager import CheckpointManager
    from recckpt.manager.read_only import ReadOnlyManager
    from recckpt.mirroring.mirror import mirror
    from recckpt.near.options import Near
    from recckpt.policies.deltas import Deltas
    from recckpt.save.background_save import SaveHandle
    from recckpt.save.save_info import SaveInfo
    from recckpt.saver import Saver
    from recckpt.sparse.split import filter_out_sparse_param, split_sparse_dense_state_dict
    from recckpt.types import is_hashtable

__version__ = "0.1.0"

_HOMES = {
    "Saver": "saver",
    "SaveHandle": "save.background_save",
    "SaveInfo": "save.save_info",
    "CheckpointManager": "manager.manager",
    "ReadOnlyManager": "manager.read_only",
    "Deltas": "policies.deltas",
    "Near": "near.options",
    "CheckpointReader": "inspect.reader",
    "dataset": "inspect.reader",
    "load_into": "load.load_into",
    "Standby": "load.standby",
    "list_checkpoints": "inspect.find",
    "find_checkpoint": "inspect.find",
    "follow": "inspect.follow",
    "is_checkpoint": "inspect.find",
    "split_sparse_dense_state_dict": "sparse.split",
    "filter_out_sparse_param": "sparse.split",
    "is_hashtable": "types",
    "compact": "compaction.compact",
    "forget": "forgetting.forget",
    "mirror": "mirroring.mirror",
    "diff": "inspect.diff.diff",
    "report": "inspect.report.report",
    "history": "inspect.over_time.history",
    "first": "inspect.over_time.first",
    "connect": "inspect.sql",
    "scan": "inspect.sql",
}

__all__ = [
    "Saver",
    "SaveHandle",
    "SaveInfo",
    "CheckpointManager",
    "ReadOnlyManager",
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
    "first",
    "connect",
    "scan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
