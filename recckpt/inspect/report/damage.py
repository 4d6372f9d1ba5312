"""What is damaged, in a line (no torch here)."""

from __future__ import annotations

from recckpt.errors import CorruptCheckpointError


def damage_text(error: Exception) -> str:
    """Return the message of an error, without the remedy that every CorruptCheckpointError has."""
    return str(error).removesuffix(f"; {CorruptCheckpointError.REMEDY}")
