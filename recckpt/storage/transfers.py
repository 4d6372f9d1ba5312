"""Transfers of files between this host and a storage: upload slots, work dir, outbox."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from recckpt.parallel.ranks import VISIBLE_SEC
from recckpt.parallel.threads import run_all
from recckpt.storage.base import HashingSink, Sink, Storage
from recckpt.storage.local import LocalStorage
from recckpt.storage.local_files import check_owner
from recckpt.storage.retry import RetryPolicy
from recckpt.text import size

_LOOK_SEC = 0.05  # a process cannot wait for several locks at once
VISIBLE = RetryPolicy(first_sec=0.1, cap_sec=2.0, deadline_sec=VISIBLE_SEC)
_CHUNK_BYTES = 8 << 20


class UploadSlots:
    """Limits uploads to one URL, over all processes of this user that share a temporary directory.

    Each slot is a small file that is locked while in use. Freeing a slot removes its file, files of killed processes,
    and the directory once it is empty. Processes with different ``count`` each respect their own.
    """

    def __init__(self, count: int, url: str, timeout_sec: float) -> None:
        self._count, self._url, self._timeout_sec = count, url, timeout_sec
        name = f"recckpt-{os.getuid()}-{xxhash.xxh3_128_hexdigest(url.encode())}"
        self.directory = Path(tempfile.gettempdir(), name)

    def take(self) -> int:
        """Wait for a free slot and return it; TimeoutError, with the holders, if none becomes free."""
        deadline = time.monotonic() + self._timeout_sec
        while True:
            with suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # the process that gave back the last slot has removed it
                check_owner(self.directory, "set TMPDIR")
                for number in range(self._count):
                    slot = self._try(self.directory / str(number))
                    if slot is not None:
                        return slot
            if time.monotonic() > deadline:
                problem = f"waited {self._timeout_sec:g} s for one of {self._count} upload slots: {self._holders()}"
                raise TimeoutError(errno.ETIMEDOUT, problem, self._url)
            time.sleep(_LOOK_SEC)

    def free(self, slot: int) -> None:
        """Free a slot, and remove the files that no process has locked."""
        try:
            with suppress(OSError):  # leftovers take almost no space
                for path in self.directory.iterdir():
                    if _is_at(slot, path):
                        path.unlink()
                    else:
                        left = self._try(path)
                        if left is not None:  # left by a killed process
                            path.unlink()
                            os.close(left)
                self.directory.rmdir()
        finally:
            try:
                fcntl.flock(slot, fcntl.LOCK_UN)  # a child forked meanwhile also has the descriptor
            finally:
                os.close(slot)

    def _try(self, path: Path) -> int | None:
        slot = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(slot)
            return None
        except BaseException:
            os.close(slot)
            raise
        if not _is_at(slot, path):  # removed meanwhile: another process may have locked a new file
            os.close(slot)
            return None
        with suppress(OSError):  # a lock also works on a full disk
            os.pwrite(slot, f"{os.getpid():<20}".encode(), 0)
        return slot

    def _holders(self) -> str:
        pids = []
        for number in range(self._count):
            with suppress(OSError):
                pids.append((self.directory / str(number)).read_text().strip())
        return f"held by the processes {', '.join(pids)}"


def _is_at(slot: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(slot), path.lstat())
    except FileNotFoundError:
        return False


class WorkDir(LocalStorage):
    """A local directory of files without names: the system frees each when its last descriptor is closed."""

    device: tuple[str, int] | None = None  # host and file system, once it is prepared

    def prepare(self) -> None:
        """Make the directory, check that files can be written to it, and note its file system."""
        super().prepare()
        self.device = socket.gethostname(), self._root.stat().st_dev

    def new_file(self, n_bytes: int = 0) -> IO[bytes]:
        """Open a file without a name, with ``n_bytes`` reserved, so that writes through a memory map cannot fail."""
        try:
            with ExitStack() as closed_on_error:
                file = closed_on_error.enter_context(
                    tempfile.TemporaryFile(dir=self._root, prefix="recckpt-", buffering=0)
                )
                if n_bytes:
                    os.posix_fallocate(file.fileno(), 0, n_bytes)
                closed_on_error.pop_all()
            return file
        except OSError as error:
            error.filename = self.url
            raise

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Add the directory to errors of its files, because the files have no names."""
        try:
            yield
        except OSError as error:
            error.strerror = f"a copy in the work dir failed: {error.strerror}"
            error.filename = self.url
            raise

    def check_room(self, n_bytes: int) -> None:
        free = self.free_bytes()
        if free is not None and free < n_bytes:
            raise no_work_room(self.url, free, n_bytes)


def no_work_room(url: str, free: int, n_bytes: int) -> OSError:
    problem = f"found {size(free)} free in the work dir, expected {size(n_bytes)}; make room, or use another"
    return OSError(errno.ENOSPC, problem, url)


@dataclass(frozen=True)
class Transport:
    """How files are transferred; by default directly."""

    slots: UploadSlots | None = None  # each upload takes one
    work_dir: WorkDir | None = None  # where a save writes its files first
    download_dir: WorkDir | None = None  # where a load copies files that cannot be mapped
    visible: RetryPolicy = VISIBLE  # how long to look for files of other hosts


class Outbox:
    """The new files of one save. They are in the storage once :meth:`publish` has returned. Thread-safe."""

    def __init__(self, storage: Storage, transport: Transport) -> None:
        self._storage, self._slots, self._work_dir = storage, transport.slots, transport.work_dir
        self._copies: list[_StagedFile] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, *error: object) -> None:
        for copy in self._copies:
            copy.discard()

    def create(self, name: str) -> Sink:
        """Open a new file, after waiting for an upload slot if needed; FileExistsError if the name is taken."""
        if self._work_dir is None:
            return self._sent(name)
        copy = _StagedFile(name, self._work_dir)
        with self._lock:
            self._copies.append(copy)
        return copy

    def threads(self, requested: int) -> int:
        return (self._work_dir or self._storage).threads(requested)

    def publish(self, concurrency: int) -> None:
        """Upload the files, and free the local copy of each file once uploaded.

        Raises OSError if a file cannot be uploaded, or differs from what was written; then no more files are
        uploaded.
        """
        run_all(self._send, self._copies, self._storage.threads(concurrency))

    def _send(self, copy: _StagedFile) -> None:
        with self._sent(copy.name) as sink:
            hashing = HashingSink(sink)
            for chunk in copy.chunks():
                hashing.write(chunk)
            if (sink.n_bytes, hashing.xxh3) != (copy.n_bytes, copy.xxh3):
                problem = f"the copy in the work dir has changed: found {sink.n_bytes} bytes with checksum"
                expected = f"{hashing.xxh3:016x}, expected {copy.n_bytes} with {copy.xxh3:016x}; check that disk"
                raise OSError(errno.EIO, f"{problem} {expected}", self._storage.url_of(copy.name))
        copy.discard()

    def _sent(self, name: str) -> Sink:
        if self._slots is None:
            return self._storage.create(name)
        return _SlottedSink(self._slots, self._storage, name)


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
    """A file of the work dir, to be uploaded. It is not synced, because it does not outlive this process."""

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
        with self._work_dir.named_errors():
            while view:  # a write may be short
                view = view[self._file.write(view) :]
        self.n_bytes += total
        return total

    def close(self) -> None:
        """Do nothing: the file stays until it is uploaded."""

    def discard(self) -> None:
        self._file.close()

    def chunks(self) -> Iterator[bytes]:
        with self._work_dir.named_errors():
            self._file.seek(0)
            while chunk := self._file.read(_CHUNK_BYTES):
                yield chunk
