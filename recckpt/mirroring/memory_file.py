"""One file whose bytes are in memory, for checks that read files by name."""

from __future__ import annotations

import errno
import io
from typing import BinaryIO


class MemoryFile:
    """The bytes of one file: what :class:`recckpt.storage.base.Files` promises, of no other name."""

    def __init__(self, name: str, data: memoryview) -> None:
        self.url, self._data = name, data

    def open(self, name: str) -> BinaryIO:
        """Open the file for seeking and reading."""
        return io.BytesIO(self.map(name))

    def map(self, name: str) -> memoryview:
        """Return the bytes."""
        if name != self.url:
            raise FileNotFoundError(errno.ENOENT, "expected the one file that is in memory", name)
        return self._data

    def size(self, name: str) -> int:
        """Return how many bytes there are."""
        return len(self.map(name))

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return at most ``max_bytes``, from the start."""
        return bytes(self.map(name)[:max_bytes])

    def drop_cached(self, name: str) -> bool:
        """Say that another read gives the same bytes."""
        return False

    def threads(self, requested: int) -> int:
        """Return ``requested``."""
        return requested
