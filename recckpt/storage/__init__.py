"""Where checkpoints lie: one seam for all kinds of storage (the only place that knows fsspec)."""

from __future__ import annotations

from pathlib import Path

from recckpt.storage.base import Draft, NewFiles, Sink, Storage, UnsafeLinkError, missing
from recckpt.storage.local import LocalStorage
from recckpt.storage.sink_file import HashingSink, SinkFile

__all__ = [
    "Draft",
    "HashingSink",
    "NewFiles",
    "Sink",
    "SinkFile",
    "Storage",
    "UnsafeLinkError",
    "missing",
    "open_parent",
    "open_storage",
]


def open_storage(url: str) -> Storage:
    """Return the storage at a local path or any fsspec URL.

    Raises:
        ValueError: the URL is empty or its protocol is unknown to fsspec; the message names what to install.
    """
    if not isinstance(url, str) or not url:
        raise ValueError(f"an output dir is a path or URL, found {url!r}")
    if "://" not in url or url.startswith(("file://", "local://")):
        return LocalStorage(url.split("://", 1)[-1])
    # fsspec takes as long to import as a small look-up
    if url.startswith(("sftp://", "ssh://")):
        from recckpt.storage.sftp import SftpStorage

        return SftpStorage(url)
    from recckpt.storage.objects import ObjectStorage

    return ObjectStorage(url)


def open_parent(path: str) -> tuple[Storage, str]:
    """Return the storage around a directory or URL, and its name in it."""
    if "://" not in path:
        path = str(Path(path).expanduser().absolute())
    head, separator, rest = path.rpartition("://")
    parent, _, name = rest.rstrip("/").rpartition("/")
    root = "/" if rest.startswith("/") else ""
    return open_storage(f"{head}{separator}{parent or root}"), name
