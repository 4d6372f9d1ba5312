"""Local and mounted file systems: exclusive creation, fsync of files and directories, links as the commit."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from recckpt.format import layout
from recckpt.storage.base import Draft, Listed, Sink, Storage
from recckpt.storage.local_files import (
    LocalDraft,
    LocalSink,
    doing,
    map_file,
    new_place,
    open_plain,
    plain_file,
    real_directory,
    sync_entries,
)


class LocalStorage(Storage):
    """Files below a directory. Follows "POSIX" of the commit protocol; needs hard links."""

    asking_is_free = True

    def __init__(self, path: str) -> None:
        self._root = Path(path).expanduser().absolute()
        super().__init__(str(self._root))

    def prepare(self) -> None:
        if self._root.exists() and not self._root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "this is a file: name a directory, or a new path", self.url)
        with doing("making a directory", self._root):
            self._root.mkdir(parents=True, exist_ok=True)
        probe = layout.probe()
        try:
            self.put_if_absent(probe, b"")
        finally:
            self.remove(probe)

    def check_there(self) -> None:
        if not _is_dir(self._root):
            gone = "the directory is gone: it was removed, renamed or unmounted; saves continue once it is back"
            raise FileNotFoundError(errno.ENOENT, gone, self.url)

    def make_dir(self, name: str) -> None:
        """Make a directory exclusively; its parent's entry is durable afterwards."""
        with doing("making a directory", self._root / name):
            path = new_place(self._root, name)
            path.mkdir()
        sync_entries(path.parent)

    def create(self, name: str) -> Sink:
        path = self._new(name)
        if not _is_dir(path.parent):
            self.check_there()  # otherwise files would go to the mount point of an unmounted file system
            _make_dirs(path.parent)
        return LocalSink(path)

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Link a finished, synced file to its name; this fails if the name is taken."""
        path = self._new(name)
        temporary = _write_beside(path, data)
        try:
            with doing("linking", path):
                os.link(temporary, path)
        finally:
            with doing("removing", temporary):
                temporary.unlink()
        sync_entries(path.parent)

    def replace(self, name: str, data: bytes) -> None:
        """Rename a finished, synced file to its name; an existing link is replaced, not followed."""
        path = self._new(name)
        temporary = _write_beside(path, data)
        try:
            with doing("renaming", path):
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_entries(path.parent)

    def draft(self, name: str) -> Draft:
        path = self._new(name)
        _make_dirs(path.parent)
        return LocalDraft(path)

    def sync_dir(self, name: str) -> None:
        sync_entries(self._root / name)

    def why_empty(self) -> str:
        if self._root.is_dir():
            return ""
        return "not a directory" if self._root.exists() else "does not exist"

    def free_bytes(self) -> int | None:
        """Return the free bytes of the file system for this user; quotas are not taken into account."""
        with doing("measuring free space", self._root):
            file_system = os.statvfs(self._root)
        return file_system.f_bavail * file_system.f_frsize

    def threads(self, requested: int) -> int:
        """Return at most one thread per core, because each thread keeps a core busy with copying."""
        return min(requested, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

    def open(self, name: str) -> BinaryIO:
        with doing("opening", self._root / name):
            return open_plain(plain_file(self._root, name))

    def read(self, name: str, max_bytes: int, begin: int = 0) -> bytes:
        """Return at most ``max_bytes`` of a file; the buffer is no larger than the file."""
        with doing("reading", self._root / name), open_plain(plain_file(self._root, name)) as file:
            file.seek(begin)
            return file.read(min(max_bytes, os.fstat(file.fileno()).st_size + 1))

    def map(self, name: str) -> memoryview | None:
        with self.open(name) as file:
            return map_file(file.fileno(), str(self._root / name))

    def size(self, name: str) -> int:
        with doing("looking up", self._root / name):
            return plain_file(self._root, name).stat().st_size

    def modified(self, name: str) -> float:
        with doing("looking up", self._root / name):
            return plain_file(self._root, name).stat().st_mtime

    def list_dirs(self) -> list[str]:
        """Return the directories of the root, and links in place of checkpoints, so that reads refuse these by name."""
        with doing("listing", self._root):
            try:
                entries = list(os.scandir(self._root))
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) or self._is_checkpoint_elsewhere(e)]
        return sorted(name for name in names if name != "lost+found")  # of the file system; only root may look inside

    def _is_checkpoint_elsewhere(self, entry: os.DirEntry[str]) -> bool:
        """Return whether an entry is a link out of the root to a former checkpoint, or to nothing."""
        if not entry.is_symlink():
            return False
        target = os.path.realpath(entry.path)
        is_inside = Path(target).is_relative_to(os.path.realpath(self._root))
        return not is_inside and (not os.path.lexists(target) or os.path.lexists(f"{target}/{layout.MANIFEST}"))

    def list_files(self, directory: str) -> list[str]:
        """Return all files below a directory; links are listed, never followed."""
        names_below: list[str] = []
        with doing("listing", self._root / directory):
            top = str(real_directory(self._root, directory))
            for base, dirs, names in os.walk(top, followlinks=False, onerror=_unless_missing):
                inside = base[len(top) :].strip("/")  # without os.path, because a save lists often
                links = [name for name in dirs if Path(base, name).is_symlink()]
                names_below += [f"{inside}/{name}" if inside else name for name in (*names, *links)]
        return sorted(names_below)

    def listed(self, directory: str) -> dict[str, Listed]:
        """Return the plain files below a directory, without links and files that vanish meanwhile."""
        with doing("listing", self._root / directory):
            return dict(_plain_files(real_directory(self._root, directory)))

    def remove(self, name: str) -> None:
        """Unlink a name; the target of a link stays."""
        with doing("removing", self._root / name):
            new_place(self._root, name).unlink(missing_ok=True)

    def remove_empty_dirs(self, name: str) -> None:
        with doing("removing", self._root / name):
            top = real_directory(self._root, name)
        for base, _, _ in os.walk(top, topdown=False, followlinks=False):
            with doing("removing", base):
                Path(base).rmdir()

    def _new(self, name: str) -> Path:
        with doing("creating", self._root / name):
            return new_place(self._root, name)


def _write_beside(path: Path, data: bytes) -> Path:
    temporary = path.with_name(layout.temporary(path.name))
    with LocalSink(temporary) as sink:
        sink.write(data)
    return temporary


def _make_dirs(path: Path) -> None:
    """Make a directory and its parents, each durable in its own parent."""
    if not _is_dir(path):
        _make_dirs(path.parent)
        with doing("making a directory", path):
            path.mkdir(exist_ok=True)
        sync_entries(path.parent)


def _is_dir(path: Path) -> bool:
    with doing("looking up", path):
        return path.is_dir()


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
                status = entry.stat(follow_symlinks=False)
                yield f"{below}{entry.name}", Listed(status.st_size, f"{status.st_mtime_ns} {status.st_ino}")


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
