"""File servers behind fsspec, such as SFTP. They have directories and renames, but no put-if-absent.

Their backends use one connection with one request at a time, and cannot sync.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import RLock
from typing import Any, BinaryIO, ClassVar
from weakref import finalize

from recckpt.format import layout
from recckpt.storage.base import Draft, Sink
from recckpt.storage.objects import ObjectStorage
from recckpt.storage.remote import connect
from recckpt.storage.retry import Retries, is_transient


class FileServer(ObjectStorage):
    """Files below a directory of a server. Each file is written under a temporary name, and renamed once complete."""

    may_be_conditional: ClassVar[bool] = False

    def __init__(self, url: str, fs: Any, root: str) -> None:
        super().__init__(url, fs, root)
        self._lock = RLock()
        self._keep(fs)

    def prepare(self) -> None:
        """Make the root, check that files can be written to it, and warn that a second writer is not fenced."""
        self._call("making a directory", "", lambda: self.make_dirs(self._root))
        super().prepare()

    def make_dir(self, name: str) -> None:
        self._call("making a directory", name, lambda: self._fs.mkdir(self._path(name)))

    def make_dirs(self, path: str) -> None:
        if not path or self._fs.isdir(path):
            return
        self.make_dirs(path.rpartition("/")[0])
        try:
            self._fs.mkdir(path, create_parents=False)
        except OSError:
            if not self._fs.isdir(path):
                raise

    def create(self, name: str) -> Sink:
        return _NewFile(self, self._path(name), self._retries(name), replaces=False)

    def draft(self, name: str) -> Draft:
        return _NewFile(self, self._path(name), self._retries(name), replaces=True)

    def remove_empty_dirs(self, name: str) -> None:
        super().remove_empty_dirs(name)  # raises if files are left
        top = self._path(name)
        entries = self._list(name, lambda: self._entries_below(top))
        dirs = [path for path, entry in entries.items() if entry["type"] == "directory"]

        def remove() -> None:
            for path in [*reversed(dirs), top]:
                with suppress(FileNotFoundError):
                    self._fs.rmdir(path)

        self._call("removing", name, remove)

    def threads(self, requested: int) -> int:
        return 1

    def _revive(self) -> None:
        """Reconnect if the server no longer answers over this connection."""
        try:
            self.fs.info(self._root)
        except FileNotFoundError:  # the server has answered
            return
        except Exception:
            with suppress(OSError):  # then the next attempt tries this again
                fs, self._root = connect(self.url)
                self._end()
                self._keep(fs)

    def _keep(self, fs: Any) -> None:
        """Use a connection from now on, and close it with this storage."""
        self._fs = fs
        # Nagle's algorithm would delay each SSH request by 40 ms, although the next request waits for an answer anyway.
        with suppress(AttributeError):  # not SSH, or over a proxy command, which is not a socket
            fs.client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = finalize(self, _disconnect, fs)

    @property
    def fs(self) -> Any:
        return self._fs

    def _attempt(self, work: Callable[[], Any], handled: BaseException | None) -> Any:
        """Do work, one thread at a time. After an error, make sure that the connection works."""
        with self._lock:
            try:
                return work()
            except Exception as error:
                if is_transient(error):
                    self._revive()
                raise

    def _read(self, name: str, begin: int, end: int) -> bytes:
        with self._open(name) as file:
            file.seek(begin)
            return file.read(end - begin)

    def _open(self, name: str) -> BinaryIO:
        if self._fs.info(self._path(name))["type"] == "directory":  # some servers open directories
            raise FileNotFoundError(errno.ENOENT, "found a directory, expected a file", self.url_of(name))
        return super()._open(name)

    def listed_by_dir(self) -> None: ...

    def _files_below(self, top: str) -> dict[str, dict[str, Any]]:
        return {path: entry for path, entry in self._entries_below(top).items() if entry["type"] != "directory"}

    def _entries_below(self, top: str) -> dict[str, dict[str, Any]]:
        """Return files and directories, each directory before its contents; fsspec's ``find`` ignores errors."""
        below: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):  # removed meanwhile
            for entry in self._fs.ls(top, detail=True):
                if entry["name"].rstrip("/") != top:  # some servers list a file below itself
                    below[entry["name"]] = entry
                    if entry["type"] == "directory":
                        below |= self._entries_below(entry["name"])
        return below

    def _write(self, path: str, data: bytes, **mode: str) -> None:
        beside = layout.temporary(path)
        try:
            self._fs.pipe_file(beside, data)
            self._fs.mv(beside, path)
        except BaseException:
            with suppress(Exception):  # the original error is the one to report
                self._fs.rm_file(beside)
            raise


class _NewFile(Draft):
    """A new file under a temporary name, renamed on close; not continued after a lost connection."""

    def __init__(self, storage: FileServer, path: str, retries: Retries, *, replaces: bool) -> None:
        self._storage, self._path, self._retries, self._replaces = storage, path, retries, replaces
        self._beside = layout.temporary(path)
        self._file: Any = retries.call("creating", self._open)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._retries.call("writing", lambda: self._file.write(view), again=False)
        self.n_bytes += len(view)
        return len(view)

    def seal(self) -> None:
        """Write the whole file under the temporary name; fsspec cannot make it durable."""
        file, self._file = self._file, None
        self._retries.call("closing", file.close, again=False)
        size = int(self._retries.call("checking", lambda: self._storage.fs.info(self._beside))["size"])
        if size != self.n_bytes:
            raise OSError(f"{self._retries.url}: found {size} bytes after writing {self.n_bytes}; check the storage")

    def close(self) -> None:
        if self._file is not None:
            self.seal()
        self._retries.call("renaming", lambda: self._storage.fs.mv(self._beside, self._path), again=False)

    def discard(self) -> None:
        file, self._file = self._file, None
        with suppress(Exception):  # the original error is the one to report
            self._retries.call("closing", file.close, again=False)
        with suppress(Exception):  # the file was renamed already, or is ignored
            self._retries.call("removing", lambda: self._storage.fs.rm_file(self._beside), again=False)

    def _open(self) -> Any:
        fs = self._storage.fs
        if not self._replaces and fs.exists(self._path):
            raise FileExistsError(errno.EEXIST, "exists already", self._retries.url)
        self._storage.make_dirs(self._path.rpartition("/")[0])
        return fs.open(self._beside, "wb")


def _disconnect(fs: Any) -> None:
    with suppress(Exception):  # not SSH, or already closed
        fs.client.get_transport().close()
