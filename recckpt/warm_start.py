"""Warm start: take state from other runs, the model bank, before the own run begins or resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recckpt.errors import LoadConfError
from recckpt.listing import locate_path
from recckpt.load_conf import parse_entry
from recckpt.manifest import Manifest
from recckpt.saver import Saver


def load_model_bank(saver: Saver, bank: Sequence[Mapping[str, Any]], shard_id: int = 0) -> list[Manifest]:
    """Load the entries of a bank in order; later ones win.

    All entries are parsed and their checkpoints located before the first is loaded.

    Args:
        saver: of the model to fill.
        bank: entries, see :meth:`recckpt.Saver.load_by_config`.
        shard_id: number of this rank.

    Returns:
        The manifests of the checkpoints, in order.

    Raises:
        LoadConfError: an entry asks for something that does not exist.
        CheckpointNotFoundError: a path holds no committed checkpoint.
        StateMismatchError: a checkpoint does not fit the model.
    """
    if not isinstance(bank, Sequence) or isinstance(bank, str):
        raise LoadConfError(f"model bank: found {type(bank).__name__}, expected a list of dicts")
    entries = [parse_entry(conf) for conf in bank]
    sources = [(locate_path(entry.path), entry.selection) for entry in entries]
    return [
        saver.load_checkpoint(storage, checkpoint, selection, shard_id=shard_id)
        for (storage, checkpoint), selection in sources
    ]
