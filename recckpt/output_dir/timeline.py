"""How the last saves of an output dir went: one JSON line each, for people and programs; nothing is decided by it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from recckpt.format import layout
from recckpt.storage import ABSENT, Storage

_MAX_BYTES = 1 << 20  # of the file; the oldest lines go


def append(storage: Storage, lines: Sequence[str]) -> None:
    """Add lines, except those that are there already; only the owner of the output dir may.

    Raises:
        OSError: the storage failed; they may be there all the same.
    """
    try:
        before = storage.read(layout.TIMELINE, 2 * _MAX_BYTES)
    except FileNotFoundError:
        before = b""
    there = before[-_MAX_BYTES:].splitlines(keepends=True)
    kept = there[1:] if len(before) > _MAX_BYTES else there
    new = [line for line in map(str.encode, lines) if line not in there]
    storage.replace(layout.TIMELINE, b"".join([*kept, *new]))


def read_timeline(storage: Storage) -> list[dict[str, Any]]:
    """Return the saves in the timeline, oldest first, [] without one; lines that are no JSON objects are passed over.

    Raises:
        OSError: the storage failed.
    """
    try:
        lines = storage.read(layout.TIMELINE, 2 * _MAX_BYTES).splitlines()
    except ABSENT:
        return []
    return [line for line in map(_object, lines) if line is not None]


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
