"""Reads, verifies, compares and repairs checkpoints: as data sets, by SQL, and row by row over a run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.inspect.changes import CheckpointChanges, RowChanges
    from recckpt.inspect.find import is_checkpoint
    from recckpt.inspect.reader import dataset
    from recckpt.inspect.row_history import history
    from recckpt.inspect.sql import connect, scan

_HOMES = {
    "dataset": "reader",
    "connect": "sql",
    "scan": "sql",
    "history": "row_history",
    "is_checkpoint": "find",
    "CheckpointChanges": "changes",
    "RowChanges": "changes",
}

__all__ = ["dataset", "connect", "scan", "history", "is_checkpoint", "CheckpointChanges", "RowChanges"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from recckpt.text.foreign_words import unknown_name

        raise unknown_name(__name__, name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
