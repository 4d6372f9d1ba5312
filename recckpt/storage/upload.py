"""Uploads of objects: small objects in one request, large ones in parts; visible only when complete."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fsspec.spec import AbstractBufferedFile

from recckpt.storage.base import Draft
from recckpt.storage.retry import Retries

Put = Callable[[bytes], None]
BLOCK_BYTES = 16 << 20  # S3 accepts at most 10,000 parts, each of 5 MiB or more


class Upload(Draft):
    """An object that only :meth:`close` publishes: not an error, ``discard`` or garbage collection.

    Args:
        fs: the fsspec file system.
        path: path of the object in ``fs``.
        retries: the attempts at this object.
        put: sends a small object in one request; FileExistsError if the object exists.
        in_one: send even a large object in one request, because ``fs`` publishes a file as soon as it is opened.
        repeats: whether a part may be sent again, and nothing is published before ``commit``.
        replaces: whether the upload replaces an older object; otherwise an older object is an error.
    """

    def __init__(
        self, fs: Any, path: str, retries: Retries, put: Put, *, in_one: bool, repeats: bool, replaces: bool
    ) -> None:
        self._fs, self._path, self._retries, self._put = fs, path, retries, put
        self._in_one, self._repeats, self._replaces = in_one, repeats, replaces
        self._waiting = bytearray()  # bytes that are not yet in a part
        self._file: Any = None
        self._is_sent = self._may_be_seen = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.n_bytes += len(view)
        if self._in_one or (self._file is None and len(self._waiting) + len(view) <= BLOCK_BYTES):
            self._waiting += view
            return len(view)
        if self._file is None:
            self._file = self._retries.call("opening", self._open)
            waiting, self._waiting = self._waiting, bytearray()
            self._pass_on(memoryview(waiting))
        self._pass_on(view)
        return len(view)

    def seal(self) -> None:
        """Send all parts of a large object; a small one is sent when it closes."""
        if self._file is not None and self._repeats:
            self._retries.call("writing", self._send_rest)

    def close(self) -> None:
        if self._file is None:
            data = bytes(self._waiting)
            self._may_be_seen = True
            try:
                self._retries.call("writing", lambda: self._put(data))
            except FileExistsError:
                self._may_be_seen = False
                raise
        else:
            self._may_be_seen = True
            self._retries.call("publishing", self._publish, again=self._repeats)
        size = self._retries.call("checking", self._size)
        if size != self.n_bytes:
            raise OSError(f"{self._retries.url}: found {size} bytes after writing {self.n_bytes}; check the storage")
        self._drop()

    def discard(self) -> None:
        if self._file is not None:
            with suppress(Exception):  # the original error is the one to report
                self._file.discard()
        self._drop()
        if self._may_be_seen and not self._replaces:
            with suppress(Exception):  # a leftover is harmless, because it has no manifest
                self._fs.rm_file(self._path)

    def __del__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        file, self._file, self._waiting = self._file, None, bytearray()
        if file is not None:
            with suppress(Exception):
                file.closed = True  # otherwise closing it would publish the object on some backends
                file.close()

    def _open(self) -> Any:
        if not self._replaces and self._has_size(None):
            raise FileExistsError(errno.EEXIST, "exists already", self._retries.url)
        file = self._fs.open(self._path, "wb", block_size=BLOCK_BYTES, autocommit=False)
        with suppress(AttributeError, ValueError):
            self._fs.transaction.files.remove(file)  # otherwise the transaction keeps it forever
        return file

    def _pass_on(self, view: memoryview) -> None:
        for begin in range(0, len(view), BLOCK_BYTES):
            self._write_part(view[begin : begin + BLOCK_BYTES])

    def _write_part(self, data: memoryview) -> None:
        taken = False

        def write() -> None:
            nonlocal taken
            if taken:  # the data is in the file's buffer, which was not sent completely
                self._revive()
                self._file.flush()
            else:
                taken = True
                self._file.write(data)

        self._retries.call("writing", write, again=self._repeats)

    def _revive(self) -> None:
        """Reset the state that fsspec leaves after a failed flush, so that it can be tried again."""
        if self._file.closed:  # the upload was not begun
            self._file.closed, self._file.offset = False, None
        self._file.forced = False

    def _send_rest(self) -> None:
        if not self._is_sent and isinstance(self._file, AbstractBufferedFile):
            self._revive()
            self._file.flush(force=True)
        elif not self._is_sent:
            self._file.close()
        self._is_sent = True

    def _publish(self) -> None:
        try:
            self._send_rest()
            self._file.commit()
        except Exception:
            # The answer to the first try was lost; the retry found no upload. An older object may have the same size.
            if self._replaces or not self._has_size(self.n_bytes):
                raise

    def _has_size(self, n_bytes: int | None) -> bool:
        try:
            return self._size() == n_bytes or n_bytes is None
        except FileNotFoundError:
            return False

    def _size(self) -> int:
        return int(self._fs.info(self._path)["size"])
