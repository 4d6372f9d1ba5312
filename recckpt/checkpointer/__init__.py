"""Checkpointers for a nested state dict: one ``.pt`` file per rank, written by this process or a child process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recckpt.checkpointer.checkpointer import (
        AsyncCheckpointer,
        Checkpointer,
        SyncCheckpointer,
        make_async_checkpointer,
        make_sync_checkpointer,
    )
    from recckpt.checkpointer.process import CheckpointProcess
    from recckpt.checkpointer.reader import StateReader
    from recckpt.checkpointer.staging import CheckpointStager, SharedMemoryStager, StagedState
    from recckpt.checkpointer.writer import Barrier, CheckpointWriter, PartlyCommittedError, RankInfo, WriterHook

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


_HOMES = ("writer", "process", "reader", "staging", "checkpointer")  # the first two do not import torch


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    return next(getattr(home, name) for home in homes if hasattr(home, name))
