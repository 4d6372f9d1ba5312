"""The fsspec backend of a URL, and a file of it that survives lost connections."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

import fsspec

from recckpt.storage.retry import Retries, os_error

_T = TypeVar("_T")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_EXTRAS |= {"sftp": "sftp", "ssh": "sftp"}
_NO_LISTINGS = frozenset({"sftp", "ssh"})  # without listings; would pass the option on to SSH


def connect(url: str) -> tuple[Any, str]:
    """Return a new fsspec file system for a URL, and the path of the URL in it.

    Raises ValueError if no backend knows the URL, with what to install; OSError if a backend cannot connect.
    """
    protocol = url.partition("://")[0]
    options = {} if protocol in _NO_LISTINGS else {"use_listings_cache": False}  # other processes write too
    try:
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        hint = f"; install recckpt[{_EXTRAS[protocol]}]" if protocol in _EXTRAS else ""
        raise ValueError(f"{url}: no backend for {protocol}:// here: {error}{hint}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}; expected a path, or a URL that fsspec and its backend accept") from error
    except Exception as error:
        raise os_error(error, "connecting", url) from error
    return fs, root


class RangedFile(io.RawIOBase):
    """Reads a file that never changes; opens it again after a failure. Not thread-safe."""

    def __init__(self, opened: Callable[[], BinaryIO], retries: Retries) -> None:
        self._opened, self._retries, self._at = opened, retries, 0
        self._file: BinaryIO | None = retries.call("opening", opened)
        self._size = retries.call("looking up", self._end)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        to = (0, self._at, self._size)[whence] + offset
        if to < 0:
            raise ValueError(f"a position must not be negative, found {to}")
        self._at = to
        return to

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        n_bytes = left if size is None or size < 0 else min(size, left)
        if not n_bytes:
            return b""
        data = self._retries.call("reading", lambda: self._read(n_bytes))
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._retries.call("closing", self._file.close, again=False)
        super().close()

    def _end(self) -> int:
        file = self._file = self._file or self._opened()
        file.seek(0, io.SEEK_END)
        return file.tell()

    def _read(self, size: int) -> bytes:
        file, self._file = self._file or self._opened(), None
        try:
            file.seek(self._at)
            data = file.read(size)
            if len(data) != size:
                raise OSError(f"found {len(data)} of {size} bytes at {self._at}: the file has changed")
        except BaseException:
            with suppress(Exception):  # its connection may have ended
                file.close()
            raise
        self._file = file
        return data
