"""The interface of all storages, and file objects over their sinks."""

from __future__ import annotations

import errno
import io
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, NamedTuple, Protocol

import xxhash

from recckpt.errors import CorruptCheckpointError

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotPlainError(OSError):
    """A link, FIFO or device was found where a checkpoint should have a file or directory.

    Attributes:
        found: the kind of the object.
        remedy: what to do, if that is not clear from the rest.
    """

    found = "not a plain file"
    remedy = ""


ABSENT = (FileNotFoundError, NotADirectoryError)  # raised for a file that does not exist
NOT_READABLE = (*ABSENT, NotPlainError)  # raised also for something that must not be read
_LOST = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)  # for a broken block, or a block with another checksum


def missing(path: str, error: OSError, expected: str) -> CorruptCheckpointError:
    """Return the error for a file that a checkpoint should have; ``path`` is its name in the output dir."""
    found = error.found if isinstance(error, NotPlainError) else "no such file"
    remedy = error.remedy if isinstance(error, NotPlainError) else ""
    return CorruptCheckpointError(path, "", found=found, expected=expected, remedy=remedy)


@contextmanager
def lost_is_damage(path: str) -> Iterator[None]:
    """Turn an error of a disk or store that has a file but cannot read it into CorruptCheckpointError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LOST:
            raise
        found, expected = f"an error: {error}", "a file that can be read"
        raise CorruptCheckpointError(path, "", found=found, expected=expected) from error


def refused(found: str, path: str) -> NotPlainError:
    """Return the error for something that is not a plain file or directory."""
    is_link = found.startswith(_KINDS[stat.S_IFLNK])
    if not is_link:
        error = NotPlainError(errno.EINVAL, f"found {found}, expected a plain file; recckpt does not open it", path)
        error.found = f"{found}, not a plain file"
        return error
    remedy = "recckpt does not follow links inside an output dir: move the target back to this place"
    error = NotPlainError(errno.ELOOP, f"found {found}, expected no link; {remedy}", path)
    error.found, error.remedy = f"unsafe path: {found}", remedy
    return error


def kind_of(mode: int) -> str:
    """Return the name of the kind of a non-file, by its mode."""
    return _KINDS.get(stat.S_IFMT(mode), "something unknown")


class Sink(ABC):
    """A new file. Leaving its ``with`` block makes the file durable. After an exception in the block or in ``close``
    there is no file.

    Attributes:
        n_bytes: number of bytes written.
    """

    n_bytes: int = 0

    @abstractmethod
    def write(self, data: Any) -> int:
        """Write all of a bytes-like object and return its size."""

    @abstractmethod
    def close(self) -> None:
        """Make the file durable and publish it."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the file; raises nothing."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except BaseException:
            self.discard()
            raise


class Draft(Sink):
    """A file that replaces an older one when it is closed; the older one is unchanged until then."""

    @abstractmethod
    def seal(self) -> None:
        """Make the bytes durable but not yet visible, so that ``close`` can hardly fail. ``close`` seals if needed."""


class Listed(NamedTuple):
    """A file as a listing shows it."""

    n_bytes: int
    stamp: str = ""  # changes with the content (time, inode or entity tag); "" if the storage gives none


class Files(Protocol):
    """The interface for reading: implemented by storages, and by the open files of a checkpoint."""

    url: str

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file for seeking and reading.

        Raises:
            FileNotFoundError: it does not exist.
            NotPlainError: it is not a file, or a link leads out of its directory.
        """

    @abstractmethod
    def map(self, name: str) -> memoryview | None:
        """Return a file's bytes as a memory map; None if the storage has no memory maps."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the number of bytes of a file; errors as for :meth:`open`."""

    def read(self, name: str, max_bytes: int, begin: int = 0) -> bytes:
        """Return at most ``max_bytes`` of a file, from ``begin`` on; object stores need one request for this."""
        with self.open(name) as file:
            file.seek(begin)
            return file.read(max_bytes)

    def drop_cached(self, name: str) -> bool:
        """Drop cached data of a file; return whether the file is remote, so that a second read may differ."""
        return False

    def threads(self, requested: int) -> int:
        """Return how many of the ``requested`` threads make reading faster."""
        return requested


class NewFiles(Protocol):
    """The interface for writing: implemented by storages, and by the outbox of a save."""

    @abstractmethod
    def create(self, name: str) -> Sink:
        """Open a new file; FileExistsError if the name is taken."""

    def threads(self, requested: int) -> int:
        """Return how many of the ``requested`` threads make writing faster."""


class Storage(Files, NewFiles, ABC):
    """A tree of files below one root. Names are relative, with ``/``; OSErrors pass through with the path.

    Files appear whole or not at all; only ``replace`` and ``draft`` overwrite one. Thread-safe.

    Attributes:
        n_retries: number of retried requests so far.
        asking_is_free: whether a look-up of one file needs no network request, so that training may wait for it.
    """

    asking_is_free: ClassVar[bool] = False
    n_retries: int = 0

    def __init__(self, url: str) -> None:
        self.url = url

    def url_of(self, name: str) -> str:
        """Return the path or URL of a file or directory; "" is the root."""
        return f"{self.url.removesuffix('/')}/{name}" if name else self.url

    @abstractmethod
    def prepare(self) -> None:
        """Make the root if possible; raise OSError if files cannot be written there."""

    def check_there(self) -> None:  # in many storages the root exists only through its files
        """Raise FileNotFoundError if the root is gone."""

    def give_up_after(self, seconds: float) -> None:  # local disks have no retries
        """Limit how long requests for a file are retried after network failures."""

    @contextmanager
    def giving_up_after(self, seconds: float) -> Iterator[None]:
        """Like :meth:`give_up_after`, but only within the ``with`` block."""
        yield

    @abstractmethod
    def make_dir(self, name: str) -> None:
        """Make a new directory; FileExistsError if the name is taken."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> None:
        """Write a small file in one atomic step; FileExistsError if the name is taken."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a small file in one atomic step, over an older one."""

    @abstractmethod
    def draft(self, name: str) -> Draft:
        """Open a file of any size that replaces an older one in one atomic step."""

    @abstractmethod
    def sync_dir(self, name: str) -> None:
        """Make the entries of a directory durable."""

    @abstractmethod
    def modified(self, name: str) -> float | None:
        """Return when a file was written, in seconds by the storage's clock; None if unknown."""

    @abstractmethod
    def list_dirs(self) -> list[str]:
        """Return the names of the directories in the root."""

    @abstractmethod
    def list_files(self, directory: str) -> list[str]:
        """Return the names of all files below a directory, relative to it; [] if it does not exist."""

    @abstractmethod
    def listed(self, directory: str) -> dict[str, Listed]:
        """Return the plain files below a directory that one listing shows, by name; {} if it does not exist.

        A listing may lag behind: call ``size`` for a file that the listing lacks.
        """

    def listed_by_dir(self) -> Mapping[str, Mapping[str, Listed]] | None:
        """Return :meth:`listed` of every directory in the root; None if that needs one request per directory."""
        return None

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    @abstractmethod
    def remove_empty_dirs(self, name: str) -> None:
        """Remove a directory and those below it; OSError if files are left in it."""

    def why_empty(self) -> str:
        """Return why nothing is found in this storage; "" if there is nothing to add."""
        return ""

    def free_bytes(self) -> int | None:
        """Return how many more bytes can be written; None if unknown."""
        return None


class SinkFile(io.RawIOBase):
    """A file object over a sink, without seeking; closing it leaves the sink open."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        return self._sink.write(data)

    @property
    def n_bytes(self) -> int:
        """Bytes so far."""
        return self._sink.n_bytes

    def tell(self) -> int:
        """Return the bytes so far."""
        return self._sink.n_bytes


class HashingSink(SinkFile):
    """A file object over a sink, with the checksum of the written bytes."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._hash = xxhash.xxh3_64()

    @property
    def xxh3(self) -> int:
        """Checksum of the bytes so far."""
        return self._hash.intdigest()

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        self._hash.update(data)
        return super().write(data)
