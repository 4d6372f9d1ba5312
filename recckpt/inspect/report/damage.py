"""What is damaged, in a line (no torch here)."""

from __future__ import annotations

from recckpt.errors import CorruptCheckpointError


def said_of(error: Exception) -> str:
    """Return what is wrong, and what to do only where that is not what is said of all damage."""
    return str(error).removesuffix(f"; {CorruptCheckpointError.REMEDY}")
