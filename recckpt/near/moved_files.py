"""A file of a near save as it leaves a rank, and as it arrives at another."""

from __future__ import annotations

from typing import BinaryIO

import xxhash

from recckpt.format import layout
from recckpt.near.moves import Move
from recckpt.parallel.process_group import Parcel
from recckpt.storage import Draft, Storage


class Outgoing:
    """A file that this rank sends, read from its start to its end. Not thread-safe.

    Attributes:
        failure: why it cannot be read, None while it can.
    """

    def __init__(self, storage: Storage, directory: str, of: Move) -> None:
        self._storage, self._path, self._n_bytes = storage, layout.join(directory, of.name), of.n_bytes
        self._file: BinaryIO | None = None
        self._hash, self._n_read = xxhash.xxh3_64(), 0
        self.failure = self._why_unfit()

    @property
    def digest(self) -> int:
        """The checksum of what was read."""
        return self._hash.intdigest()

    def read_into(self, parcel: Parcel) -> None:
        """Fill a parcel of zeros with the bytes that come next; it stays as it is once that has failed."""
        if self.failure is not None:
            return
        try:
            self._read_into(parcel)
            self._hash.update(parcel.data)
        except OSError as error:
            self.failure = str(error)
        if self._n_read == self._n_bytes:  # files are many, so few are open at a time
            self.close()

    def close(self) -> None:
        """Close the file, if it is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _read_into(self, parcel: Parcel) -> None:
        if self._file is None:
            self._file = self._storage.open(self._path)
        while len(parcel):
            data = self._file.read(len(parcel))
            if not data:
                raise OSError(f"{self._path}: found {self._n_read} bytes, expected {self._n_bytes}")
            parcel[: len(data)] = memoryview(data)
            parcel = parcel[len(data) :]
            self._n_read += len(data)

    def _why_unfit(self) -> str | None:
        try:
            found = self._storage.size(self._path)
        except OSError as error:
            return str(error)
        return None if found == self._n_bytes else f"{self._path}: found {found} bytes, expected {self._n_bytes}"


class Incoming:
    """A file that this rank is sent, which appears once it is published. Not thread-safe."""

    def __init__(self, storage: Storage, directory: str, of: Move) -> None:
        self._storage, self._path, self._of = storage, layout.join(directory, of.name), of
        self._draft: Draft | None = None
        self._hash, self._n_taken = xxhash.xxh3_64(), 0
        self._failure: str | None = None

    def take(self, parcel: Parcel) -> None:
        """Write the bytes that come next; they are dropped once that has failed."""
        if self._failure is not None:
            return
        try:
            if self._draft is None:
                self._draft = self._storage.draft(self._path)
            if len(parcel):
                self._draft.write(parcel.data)
            self._hash.update(parcel.data)
            self._n_taken += len(parcel)
            if self._n_taken == self._of.n_bytes:
                self._draft.seal()
        except OSError as error:
            self._failure = str(error)

    def publish(self, sent: int) -> str | None:
        """Let the file appear if it has its size and its checksum; say why it does not.

        Args:
            sent: the checksum of what the sender has read.
        """
        found, expected = self._hash.intdigest(), sent if self._of.xxh3 is None else self._of.xxh3
        if self._failure is None and found != expected:
            self._failure = f"{self._path}: arrived with the checksum {found:016x}, expected {expected:016x}"
        if self._failure is not None or self._draft is None:
            return self._failure
        try:
            self._draft.close()
        except OSError as error:
            return str(error)
        self._draft = None
        return None

    def discard(self) -> None:
        """Remove what was written, if it was not published."""
        if self._draft is not None:
            self._draft.discard()
