"""Directories of an SSH server: exclusive creation and renames as on a local file system.

Needs a server such as OpenSSH's: its rename refuses to overwrite, its ``posix-rename@openssh.com`` overwrites at once,
and its ``fsync@openssh.com`` makes a file durable. Directories cannot be synced over this protocol.
"""

from __future__ import annotations

import errno
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import Any, BinaryIO, ClassVar, TypeVar, cast
from weakref import finalize

from recckpt.format import drafts, layout
from recckpt.storage.base import Draft, Listed, Sink
from recckpt.storage.remote import RemoteStorage
from recckpt.storage.retry import Retries, RetryPolicy
from recckpt.storage.sftp_files import SftpDraft, SftpSink, check_no_link, file_size, is_there, real_path, taken

_T = TypeVar("_T")

_TICK_SEC = 2.0  # a stamp is of a whole second, which is over then


class SftpStorage(RemoteStorage):
    """Files below a directory of an SSH server, over one connection, one request at a time."""

    fs_options: ClassVar[Mapping[str, Any]] = {}  # this backend keeps no listings, and would pass options on to SSH

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._root = self._fs._strip_protocol(self.url).rstrip("/")
        _send_at_once(self._fs)
        self._ahead_sec: float | None = None  # how far the server's clock is ahead of ours, once it was asked
        self.lock = RLock()  # paramiko may give the answer for one thread to another
        finalize(self, _disconnect, self._fs)

    def prepare(self) -> None:
        """Make the root, and check that files can be written to it and that the first of two gets a name."""
        self._make_dirs(self._root, "/")
        probe = drafts.probe()
        try:
            self.put_if_absent(probe, b"first")
            made = self._call("looking up", probe, lambda: self._fs.ftp.lstat(self._path(probe)).st_mtime)
            self._ahead_sec = made - time.time() if made else None
            with suppress(FileExistsError):
                self.put_if_absent(probe, b"second")
                raise OSError(errno.ENOTSUP, "this server's rename overwrites; use one such as OpenSSH's", self.url)
        finally:
            self.remove(probe)

    def make_dir(self, name: str) -> None:
        self._call("making a directory", name, lambda: self._mkdir(self._inside(name)))

    def create(self, name: str) -> Sink:
        return SftpSink(self._fs, self._new(name), self._retries(name))

    def draft(self, name: str) -> Draft:
        """Open a temporary file beside the older one, making the directory it is in."""
        return SftpDraft(self._fs, self._new(name), self._retries(name))

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Rename a finished file to its name, which fails where the name is taken."""
        path, temporary = self._path(name), self._write_beside(name, data)

        def put() -> None:
            try:
                self._fs.ftp.rename(temporary, path)
            except Exception as error:
                if not is_there(self._fs, path):
                    raise
                with self._fs.ftp.open(path) as file:
                    if file.read() != data:
                        raise FileExistsError(errno.EEXIST, "exists already", path) from error

        try:
            self._call("putting", name, put)
        finally:
            with suppress(OSError):  # renamed, as a rule
                self._call("removing", name, lambda: self._fs.ftp.remove(temporary))

    def replace(self, name: str, data: bytes) -> None:
        temporary = self._write_beside(name, data)
        self._call("replacing", name, lambda: self._fs.ftp.posix_rename(temporary, self._path(name)))

    def sync_dir(self, name: str) -> None:
        """Do nothing: the protocol cannot sync a directory."""

    def size(self, name: str) -> int:
        """Return the bytes of a plain file; links are not followed."""
        return self._call("looking up", name, lambda: file_size(self._fs, self._inside(name)))

    def modified(self, name: str) -> float:
        return float(self._call("looking up", name, lambda: self._fs.ftp.lstat(self._inside(name)).st_mtime))

    def list_dirs(self) -> list[str]:
        """Return the directories of the root, and links of that place, which all reads refuse by name."""
        names = [e.filename for e in self._entries("") if stat.S_ISDIR(e.st_mode) or self._is_checkpoint_elsewhere(e)]
        return sorted(name for name in names if name != "lost+found")

    def _is_checkpoint_elsewhere(self, entry: Any) -> bool:
        """Say whether an entry is a link out of the root to what was a checkpoint, or to what is not there now."""
        if not stat.S_ISLNK(entry.st_mode):
            return False

        def leads_out() -> bool:
            root, target = self._fs.ftp.normalize(self._root or "/"), real_path(self._fs, self._path(entry.filename))
            is_lost = not self._is_seen(target) or self._is_seen(f"{target}/{layout.MANIFEST}")
            return is_lost and not target.startswith(f"{root.rstrip('/')}/")

        return self._call("looking up", entry.filename, leads_out)

    def _is_seen(self, path: str) -> bool:
        """Say whether a name is taken, as far as this user may look."""
        try:
            return is_there(self._fs, path)
        except OSError:
            if not self.is_connected:
                raise
            return False

    def list_files(self, directory: str) -> list[str]:
        return sorted(name for name, entry in self._walk(directory) if not stat.S_ISDIR(entry.st_mode))

    def listed(self, directory: str) -> dict[str, Listed]:
        """Return the plain files below a directory: one request for a hundred of them.

        Times are whole seconds: a file of the last two has no stamp, since it may change and show the same one.
        """
        settled = 0 if self._ahead_sec is None else time.time() + self._ahead_sec - _TICK_SEC
        plain = {name: entry for name, entry in self._walk(directory) if stat.S_ISREG(entry.st_mode)}
        stamps = {name: str(e.st_mtime) if e.st_mtime and e.st_mtime < settled else "" for name, e in plain.items()}
        return {name: Listed(entry.st_size, stamps[name]) for name, entry in plain.items()}

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call("removing", name, lambda: self._fs.ftp.remove(self._inside(name)))

    def remove_empty_dirs(self, name: str) -> None:
        entries = list(self._walk(name))
        left = next((path for path, entry in entries if not stat.S_ISDIR(entry.st_mode)), None)
        if left is not None:
            raise OSError(errno.ENOTEMPTY, f"removing failed: it still holds {left}", self.url_of(name))
        for path in [*(f"{self._path(name)}/{path}" for path, _ in reversed(entries)), self._path(name)]:
            with suppress(FileNotFoundError):
                self._call("removing", name, partial(self._fs.ftp.rmdir, path))

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        transport = self._fs.client.get_transport()
        return transport is not None and transport.is_active()

    def connect(self) -> None:
        _disconnect(self._fs)
        self._fs._connect()
        _send_at_once(self._fs)

    def threads(self, requested: int) -> int:
        """Return 1: there is one connection."""
        return 1

    def _read(self, name: str, max_bytes: int) -> bytes:
        with self._open(name) as file:
            return file.read(max_bytes)

    def _open(self, name: str) -> BinaryIO:
        path = self._inside(name)
        file_size(self._fs, path)
        return cast(BinaryIO, self._fs.ftp.open(path))

    def _retries(self, name: str) -> Retries:
        return _OneAtATime(self.policy, self.url_of(name), self)

    def _walk(self, directory: str) -> Iterator[tuple[str, Any]]:
        """Yield what is below a directory with its attributes, each directory before what is in it."""
        for entry in self._entries(directory):
            yield entry.filename, entry
            if stat.S_ISDIR(entry.st_mode):
                below = self._walk(f"{directory}/{entry.filename}" if directory else entry.filename)
                yield from ((f"{entry.filename}/{inner}", attributes) for inner, attributes in below)

    def _entries(self, directory: str) -> list[Any]:
        try:
            entries = self._call("listing", directory, lambda: self._fs.ftp.listdir_attr(self._real(directory)))
        except FileNotFoundError:
            return []
        return list(entries)

    def _real(self, directory: str) -> str:
        """Return the path of a directory; NotPlainError where it, or one that it is in, is a link."""
        path = self._root
        for segment in filter(None, directory.split("/")):
            path = f"{path}/{segment}"
            check_no_link(self._fs, path)
        return path

    def _inside(self, name: str) -> str:
        """Return the path of a file; NotPlainError where a directory that it is in is a link."""
        parent, _, last = name.rpartition("/")
        return f"{self._real(parent)}/{last}"

    def _new(self, name: str) -> str:
        """Return the path of a file that is to be made, and make the directory it is in."""
        path = self._call("looking up", name, lambda: self._inside(name))
        self._make_dirs(path.rpartition("/")[0], self._root)
        return path

    def _make_dirs(self, path: str, top: str) -> None:
        """Make the directories on the way from ``top`` to ``path``."""
        missing = []
        while len(path) > len(top) and not self._call("looking up", "", partial(is_there, self._fs, path)):
            missing.append(path)
            path = path.rpartition("/")[0] or "/"
        for made in reversed(missing):
            with suppress(FileExistsError):
                self._call("making a directory", "", partial(self._mkdir, made))

    def _mkdir(self, path: str) -> None:
        with taken(self._fs, path):
            self._fs.ftp.mkdir(path)

    def _write_beside(self, name: str, data: bytes) -> str:
        path = drafts.temporary(self._call("looking up", name, lambda: self._inside(name)))
        with SftpSink(self._fs, path, self._retries(name)) as sink:
            sink.write(data)
        return path


class _OneAtATime(Retries):
    """Attempts that take turns, and connect again after the connection was lost."""

    def __init__(self, policy: RetryPolicy, url: str, storage: SftpStorage) -> None:
        super().__init__(policy, url, storage.count_retry)
        self._storage = storage  # whose connection ends with it

    def call(self, operation: str, work: Callable[[], _T], *, again: bool = True, url: str | None = None) -> _T:
        def locked() -> _T:
            with self._storage.lock:
                if again and not self._storage.is_connected:
                    self._storage.connect()
                try:
                    return work()
                except Exception as error:
                    if self._storage.is_connected and str(error) != "Socket is closed":  # of a file of an older one
                        raise
                    raise ConnectionError(f"the connection was lost: {error}") from error

        return super().call(operation, locked, again=again, url=url)


def _disconnect(fs: Any) -> None:
    with suppress(Exception):
        fs.client.close()


def _send_at_once(fs: Any) -> None:
    """Turn off Nagle's algorithm: each request waits for the answer to the one before, and would be delayed."""
    with suppress(AttributeError):  # a proxy command is not a socket
        fs.client.get_transport().sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
