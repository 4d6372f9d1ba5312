"""What every storage promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Protocol

from recckpt.errors import CorruptCheckpointError
from recckpt.storage.plain_files import NotPlainError

ABSENT = (FileNotFoundError, NotADirectoryError)  # what reaching for a file raises where there is none
NOT_READABLE = (*ABSENT, NotPlainError)  # or where it is not one that may be read


def missing(path: str, error: OSError, expected: str) -> CorruptCheckpointError:
    """Return the error for a file that a checkpoint should have.

    Args:
        path: the file, as named under the output dir.
        error: what reaching for it raised.
        expected: what should be there.
    """
    found = error.found if isinstance(error, NotPlainError) else "no such file"
    return CorruptCheckpointError(path, "", found=found, expected=expected)


class Sink(ABC):
    """A file that is being written for the first time; as a context manager it is published or gone.

    Leaving the ``with`` block well makes the file durable under its name. An exception in it, or from
    ``close``, leaves no file.
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
    """A file that takes the place of an older one when it is closed; until then that one stays as it is."""

    @abstractmethod
    def seal(self) -> None:
        """Do now what may still fail: make the bytes durable, visible to nobody. Closing does it where nobody did."""


class Listed(NamedTuple):
    """A file as a listing shows it.

    Attributes:
        n_bytes: its size.
        stamp: differs from that of any other content of this name (time, inode, entity tag); "" where none is told.
    """

    n_bytes: int
    stamp: str = ""


class Files(Protocol):
    """What reading takes: any storage has it, and so have the files that are held of one."""

    url: str

    def open(self, name: str) -> BinaryIO:
        """Open a file for seeking and reading."""

    def map(self, name: str) -> memoryview | None:
        """Return a file's bytes as a memory map, None where there is no such thing."""

    def size(self, name: str) -> int:
        """Return the bytes of a file."""

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return at most ``max_bytes`` of a file, from its start."""

    def threads(self, asked: int) -> int:
        """Return how many threads are worth having of those that were asked for."""


class NewFiles(Protocol):
    """What writing takes: any storage has it, and so has the outbox of a save to one."""

    def create(self, name: str) -> Sink:
        """Open a new file; FileExistsError where one has that name."""

    def threads(self, asked: int) -> int:
        """Return how many threads are worth having of those that were asked for."""


class Storage(ABC):
    """A tree of files below one root. Names are relative, with ``/``; OSErrors pass through with the path.

    Files appear whole or not at all and are never overwritten, but for ``replace`` and ``draft``. Thread-safe.

    Attributes:
        url: of the root.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def prepare(self) -> None:
        """Make the root where it can be made, and raise OSError where files cannot be written to it."""

    def check_there(self) -> None:  # noqa: B027  # many storages have no root beside the files in it
        """Raise FileNotFoundError where the root is gone."""

    @abstractmethod
    def make_dir(self, name: str) -> None:
        """Make a directory that nobody else has made; FileExistsError where something has that name."""

    @abstractmethod
    def create(self, name: str) -> Sink:
        """Open a new file; FileExistsError where one has that name."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> None:
        """Write a small file in one atomic step; FileExistsError where one has that name."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a small file in one atomic step, over an older one."""

    @abstractmethod
    def draft(self, name: str) -> Draft:
        """Open a file of any size that takes the place of an older one in one atomic step."""

    @abstractmethod
    def sync_dir(self, name: str) -> None:
        """Make the entries of a directory durable."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file for seeking and reading.

        Raises:
            FileNotFoundError: there is none.
            NotPlainError: it is something else, or a link leads out of its directory.
        """

    @abstractmethod
    def map(self, name: str) -> memoryview | None:
        """Return a file's bytes as a memory map, None where this storage has no such thing."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the bytes of a file; errors as of :meth:`open`."""

    @abstractmethod
    def list_dirs(self) -> list[str]:
        """Return the names of the directories in the root."""

    @abstractmethod
    def list_files(self, directory: str) -> list[str]:
        """Return the names of all files below a directory, relative to it; [] where there is none."""

    @abstractmethod
    def listed(self, directory: str) -> dict[str, Listed]:
        """Return the plain files below a directory by name, as far as one listing tells; ask ``size`` beyond.

        {} where there is no such directory.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; one that is gone already is no error."""

    @abstractmethod
    def remove_empty_dirs(self, name: str) -> None:
        """Remove a directory and those below it; OSError where files are left in it."""

    def why_empty(self) -> str:
        """Say why nothing is found here, "" where nothing more is known."""
        return ""

    def free_bytes(self) -> int | None:
        """Return how many bytes may still be written, None where nobody knows."""
        return None

    def threads(self, asked: int) -> int:
        """Return how many threads are worth having of those that were asked for."""
        return asked

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return at most ``max_bytes`` of a file, from its start."""
        with self.open(name) as file:
            return file.read(max_bytes)
