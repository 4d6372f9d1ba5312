"""A remote file that is read in ranges, each of which is tried again."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, BinaryIO

from recckpt.storage.retry import Retries


class RangedFile(io.RawIOBase):
    """Reads a file that never changes; opens it again after a failure. Not thread-safe."""

    def __init__(self, opened: Callable[[], BinaryIO], retries: Retries) -> None:
        self._opened, self._retries, self._at = opened, retries, 0
        self._file: BinaryIO | None = retries.call("opening", opened)
        self._size = retries.call("looking up", self._end)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; sends nothing to the server."""
        to = (0, self._at, self._size)[whence] + offset
        if to < 0:
            raise ValueError(f"a position is not negative, found {to}")
        self._at = to
        return to

    def read(self, size: int | None = -1) -> bytes:
        """Read ``size`` bytes, fewer only at the end of the file."""
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        data = self._retries.call("reading", lambda: self._read(wanted))
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, as far as the file goes."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the connection."""
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()

    def _end(self) -> int:
        file = self._file = self._file or self._opened()
        file.seek(0, io.SEEK_END)
        return file.tell()

    def _read(self, size: int) -> bytes:
        file, self._file = self._file or self._opened(), None
        file.seek(self._at)
        data = file.read(size)
        if len(data) != size:
            raise OSError(f"found {len(data)} of {size} bytes at {self._at}: the file has changed")
        self._file = file
        return data
