"""Opens, maps and writes files of a local file system, after a check that they are plain files."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from recckpt.format import layout
from recckpt.storage.base import Draft, Files, Sink, kind_of, refused

_LINK = "a symbolic link out of its directory"
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_CHUNK_BYTES = 8 << 20
_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)
_FAILED = ctypes.c_void_p(-1).value


def real_directory(root: Path, name: str) -> Path:
    """Return the path of a directory below the root, existing or not; NotPlainError if the path has a link."""
    place = str(root)
    for segment in filter(None, name.split("/")):
        place = f"{place}/{segment}"
        try:
            mode = os.lstat(place).st_mode
        except (FileNotFoundError, NotADirectoryError):
            break
        if stat.S_ISLNK(mode):
            raise refused("a symbolic link", place)
    return root / name


def check_owner(path: Path, remedy: str, *, may_be_of_root: bool = False) -> None:
    """Raise PermissionError if a directory belongs to another user, or is a link.

    Raises FileNotFoundError if it does not exist.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        problem = f"found {kind_of(status.st_mode)}, expected a directory"
    elif status.st_uid == os.getuid() or (may_be_of_root and status.st_uid == 0):
        return
    else:
        problem = f"a directory of user {status.st_uid}, expected one of user {os.getuid()}"
    raise PermissionError(errno.EACCES, f"{problem}; {remedy}", str(path))


def new_place(root: Path, name: str) -> Path:
    """Return the path of a file to make or remove; NotPlainError if one of its directories is a link."""
    parent, _, last = name.rpartition("/")
    return real_directory(root, parent) / last


def plain_file(root: Path, name: str) -> Path:
    """Return the path of an existing file; a link is followed only if it stays inside its checkpoint.

    Raises NotPlainError for any other link, and for anything but a regular file.
    """
    place, mode = str(root), 0
    segments = name.split("/")
    for depth, segment in enumerate(segments):
        place = f"{place}/{segment}"
        mode = os.lstat(place).st_mode
        if segment == ".." or (stat.S_ISLNK(mode) and depth == 0):
            raise refused("a symbolic link", place)
        if stat.S_ISLNK(mode):
            return _followed(root, name)
    if not stat.S_ISREG(mode):
        raise refused(kind_of(mode), place)
    return Path(place)


def open_plain(path: Path) -> BinaryIO:
    """Open a file; NotPlainError, without blocking, if it has become a FIFO or device."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise refused(kind_of(mode), str(path))
    return os.fdopen(fd, "rb")


def _followed(root: Path, name: str) -> Path:
    path, top = root / name, (root / name.split("/", maxsplit=1)[0]).resolve()
    try:
        target = Path(os.path.realpath(path, strict=True))
    except OSError as error:
        if error.errno == errno.ELOOP or not Path(os.path.realpath(path)).is_relative_to(top):
            raise refused(_LINK, str(path)) from error
        raise
    if not target.is_relative_to(top):
        raise refused(_LINK, str(path))
    mode = target.stat().st_mode
    if not stat.S_ISREG(mode):
        raise refused(kind_of(mode), str(path))
    return target


def map_file(descriptor: int, path: str) -> memoryview:
    """Map an open file for reading; the map survives closing the file and removing its name."""
    n_bytes = os.fstat(descriptor).st_size
    if n_bytes == 0:
        return memoryview(b"")
    address = _LIBC.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    memory = (ctypes.c_uint8 * n_bytes).from_address(address)  # every view of it keeps it alive
    weakref.finalize(memory, _LIBC.munmap, address, n_bytes).atexit = False
    return memoryview(memory).cast("B").toreadonly()


def drop_pages(mapped: memoryview) -> None:
    """Release the memory of a memory map, except pages that it does not cover completely."""
    import numpy as np  # a slow import that writer processes do not need

    address = np.frombuffer(mapped, np.uint8).ctypes.data
    first, end = -(-address // mmap.PAGESIZE), (address + len(mapped)) // mmap.PAGESIZE
    if first < end:
        _LIBC.madvise(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((end - first) * mmap.PAGESIZE), _DONTNEED)


def mapped(storage: Files, name: str) -> memoryview:
    """Return the bytes of a file as a memory map; of a temporary copy if the storage has no maps."""
    mapped_file = storage.map(name)
    if mapped_file is not None:
        return mapped_file
    with storage.open(name) as source, tempfile.TemporaryFile(buffering=0) as copy:
        return map_copy(source, copy)


def map_copy(source: BinaryIO, copy: IO[bytes]) -> memoryview:
    """Copy a file and return the copy as a memory map, which keeps no descriptor."""
    shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    return map_file(copy.fileno(), str(copy.name))


class LocalSink(Sink):
    """A new file, synced when it closes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with doing("creating", path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        with doing("writing", self._path):
            while view:  # a write may be short
                view = view[os.write(self._fd, view) :]
        self.n_bytes += total
        return total

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        with doing("syncing", self._path):
            try:
                os.fsync(fd)  # only once: after a failure the kernel reports the lost pages as clean
                size = os.fstat(fd).st_size
            finally:
                os.close(fd)
        if size != self.n_bytes:
            problem = f"found {size} bytes after writing {self.n_bytes}; the disk may be full"
            raise OSError(errno.EIO, problem, str(self._path))

    def discard(self) -> None:
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # the original error is the one to report
            if fd >= 0:
                os.close(fd)
        with suppress(OSError):  # a leftover is harmless, because it has no manifest
            self._path.unlink()


class LocalDraft(LocalSink, Draft):
    """A synced temporary file that is renamed over the older file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.with_name(layout.temporary(path.name)))
        self._target = path

    def seal(self) -> None:
        super().close()

    def close(self) -> None:
        if self._fd >= 0:
            self.seal()
        with doing("renaming", self._target):
            self._path.replace(self._target)
        sync_entries(self._target.parent)


def sync_entries(path: Path) -> None:
    with doing("syncing", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class doing:  # noqa: N801  # a word of its callers; by hand, since a save enters it hundreds of times
    """Add operation and path to an OSError that leaves the block; errors of descriptors have neither."""

    __slots__ = ("_operation", "_path")

    def __init__(self, operation: str, path: Path | str) -> None:
        self._operation, self._path = operation, path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            error.strerror = f"{self._operation} failed: {error.strerror}"
            error.filename = error.filename or str(self._path)
