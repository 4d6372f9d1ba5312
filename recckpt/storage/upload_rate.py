"""A limit on the bytes a second that the processes of one host send: each reserves its time in a file they share.

The generic cell rate algorithm (ITU-T I.371): the file holds the moment from which on the next bytes may go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

_MOMENT = struct.Struct("<d")
_SHARE_SEC = 0.25  # of a second that one piece may take, so that threads and processes take turns
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 8 << 20  # of a piece
_STALE_SEC = 600.0  # a moment further ahead is of before a reboot, which the monotonic clock does not survive


class UploadRate:
    """So many bytes a second to one URL, over all processes of this user that share a temporary directory. Thread-safe.

    Args:
        bytes_per_sec: the limit; of several processes that say different numbers, each keeps to its own.
        url: where the uploads go.
        sleep: waits for so many seconds.
        clock: a clock that all processes of the host share, in seconds.
    """

    def __init__(
        self,
        bytes_per_sec: int,
        url: str,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_per_sec, self._sleep, self._clock = bytes_per_sec, sleep, clock
        self.piece_bytes = min(max(int(bytes_per_sec * _SHARE_SEC), _LEAST_BYTES), _MOST_BYTES)
        name = f"recckpt-{os.getuid()}-{xxhash.xxh3_128_hexdigest(url.encode())}.rate"
        self.path = Path(tempfile.gettempdir(), name)

    def wait(self, n_bytes: int) -> None:
        """Wait until ``n_bytes`` may be sent, at most :attr:`piece_bytes` of them."""
        now = self._clock()
        wait_sec = self._reserve(n_bytes / self._bytes_per_sec, now) - now
        if wait_sec > 0:
            self._sleep(wait_sec)

    def _reserve(self, seconds: float, now: float) -> float:
        """Return from when on the next so many seconds of sending are the caller's."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(file).st_uid != os.getuid():
                raise PermissionError(errno.EACCES, "a file of another user, expected an own one", str(self.path))
            fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed, or its process dies
            record = os.pread(file, _MOMENT.size, 0)
            free_at = _MOMENT.unpack(record)[0] if len(record) == _MOMENT.size else now
            begin = max(now, free_at) if free_at - now < _STALE_SEC else now
            os.pwrite(file, _MOMENT.pack(begin + seconds), 0)
        finally:
            os.close(file)
        return float(begin)
