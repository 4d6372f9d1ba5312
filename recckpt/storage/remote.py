"""What all storages behind fsspec share: reading, and errors that name the URL and the operation."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from recckpt.storage.base import Storage
from recckpt.storage.retry import Retries, RetryPolicy, os_error, status_of

_READ_AHEAD_BYTES = 4 << 20
_T = TypeVar("_T")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_EXTRAS |= {"sftp": "sftp", "ssh": "sftp"}
_NO_LISTINGS = frozenset({"sftp", "ssh"})  # keep none, and would pass an option about them on to SSH


def connect(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, new, and the path of the URL in it.

    Raises:
        ValueError: there is no backend for the URL, or it does not take it; the message names what to install.
        OSError: a backend that connects at once cannot.
    """
    protocol = url.partition("://")[0]
    options = {} if protocol in _NO_LISTINGS else {"use_listings_cache": False}  # others write too
    try:
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        hint = f"; install recckpt[{_EXTRAS[protocol]}]" if protocol in _EXTRAS else ""
        raise ValueError(f"{url}: no backend for {protocol}:// here: {error}{hint}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}; expected a path, or a URL that fsspec and its backend take") from error
    except Exception as error:
        raise os_error(error, "connecting", url) from error
    return fs, root


class RemoteStorage(Storage):
    """Files below a URL; ``policy`` says how often to try again."""

    def __init__(self, url: str, fs: Any, root: str) -> None:
        super().__init__(url)
        self.policy = RetryPolicy()
        self._fs, self._root = fs, root

    def give_up_after(self, seconds: float) -> None:
        self.policy = replace(self.policy, deadline_sec=seconds)

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, RangedFile(lambda: self._open(name), self._retries(name)))

    def map(self, name: str) -> memoryview | None:
        return None

    def read(self, name: str, max_bytes: int, begin: int = 0) -> bytes:
        return self._call("reading", name, lambda: self._read(name, begin, begin + max_bytes))

    def size(self, name: str) -> int:
        info = self._call("looking up", name, lambda: self._fs.info(self._path(name)))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "looking up failed: a directory, no file", self.url_of(name))
        return int(info["size"])

    def drop_cached(self, name: str) -> bool:
        drop = getattr(self._fs, "pop_from_cache", None)  # of fsspec's caches on this host, such as filecache::
        if drop is not None:
            with suppress(Exception):  # it is not there
                drop(self._path(name))
        return True

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call("removing", name, lambda: self._fs.rm_file(self._path(name)))

    def _read(self, name: str, begin: int, end: int) -> bytes:
        try:
            data = bytes(self._fs.cat_file(self._path(name), start=begin, end=end))
        except Exception as error:
            if status_of(error) == 416:  # an empty file has no ranges
                return b""
            raise
        return data if len(data) <= end - begin else data[begin:end]  # of a server that knows no ranges

    def _open(self, name: str) -> BinaryIO:
        file: Any = self._fs.open(self._path(name), "rb", block_size=_READ_AHEAD_BYTES)
        if (getattr(file, "details", None) or {}).get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, "a directory, no file", self.url_of(name))
        return cast(BinaryIO, file)

    def _call(self, operation: str, name: str, work: Callable[[], _T]) -> _T:
        return self._retries(name).call(operation, work)

    def _retries(self, name: str) -> Retries:
        return Retries(self.policy, self.url_of(name), self.count_retry)

    def count_retry(self) -> None:
        """Count a request that is tried again; of several threads at once, one may be lost: it is for metrics."""
        self.n_retries += 1

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


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
        """Move; sends nothing to the server."""
        to = (0, self._at, self._size)[whence] + offset
        if to < 0:
            raise ValueError(f"a position is not negative, found {to}")
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
