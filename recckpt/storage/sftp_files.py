"""New files over SFTP, and lookups that tell what its single error code means."""

from __future__ import annotations

import errno
import posixpath
import stat
from contextlib import suppress
from typing import Any

from recckpt.format import drafts
from recckpt.storage.base import Draft, Sink, kind_of, refused
from recckpt.storage.retry import Retries

_EXTENDED = 200  # SSH_FXP_EXTENDED of the protocol
_MOST_LINKS = 40  # on the way to a file, as on Linux


class SftpSink(Sink):
    """A new file under its final name; it is not continued after a lost connection."""

    def __init__(self, fs: Any, path: str, retries: Retries) -> None:
        self._fs, self._path, self._retries = fs, path, retries
        self._file = retries.call("creating", self._open)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._retries.call("writing", lambda: self._file.write(view), again=False)
        self.n_bytes += len(view)
        return len(view)

    def close(self) -> None:
        self._retries.call("syncing", self._finish, again=False)

    def discard(self) -> None:
        file, self._file = self._file, None
        with suppress(Exception):  # the error that led here is the one to report
            self._retries.call("closing", file.close, again=False)
        with suppress(Exception):  # a leftover has no manifest
            self._retries.call("removing", lambda: self._fs.ftp.remove(self._path), again=False)

    def _open(self) -> Any:
        with taken(self._fs, self._path):
            return self._fs.ftp.open(self._path, "wx", bufsize=0)

    def _finish(self) -> None:
        file, self._file = self._file, None
        try:
            self._fs.ftp._request(_EXTENDED, "fsync@openssh.com", file.handle)
        finally:
            file.close()
        size = file_size(self._fs, self._path)
        if size != self.n_bytes:
            raise OSError(errno.EIO, f"found {size} bytes after writing {self.n_bytes}")


class SftpDraft(SftpSink, Draft):
    """A temporary file that is renamed over the older one."""

    def __init__(self, fs: Any, path: str, retries: Retries) -> None:
        super().__init__(fs, drafts.temporary(path), retries)
        self._target = path

    def seal(self) -> None:
        """Make what is written durable, under the temporary name."""
        super().close()

    def close(self) -> None:
        if self._file is not None:
            self.seal()
        self._retries.call("replacing", lambda: self._fs.ftp.posix_rename(self._path, self._target))


class taken:  # noqa: N801  # reads as a statement
    """Raises FileExistsError for what the protocol calls just "Failure", if the name is taken."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError) and error.errno is None and is_there(self._fs, self._path):
            raise FileExistsError(errno.EEXIST, "exists already", self._path) from error


def is_there(fs: Any, path: str) -> bool:
    """Say whether a name is taken, by a dangling link too."""
    try:
        fs.ftp.lstat(path)
    except FileNotFoundError:
        return False
    return True


def real_path(fs: Any, path: str, links_left: int = _MOST_LINKS) -> str:
    """Return where a path leads, past what is missing too, which servers refuse to say; links in a circle end it."""
    try:
        return str(fs.ftp.normalize(path))
    except OSError:
        if not path.strip("/"):
            raise
    parent, last = posixpath.split(path)
    try:
        target = fs.ftp.readlink(path) if links_left else None
    except OSError:  # no link
        target = None
    if target is not None:
        return real_path(fs, posixpath.join(parent, target), links_left - 1)
    return posixpath.normpath(posixpath.join(real_path(fs, parent, links_left), last))


def check_no_link(fs: Any, path: str) -> None:
    """Raise NotPlainError where a link is in the place of a directory, which may be missing."""
    with suppress(FileNotFoundError):
        mode = fs.ftp.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            raise refused(kind_of(mode), path)


def file_size(fs: Any, path: str) -> int:
    """Return the bytes of a plain file; links are not followed."""
    status = fs.ftp.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise refused(kind_of(status.st_mode), path)
    return int(status.st_size)
