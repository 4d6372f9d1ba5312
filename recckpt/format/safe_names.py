"""Which names read from a file are safe: no such name leads out of the checkpoint, and UTF-8 can hold it."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from recckpt.errors import CorruptCheckpointError

_MAX_NAME_CHARS, _MAX_SEGMENT_BYTES = 1024, 255  # what file systems take
_SAFE = re.compile(r"[A-Za-z0-9_][\w.-]{0,99}(?:/[A-Za-z0-9_][\w.-]{0,99}){0,3}", re.ASCII)  # all of ours are so
_UNSAFE = re.compile("[\\\\:\0\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_encodable(name: str) -> bool:
    """Say whether a name can be written down as UTF-8: half a surrogate pair, as of a cut emoji, cannot."""
    return _SURROGATE.search(name) is None


def checked_name(name: str, path: str) -> str:
    """Return a name read from the file ``path``; CorruptCheckpointError if it could lead out of the checkpoint."""
    if _SAFE.fullmatch(name):
        return name
    if len(name) > _MAX_NAME_CHARS or _UNSAFE.search(name) or not all(map(_is_plain, name.split("/"))):
        raise CorruptCheckpointError(
            path, "file name", found=f"unsafe path {name[:200]!r}", expected="a relative name inside the checkpoint"
        )
    return str(PurePosixPath(name))


def _is_plain(segment: str) -> bool:
    return segment not in ("", ".", "..") and len(segment.encode()) <= _MAX_SEGMENT_BYTES
