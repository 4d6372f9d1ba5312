"""Local and mounted file systems: exclusive creation, fsync of files and directories, links as the commit."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from recckpt.format import layout
from recckpt.storage.base import Draft, Listed, Sink, Storage
from recckpt.storage.mapped_files import map_file
from recckpt.storage.plain_files import directory as real_directory
from recckpt.storage.plain_files import new_place, open_plain, plain_file


class LocalStorage(Storage):
    """Files below a directory. Follows "POSIX" of the commit protocol; needs hard links."""

    def __init__(self, path: str) -> None:
        self._root = Path(path).expanduser().absolute()
        super().__init__(str(self._root))

    def prepare(self) -> None:
        """Make the root and check that files can be written to it."""
        with _doing("making a directory", self._root):
            self._root.mkdir(parents=True, exist_ok=True)
        probe = f".probe-{secrets.token_hex(8)}.tmp"
        try:
            self.put_if_absent(probe, b"")
        finally:
            self.remove(probe)

    def check_there(self) -> None:
        """Look for the root."""
        if not _is_dir(self._root):
            gone = "the directory is gone: it was removed, renamed or unmounted; saves go on once it is there again"
            raise FileNotFoundError(errno.ENOENT, gone, self.url)

    def make_dir(self, name: str) -> None:
        """Make a directory exclusively; its parent's entry is durable afterwards."""
        with _doing("making a directory", self._root / name):
            path = new_place(self._root, name)
            path.mkdir()
        _sync_dir(path.parent)

    def create(self, name: str) -> Sink:
        """Open a new file, making the directory it is in."""
        path = self._new(name)
        if not _is_dir(path.parent):
            self.check_there()  # or files would go to where a file system was mounted, and is not any more
            _make_dirs(path.parent)
        return _LocalSink(path)

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Link a finished, synced file to its name, which fails where the name is taken."""
        path = self._new(name)
        temporary = _write_beside(path, data)
        try:
            with _doing("linking", path):
                os.link(temporary, path)
        finally:
            with _doing("removing", temporary):
                temporary.unlink()
        _sync_dir(path.parent)

    def replace(self, name: str, data: bytes) -> None:
        """Rename a finished, synced file over its name; a link there is replaced, not followed."""
        path = self._new(name)
        temporary = _write_beside(path, data)
        try:
            with _doing("renaming", path):
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_dir(path.parent)

    def draft(self, name: str) -> Draft:
        """Open a temporary file beside the older one, making the directory it is in."""
        path = self._new(name)
        _make_dirs(path.parent)
        return _LocalDraft(path)

    def sync_dir(self, name: str) -> None:
        """Fsync a directory."""
        _sync_dir(self._root / name)

    def why_empty(self) -> str:
        """Say whether the directory does not exist."""
        if self._root.is_dir():
            return ""
        return "not a directory" if self._root.exists() else "does not exist"

    def free_bytes(self) -> int | None:
        """Return what the file system has left for this user; quotas are not seen."""
        with _doing("measuring free space", self._root):
            found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize

    def threads(self, asked: int) -> int:
        """Return at most one a core: each keeps a core busy with copying."""
        return min(asked, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

    def open(self, name: str) -> BinaryIO:
        """Open a file inside the root."""
        with _doing("opening", self._root / name):
            return open_plain(plain_file(self._root, name))

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return at most ``max_bytes`` of a file; the buffer is of the size of the file."""
        with _doing("reading", self._root / name), open_plain(plain_file(self._root, name)) as file:
            return file.read(min(max_bytes, os.fstat(file.fileno()).st_size + 1))

    def map(self, name: str) -> memoryview | None:
        """Map a file; an empty one is b""."""
        with self.open(name) as file:
            return map_file(file.fileno(), str(self._root / name))

    def size(self, name: str) -> int:
        """Return the bytes of a file inside the root."""
        with _doing("looking up", self._root / name):
            return plain_file(self._root, name).stat().st_size

    def list_dirs(self) -> list[str]:
        """Return the directories of the root, and links of that place, which all reads refuse by name."""
        with _doing("listing", self._root):
            try:
                entries = list(os.scandir(self._root))
            except (FileNotFoundError, NotADirectoryError):
                return []
            found = [e.name for e in entries if e.is_dir(follow_symlinks=False) or self._is_checkpoint_elsewhere(e)]
        return sorted(name for name in found if name != "lost+found")  # of the file system; root alone may look inside

    def _is_checkpoint_elsewhere(self, entry: os.DirEntry[str]) -> bool:
        """Say whether an entry is a link out of the root to what was a checkpoint, or to what is not there now."""
        if not entry.is_symlink():
            return False
        target = os.path.realpath(entry.path)
        is_inside = Path(target).is_relative_to(os.path.realpath(self._root))
        return not is_inside and (not os.path.lexists(target) or os.path.lexists(f"{target}/{layout.MANIFEST}"))

    def list_files(self, directory: str) -> list[str]:
        """Return all files below a directory; links are listed, never followed."""
        found = []
        with _doing("listing", self._root / directory):
            top = real_directory(self._root, directory)
            for base, dirs, names in os.walk(top, followlinks=False, onerror=_unless_missing):
                links = [name for name in dirs if Path(base, name).is_symlink()]
                found += [Path(base, name) for name in (*names, *links)]
        return sorted(path.relative_to(top).as_posix() for path in found)

    def listed(self, directory: str) -> dict[str, Listed]:
        """Return the plain files below a directory; links, and what goes meanwhile, are left out."""
        with _doing("listing", self._root / directory):
            return dict(_plain_files(real_directory(self._root, directory)))

    def remove(self, name: str) -> None:
        """Unlink a name; what a link points to stays."""
        with _doing("removing", self._root / name):
            new_place(self._root, name).unlink(missing_ok=True)

    def remove_empty_dirs(self, name: str) -> None:
        """Remove a tree of empty directories."""
        with _doing("removing", self._root / name):
            top = real_directory(self._root, name)
        for base, _, _ in os.walk(top, topdown=False, followlinks=False):
            with _doing("removing", base):
                Path(base).rmdir()

    def _new(self, name: str) -> Path:
        with _doing("creating", self._root / name):
            return new_place(self._root, name)


class _LocalSink(Sink):
    def __init__(self, path: Path) -> None:
        self._path = path
        with _doing("creating", path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        with _doing("writing", self._path):
            while view:  # a write may be short
                view = view[os.write(self._fd, view) :]
        self.n_bytes += total
        return total

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        with _doing("syncing", self._path):
            try:
                os.fsync(fd)  # once: after a failure the kernel reports the lost pages as clean
                size = os.fstat(fd).st_size
            finally:
                os.close(fd)
        if size != self.n_bytes:
            problem = f"found {size} bytes after writing {self.n_bytes}; the disk may be full"
            raise OSError(errno.EIO, problem, str(self._path))

    def discard(self) -> None:
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # the error that led here is the one to report
            if fd >= 0:
                os.close(fd)
        with suppress(OSError):  # a leftover has no manifest
            self._path.unlink()


class _LocalDraft(_LocalSink, Draft):
    def __init__(self, path: Path) -> None:
        super().__init__(_temporary_beside(path))
        self._target = path

    def seal(self) -> None:
        super().close()

    def close(self) -> None:
        if self._fd >= 0:
            self.seal()
        with _doing("renaming", self._target):
            self._path.replace(self._target)
        _sync_dir(self._target.parent)


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def _write_beside(path: Path, data: bytes) -> Path:
    """Write a synced temporary file in the directory of ``path``."""
    temporary = _temporary_beside(path)
    with _LocalSink(temporary) as sink:
        sink.write(data)
    return temporary


def _make_dirs(path: Path) -> None:
    """Make a directory and those it is in, each durable in its parent."""
    if not _is_dir(path):
        _make_dirs(path.parent)
        with _doing("making a directory", path):
            path.mkdir(exist_ok=True)
        _sync_dir(path.parent)


def _is_dir(path: Path) -> bool:
    with _doing("looking up", path):
        return path.is_dir()


def _sync_dir(path: Path) -> None:
    with _doing("syncing", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _plain_files(top: Path, below: str = "") -> Iterator[tuple[str, Listed]]:
    try:
        entries = list(os.scandir(f"{top}/{below}"))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _plain_files(top, f"{below}{entry.name}/")
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield f"{below}{entry.name}", Listed(found.st_size, f"{found.st_mtime_ns} {found.st_ino}")


def _unless_missing(error: OSError) -> None:
    """Raise an error of a walk, but for a directory that is gone."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextmanager
def _doing(operation: str, path: Path | str) -> Iterator[None]:
    """Add operation and path to an OSError; calls on a descriptor know neither."""
    try:
        yield
    except OSError as error:
        error.strerror, error.filename = f"{operation} failed: {error.strerror}", error.filename or str(path)
        raise
