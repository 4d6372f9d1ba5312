"""Everything that fsspec reaches: one object a file, no directories, no renames, nothing published on an error."""

from __future__ import annotations

import errno
from contextlib import suppress
from io import BytesIO
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from recckpt.storage.base import Draft, Sink, Storage


class ObjectStorage(Storage):
    """Objects below a URL. Follows "Object stores" of the commit protocol."""

    def __init__(self, url: str) -> None:
        protocol, separator, path = url.partition("://")
        super().__init__(f"{protocol}{separator}{path.rstrip('/')}")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            raise ValueError(f"{url}: {error}; install the extra for it, such as recckpt[s3]") from error

    def prepare(self) -> None:
        """Check that objects can be written."""
        probe = f"{self._root}/.probe"
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(probe, b"")
        self._fs.rm_file(probe)

    def make_dir(self, name: str) -> None:
        """Refuse a prefix under which there are objects; stores have no directories to make."""
        if self.list_files(name):
            raise FileExistsError(f"{self.url}/{name} exists already")

    def create(self, name: str) -> Sink:
        """Open an upload that is published when it closes."""
        if self._fs.exists(self._path(name)):
            raise FileExistsError(f"{self.url}/{name} exists already")
        return _ObjectSink(self._fs, self._path(name))

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Put one small object; who wins a race is decided by reading it back."""
        path = self._path(name)
        try:
            self._fs.pipe_file(path, data, mode="create")
        except OSError as error:  # perhaps of a second try, after a first one whose answer got lost
            if not self._fs.exists(path):
                raise
            if self._fs.cat_file(path) != data:
                raise FileExistsError(errno.EEXIST, "exists already", f"{self.url}/{name}") from error

    def replace(self, name: str, data: bytes) -> None:
        """Put one small object."""
        self._fs.pipe_file(self._path(name), data)

    def draft(self, name: str) -> Draft:
        """Open an upload that is published when it closes."""
        return _ObjectDraft(self._fs, self._path(name))

    def sync_dir(self, name: str) -> None:
        """Do nothing: a published object is durable."""

    def open(self, name: str) -> BinaryIO:
        """Open an object for ranged reads."""
        file = self._fs.open(self._path(name), "rb")
        if isinstance(file, MemoryFile):  # the one and only, whose position all readers would share
            file = BytesIO(file.getvalue())
        return cast(BinaryIO, file)

    def map(self, name: str) -> memoryview | None:
        """Return None: there is no memory to map."""
        return None

    def size(self, name: str) -> int:
        """Return the bytes of an object."""
        found = self._fs.info(self._path(name))
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "a prefix, no object", f"{self.url}/{name}")
        return int(found["size"])

    def list_dirs(self) -> list[str]:
        """Return the first segments of the names below the root."""
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [str(e["name"]).rstrip("/").rsplit("/", 1)[-1] for e in entries if e["type"] == "directory"]

    def list_files(self, directory: str) -> list[str]:
        """Return the names of all objects below a prefix."""
        top = self._path(directory)
        prefix = len(self._fs._strip_protocol(top).rstrip("/")) + 1
        return sorted(str(path)[prefix:] for path in self._fs.find(top))

    def remove(self, name: str) -> None:
        """Delete an object."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def remove_empty_dirs(self, name: str) -> None:
        """Remove what some backends keep as directory entries."""
        left = self.list_files(name)
        if left:
            raise OSError(f"{self.url}/{name} still holds {left[0]}")
        if self._fs.isdir(self._path(name)):
            self._fs.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


class _ObjectSink(Sink):
    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._file = fs.open(path, "wb", autocommit=False)

    def write(self, data: Any) -> int:
        size = int(self._file.write(memoryview(data).cast("B")))
        self.n_bytes += size
        return size

    def close(self) -> None:
        self._file.close()
        self._file.commit()

    def discard(self) -> None:
        with suppress(Exception):  # the error that led here is the one to report
            self._file.discard()
        with suppress(Exception):  # some backends, memory:// among them, publish when they open
            self._fs.rm_file(self._path)


class _ObjectDraft(_ObjectSink, Draft):
    def __init__(self, fs: Any, path: str) -> None:
        if isinstance(fs, MemoryFileSystem):  # opened in the usual way it would empty the older file at once
            self._fs, self._path = fs, path
            self._file = MemoryFile(fs, fs._strip_protocol(path))
        else:
            super().__init__(fs, path)
        self._sealed = False

    def seal(self) -> None:
        self._file.close()
        self._sealed = True

    def close(self) -> None:
        if not self._sealed:
            self.seal()
        self._file.commit()

    def discard(self) -> None:
        with suppress(Exception):  # the error that led here is the one to report
            self._file.discard()
