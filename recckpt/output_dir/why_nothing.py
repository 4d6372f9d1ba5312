"""Says why no checkpoint is found where one was looked for."""

from __future__ import annotations

from recckpt.format import layout
from recckpt.output_dir.index_file import NOTE, is_of_recis
from recckpt.storage import Storage


def why_nothing(storage: Storage) -> str:
    """Return what is there instead of checkpoints: nothing at all, what a save left, or files of others."""
    reason = storage.why_empty()
    if reason:
        return reason
    reason = "found no committed checkpoint"
    if _has(storage, layout.MANIFEST):
        return f"{reason} in it: this is the directory of one itself"
    if _has(storage, layout.INTENT):
        return f"{reason}: this is the directory of a save that has not ended, or of one that was removed in part"
    return f"{reason}; {NOTE}" if is_of_recis(storage) else reason


def _has(storage: Storage, name: str) -> bool:
    try:
        return storage.size(name) >= 0
    except OSError:
        return False
