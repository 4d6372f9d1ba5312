"""A directory on this host for copies that vanish with the process, however it ends."""

from __future__ import annotations

import errno
import socket
import tempfile
from typing import IO

from recckpt.storage.local import LocalStorage
from recckpt.text import size


class WorkDir(LocalStorage):
    """A local directory of files without names: the system frees each when its last descriptor is closed."""

    device: tuple[str, int] | None = None  # the host and the file system, once it is prepared

    def prepare(self) -> None:
        """Make the directory, check that files can be written to it, and note its file system."""
        super().prepare()
        self.device = socket.gethostname(), self._root.stat().st_dev

    def new_file(self) -> IO[bytes]:
        """Open a file without a name."""
        try:
            return tempfile.TemporaryFile(dir=self._root, prefix="recckpt-", buffering=0)
        except OSError as error:
            error.filename = self.url
            raise

    def check_room(self, n_bytes: int) -> None:
        """Raise OSError if ``n_bytes`` do not fit."""
        free = self.free_bytes()
        if free is not None and free < n_bytes:
            problem = f"found {size(free)} free in the work dir, expected {size(n_bytes)}; make room, or use another"
            raise OSError(errno.ENOSPC, problem, self.url)
