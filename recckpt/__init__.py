"""recckpt: checkpoints for recommendation models. Names are imported on first use, torch only if a name needs it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.inspect.diff import diff
    from recckpt.inspect.find import find_checkpoint, list_checkpoints
    from recckpt.inspect.follow import follow
    from recckpt.inspect.reader import CheckpointReader
    from recckpt.inspect.report import report
    from recckpt.load.serving import Standby, load_into
    from recckpt.manager.manager import CheckpointManager
    from recckpt.policies.deltas import Deltas
    from recckpt.policies.options import Near
    from recckpt.save.background import SaveHandle
    from recckpt.save.save_info import SaveInfo
    from recckpt.saver import Saver

__version__ = "1.0.0rc1"

_HOMES = {
    "Saver": "saver",
    "CheckpointManager": "manager.manager",
    "Deltas": "policies.deltas",
    "Near": "policies.options",
    "SaveInfo": "save.save_info",
    "SaveHandle": "save.background",
    "CheckpointReader": "inspect.reader",
    "load_into": "load.serving",
    "follow": "inspect.follow",
    "Standby": "load.serving",
    "list_checkpoints": "inspect.find",
    "find_checkpoint": "inspect.find",
    "diff": "inspect.diff",
    "report": "inspect.report",
}
_ROOMS = {"inspect", "policies", "recis", "rewrite"}  # public subpackages

__all__ = [
    "Saver",
    "CheckpointManager",
    "Deltas",
    "Near",
    "SaveInfo",
    "SaveHandle",
    "CheckpointReader",
    "load_into",
    "follow",
    "Standby",
    "list_checkpoints",
    "find_checkpoint",
    "diff",
    "report",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        from recckpt.text.foreign_words import unknown_name

        raise unknown_name(__name__, name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
