"""Output dirs of RecIS, whose files have names like ours: told apart, said to be so, and left alone."""

from __future__ import annotations

import re

from recckpt.format import layout
from recckpt.storage import Storage

NOTE = "this is an output dir of RecIS, whose checkpoints recckpt does not read"
_FILES = ("tensorkey.json", "index")  # in every checkpoint of RecIS, and in none of ours
_MAX_BYTES = 1 << 20


def is_of_recis(storage: Storage) -> bool:
    """Say whether the ``checkpoint`` file of an output dir is one of RecIS, or the dir itself is its checkpoint."""
    try:
        lines = storage.read(layout.INDEX_FILE, _MAX_BYTES).decode(errors="replace").split()
    except OSError:
        lines = []
    newest = [line for line in lines[-1:] if re.fullmatch(r"\w[\w.-]*", line, re.ASCII)]
    return any(_has_files(storage, directory) for directory in ("", *newest))


def _has_files(storage: Storage, directory: str) -> bool:
    try:
        for name in _FILES:
            storage.size(layout.join(directory, name))
    except OSError:
        return False
    return True
