"""Where a save writes its files: to the storage, or to copies on this host that go up once all are written."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import xxhash

from recckpt.parallel.threads import run_all
from recckpt.storage.base import Sink, Storage
from recckpt.storage.sink_file import HashingSink
from recckpt.storage.transfers import Transfers, WorkDir
from recckpt.storage.upload_limit import UploadSlots
from recckpt.storage.upload_rate import UploadRate

_CHUNK_BYTES = 8 << 20


class Outbox:
    """The new files of one save, which are in the storage once :meth:`publish` has returned. Thread-safe."""

    def __init__(self, storage: Storage, transfers: Transfers) -> None:
        self._storage, self._uploads, self._work_dir = storage, transfers.uploads, transfers.work_dir
        self._copies: list[_StagedFile] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, *error: object) -> None:
        for copy in self._copies:
            copy.discard()

    def create(self, name: str) -> Sink:
        """Open a new file, once there is a slot for it; FileExistsError where one has that name."""
        if self._work_dir is None:
            return self._sent(name)
        copy = _StagedFile(name, self._work_dir)
        with self._lock:
            self._copies.append(copy)
        return copy

    def threads(self, requested: int) -> int:
        """Return how many of the ``requested`` threads make it faster."""
        return (self._work_dir or self._storage).threads(requested)

    def publish(self, concurrency: int) -> None:
        """Send the copies up, and free each once it is sent.

        Raises OSError if one cannot be sent or is not what was written; none is sent after that.
        """
        run_all(self._send, self._copies, self._storage.threads(concurrency))

    def _send(self, copy: _StagedFile) -> None:
        with self._sent(copy.name) as sink:
            hashing = HashingSink(sink)
            for chunk in copy.chunks():
                hashing.write(chunk)
            if (sink.n_bytes, hashing.xxh3) != (copy.n_bytes, copy.xxh3):
                problem = f"the copy in the work dir is not what was written: found {sink.n_bytes} bytes with checksum"
                expected = f"{hashing.xxh3:016x}, expected {copy.n_bytes} with {copy.xxh3:016x}; check that disk"
                raise OSError(errno.EIO, f"{problem} {expected}", self._storage.url_of(copy.name))
        copy.discard()

    def _sent(self, name: str) -> Sink:
        slots, rate = self._uploads.slots, self._uploads.rate
        sink = self._storage.create(name) if slots is None else _SlottedSink(slots, self._storage, name)
        return sink if rate is None else _PacedSink(rate, sink)


class _PacedSink(Sink):
    """A new file whose pieces wait until they may be sent."""

    def __init__(self, rate: UploadRate, sink: Sink) -> None:
        self._rate, self._sink = rate, sink

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), self._rate.piece_bytes):
            piece = view[begin : begin + self._rate.piece_bytes]
            self._rate.wait(len(piece))
            self._sink.write(piece)
        self.n_bytes = self._sink.n_bytes
        return len(view)

    def close(self) -> None:
        self._sink.close()

    def discard(self) -> None:
        self._sink.discard()


class _SlottedSink(Sink):
    """A new file that holds an upload slot until it is published or discarded."""

    def __init__(self, slots: UploadSlots, storage: Storage, name: str) -> None:
        self._slots, self._slot = slots, slots.take()
        try:
            self._sink = storage.create(name)
        except BaseException:
            self._free()
            raise

    def write(self, data: Any) -> int:
        self._sink.write(data)
        n_bytes = self._sink.n_bytes - self.n_bytes
        self.n_bytes = self._sink.n_bytes
        return n_bytes

    def close(self) -> None:
        self._sink.close()
        self._free()

    def discard(self) -> None:
        self._sink.discard()
        self._free()

    def _free(self) -> None:
        slot, self._slot = self._slot, -1
        if slot >= 0:
            self._slots.free(slot)


class _StagedFile(Sink):
    """A file of the work dir, to be sent up. It does not outlive this process, so it is not synced."""

    def __init__(self, name: str, work_dir: WorkDir) -> None:
        self.name, self._work_dir = name, work_dir
        self._file: IO[bytes] = work_dir.new_file()
        self._hash = xxhash.xxh3_64()

    @property
    def xxh3(self) -> int:
        return self._hash.intdigest()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        total = len(view)
        self._hash.update(view)
        with self._named_error():
            while view:  # a write may be short
                view = view[self._file.write(view) :]
        self.n_bytes += total
        return total

    def close(self) -> None:
        """Do nothing: it is whole, and stays until it is sent."""

    def discard(self) -> None:
        self._file.close()

    def chunks(self) -> Iterator[bytes]:
        """Yield what was written."""
        with self._named_error():
            self._file.seek(0)
            while chunk := self._file.read(_CHUNK_BYTES):
                yield chunk

    @contextmanager
    def _named_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.strerror = f"a copy in the work dir failed: {error.strerror}"
            error.filename = self._work_dir.url
            raise
