"""A file of a near save as it leaves a rank, and as it arrives at another: its bytes, then their checksum."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import xxhash

from recckpt.format import layout
from recckpt.near.moves import DIGEST_BYTES, Move
from recckpt.parallel.process_group import Parcel
from recckpt.storage import Draft, Storage

_READ_BYTES = 1 << 20  # at a time, so that what was read is still in the cache when it is copied


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

    def fill(self, parcel: Parcel, begin: int) -> None:
        """Fill a parcel with what comes at ``begin``; it stays as it is once that has failed."""
        n_bytes = min(len(parcel), max(0, self._n_bytes - begin))
        try:
            if self.failure is None:
                self._read_into(parcel[:n_bytes])
        except OSError as error:
            self.failure = str(error)
        if self.failure is None and len(parcel) > n_bytes:
            self.close()  # files are many, so few are open at a time
            at = begin + n_bytes - self._n_bytes
            parcel[n_bytes:] = _as_parcel(self._hash.digest())[at : at + len(parcel) - n_bytes]

    def close(self) -> None:
        """Close the file, if it is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _read_into(self, parcel: Parcel) -> None:
        at = 0
        while at < len(parcel):
            if self._file is None:
                self._file = self._storage.open(self._path)
            data = self._file.read(min(len(parcel) - at, _READ_BYTES))
            if not data:
                raise OSError(f"{self._path}: found {self._n_read} bytes, expected {self._n_bytes}")
            self._hash.update(data)
            parcel[at : at + len(data)] = _as_parcel(data)
            at += len(data)
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
        self._hash, self._digest = xxhash.xxh3_64(), b""
        self._failure: str | None = None

    def take(self, parcel: Parcel, begin: int) -> None:
        """Write what comes at ``begin``; it is dropped once that has failed."""
        n_bytes = min(len(parcel), max(0, self._of.n_bytes - begin))
        self._digest += parcel[n_bytes:].tobytes()
        if self._failure is not None:
            return
        try:
            if self._draft is None:
                self._draft = self._storage.draft(self._path)
            if n_bytes:
                self._draft.write(parcel[:n_bytes].data)
                self._hash.update(parcel[:n_bytes].data)
            if len(self._digest) == DIGEST_BYTES:
                self._draft.seal()
        except OSError as error:
            self._failure = str(error)

    def publish(self) -> str | None:
        """Let the file appear if it has its size and its checksum; say why it does not."""
        found, expected = self._hash.intdigest(), self._of.xxh3
        if expected is None:
            expected = int.from_bytes(self._digest, "big")
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


def _as_parcel(data: bytes) -> Parcel:
    return np.frombuffer(data, np.uint8)
