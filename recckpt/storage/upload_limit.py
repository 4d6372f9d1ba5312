"""A limit on the files that the processes of one host send at once: file locks, freed when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import xxhash

_LOOK_SEC = 0.05  # a process cannot wait for the first of several locks


class UploadSlots:
    """So many uploads to one URL at once, over all processes of this user that share a temporary directory.

    Each slot is a small file, locked while it is taken. Whoever gives one back removes it, and the directory once it is
    empty; those of a process that was killed go with the next that is given back.

    Args:
        count: how many there are; of several processes that say different numbers, each keeps to its own.
        url: where the uploads go.
        timeout_sec: how long to wait for one before OSError is raised.
    """

    def __init__(self, count: int, url: str, timeout_sec: float) -> None:
        self._count, self._url, self._timeout_sec = count, url, timeout_sec
        name = f"recckpt-{os.getuid()}-{xxhash.xxh3_128_hexdigest(url.encode())}"
        self.directory = Path(tempfile.gettempdir(), name)

    def take(self) -> int:
        """Wait for a slot and return it, for :meth:`free`; TimeoutError, which names the holders, if none gets free."""
        deadline = time.monotonic() + self._timeout_sec
        while True:
            with suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # the process that gave back the last slot has removed it
                self._check_owner()
                for number in range(self._count):
                    slot = self._try(self.directory / str(number))
                    if slot is not None:
                        return slot
            if time.monotonic() > deadline:
                problem = f"waited {self._timeout_sec:g} s for one of {self._count} upload slots: {self._holders()}"
                raise TimeoutError(errno.ETIMEDOUT, problem, self._url)
            time.sleep(_LOOK_SEC)

    def free(self, slot: int) -> None:
        """Give a slot back, and remove the files that no process has locked."""
        try:
            with suppress(OSError):  # what is left takes no room to speak of
                for path in self.directory.iterdir():
                    if _is_at(slot, path):
                        path.unlink()
                    else:
                        self._remove_unlocked(path)
                self.directory.rmdir()
        finally:
            try:
                fcntl.flock(slot, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
            finally:
                os.close(slot)

    def _remove_unlocked(self, path: Path) -> None:
        """Remove a slot of a process that was killed."""
        left = self._try(path)
        if left is not None:
            path.unlink()
            os.close(left)

    def _check_owner(self) -> None:
        owner = self.directory.lstat().st_uid
        if owner != os.getuid():
            problem = f"a directory of user {owner}, expected one of user {os.getuid()}; set TMPDIR"
            raise PermissionError(errno.EACCES, problem, str(self.directory))

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
        if not _is_at(slot, path):  # it was given back and removed meanwhile: another may have locked a new one
            os.close(slot)
            return None
        with suppress(OSError):  # a lock works on a full disk too
            os.pwrite(slot, f"{os.getpid():<20}".encode(), 0)
        return slot

    def _holders(self) -> str:
        pids = []
        for number in range(self._count):
            with suppress(OSError):
                pids.append((self.directory / str(number)).read_text().strip())
        return f"held by the processes {', '.join(pids)}"


def _is_at(slot: int, path: Path) -> bool:
    """Say whether a path is that of an open file still."""
    try:
        return os.path.samestat(os.fstat(slot), path.lstat())
    except FileNotFoundError:
        return False
