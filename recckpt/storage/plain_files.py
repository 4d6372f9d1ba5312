"""Paths below a local output dir: links out of it are refused, and only regular files are opened."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_LINK = "a symbolic link out of its directory"


class NotPlainError(OSError):
    """A link, FIFO or device is in the place of a file or directory of a checkpoint."""

    found = "not a plain file"  # what it is


def directory(root: Path, name: str) -> Path:
    """Return the path of a directory below the root, which may be missing; NotPlainError if a link is in it."""
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


def new_place(root: Path, name: str) -> Path:
    """Return the path of a file that is to be made or removed; NotPlainError if a directory of it is a link."""
    parent, _, last = name.rpartition("/")
    return directory(root, parent) / last


def plain_file(root: Path, name: str) -> Path:
    """Return the path of an existing file; a link is followed only if it stays inside its checkpoint.

    Raises NotPlainError for any other link, and for what is not a regular file.
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


def refused(found: str, path: str) -> NotPlainError:
    """Return the error for something else in the place of a file or directory."""
    is_link = found.startswith(_KINDS[stat.S_IFLNK])
    problem = f"found {found}, expected {'no link' if is_link else 'a plain file'}; recckpt does not "
    problem += "follow links inside an output dir, which may itself be one" if is_link else "open it"
    error = NotPlainError(errno.ELOOP if is_link else errno.EINVAL, problem, path)
    error.found = f"unsafe path: {found}" if is_link else f"{found}, not a plain file"
    return error


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


def kind_of(mode: int) -> str:
    """Return what kind of thing a mode that is not a file's says."""
    return _KINDS.get(stat.S_IFMT(mode), "something unknown")
