"""Whole files, checked against the manifest before anybody looks into them (no torch here)."""

from __future__ import annotations

import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.storage import NOT_READABLE, missing
from recckpt.storage.base import Files


def read_checked(storage: Files, directory: str, entry: FileEntry, most: int | None = None) -> bytes:
    """Return the bytes of a file after checking its size and checksum.

    Args:
        storage: where the checkpoint lies.
        directory: the checkpoint's directory in it.
        entry: what the manifest says of the file.
        most: bytes that such a file may have.

    Raises:
        CorruptCheckpointError: missing, of another size, too large, or of another checksum.
    """
    path = layout.join(directory, entry.name)
    if most is not None and entry.n_bytes > most:  # before it is read
        raise CorruptCheckpointError(path, "its size", found=f"{entry.n_bytes} bytes", expected=f"at most {most}")
    try:
        data = storage.read(path, entry.n_bytes + 1)
    except NOT_READABLE as error:
        raise missing(path, error, f"{entry.n_bytes} bytes") from error
    if len(data) != entry.n_bytes:
        raise CorruptCheckpointError(path, "its size", found=len(data), expected=f"{entry.n_bytes} bytes")
    found = xxhash.xxh3_64_intdigest(data)
    if found != entry.xxh3:
        raise CorruptCheckpointError(path, "its checksum", found=f"{found:016x}", expected=f"{entry.xxh3:016x}")
    return data
