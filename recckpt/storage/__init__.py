"""Storage of checkpoints: one interface for all kinds (only this package uses fsspec)."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recckpt.storage.base import (
    ABSENT,
    NOT_READABLE,
    Draft,
    HashingSink,
    Listed,
    NewFiles,
    NotPlainError,
    Sink,
    SinkFile,
    Storage,
    lost_is_damage,
    missing,
)
from recckpt.storage.local import LocalStorage

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+", re.ASCII)

__all__ = [
    "ABSENT",
    "NOT_READABLE",
    "Draft",
    "HashingSink",
    "Listed",
    "NewFiles",
    "NotPlainError",
    "Sink",
    "SinkFile",
    "Storage",
    "absolute",
    "lost_is_damage",
    "missing",
    "new_file",
    "open_parent",
    "open_storage",
]

_LOCAL = ("file://", "local://")


def open_storage(url: str) -> Storage:
    """Return the storage at a local path or any fsspec URL.

    Raises:
        ValueError: the URL is empty or its protocol is unknown to fsspec; the message names what to install.
    """
    _check_url(url)
    if _is_local(url):
        return LocalStorage(url.split("://", 1)[-1])
    # Importing fsspec takes as long as a small look-up.
    from fsspec import AbstractFileSystem

    from recckpt.storage.file_server import FileServer
    from recckpt.storage.objects import ObjectStorage
    from recckpt.storage.remote import connect

    protocol, separator, path = url.partition("://")
    url = f"{protocol}{separator}{path.rstrip('/')}"
    fs, root = connect(url)
    # By default, fsspec puts a small file by opening, writing and closing it, which is not one request.
    has_own_put = getattr(fs.pipe_file, "__func__", None) is not AbstractFileSystem.pipe_file
    return (ObjectStorage if has_own_put else FileServer)(url, fs, root)


def _check_url(url: object) -> None:
    if not isinstance(url, str) or not url:
        raise ValueError(f"an output dir must be a path or URL, found {url!r}")
    if "\0" in url:
        raise ValueError(f"an output dir must be a path or URL without NUL characters, found {url!r}")
    try:
        os.fsencode(url)
    except UnicodeEncodeError:
        raise ValueError(f"an output dir must be a path or URL encodable as UTF-8, found {url!r}") from None
    if url.startswith("~") and os.path.expanduser(url).startswith("~"):  # noqa: PTH111  # pathlib raises RuntimeError
        raise ValueError(
            f"{url!r} begins with the home directory of a user unknown here; name a directory by its absolute path"
        )
    scheme, _, rest = url.partition(":")
    if rest and not rest.startswith("//") and _SCHEME.fullmatch(scheme) and scheme.lower() in _schemes():
        path = rest.lstrip("/")
        if f"{scheme.lower()}://" in _LOCAL:  # with two slashes the path would begin in the working directory
            meant = f"{scheme}:///{path}, or {rest} alone" if rest.startswith("/") else f"{rest} alone"
        else:
            meant = f"{scheme}://{path}, or ./{url} for a local path"
        raise ValueError(f"{url!r} looks like a URL without its slashes: write {meant}")


def _schemes() -> frozenset[str]:
    from fsspec import available_protocols  # seldom: few paths have a colon

    return frozenset(available_protocols())


def absolute(path: str) -> str:
    """Return a path or URL that does not depend on the working directory; ValueError as for :func:`open_storage`."""
    _check_url(path)
    return str(_on_this_host(path)) if _is_local(path) else path


def _is_local(url: str) -> bool:
    return "://" not in url or url.startswith(_LOCAL)


def _on_this_host(url: str) -> Path:
    return Path(url.split("://", 1)[-1]).expanduser().absolute()


def open_parent(path: str) -> tuple[Storage, str]:
    """Return the storage of the parent of a directory or URL, and the name in it; follows a local link."""
    _check_url(path)
    if _is_local(path):
        place = _on_this_host(path)
        path = str(place.resolve() if place.is_symlink() and place.exists() else place)
    head, separator, rest = path.rpartition("://")
    parent, _, name = rest.rstrip("/").rpartition("/")
    root = "/" if rest.startswith("/") else ""
    return open_storage(f"{head}{separator}{parent or root}"), name


@contextmanager
def new_file(path: str) -> Iterator[Sink]:
    """Write a new file at a path or URL; FileExistsError, with a remedy, if the file exists."""
    storage, name = open_parent(path)
    try:
        try:
            created = storage.create(name)
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "the directory of this file does not exist", path) from error
        with created as sink:
            yield sink
    except FileExistsError as error:
        problem = "this file exists, expected a new one: remove it, or write to another name"
        raise FileExistsError(errno.EEXIST, problem, path) from error
