"""Checkpointers for those who only have a nested state dict: one ``.pt`` file a rank, written here or in a process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.checkpointer.barrier import Barrier
    from recckpt.checkpointer.builder import make_async_checkpointer, make_sync_checkpointer
    from recckpt.checkpointer.checkpointer import AsyncCheckpointer, Checkpointer, SyncCheckpointer
    from recckpt.checkpointer.process import CheckpointProcess
    from recckpt.checkpointer.reader import StateReader
    from recckpt.checkpointer.stager import CheckpointStager, SharedMemoryStager, StagedState
    from recckpt.checkpointer.writer import CheckpointWriter, PartlyCommittedError, RankInfo, WriterHook

_HOMES = {
    "make_sync_checkpointer": "builder",
    "make_async_checkpointer": "builder",
    "Checkpointer": "checkpointer",
    "SyncCheckpointer": "checkpointer",
    "AsyncCheckpointer": "checkpointer",
    "CheckpointWriter": "writer",
    "StateReader": "reader",
    "CheckpointStager": "stager",
    "SharedMemoryStager": "stager",
    "StagedState": "stager",
    "CheckpointProcess": "process",
    "WriterHook": "writer",
    "Barrier": "barrier",
    "RankInfo": "writer",
    "PartlyCommittedError": "writer",
}

__all__ = [
    "make_sync_checkpointer",
    "make_async_checkpointer",
    "Checkpointer",
    "SyncCheckpointer",
    "AsyncCheckpointer",
    "CheckpointWriter",
    "StateReader",
    "CheckpointStager",
    "SharedMemoryStager",
    "StagedState",
    "CheckpointProcess",
    "WriterHook",
    "Barrier",
    "RankInfo",
    "PartlyCommittedError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
