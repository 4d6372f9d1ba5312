"""Memory that two processes share, without a name anywhere: it is gone with the last of them, however they end."""

from __future__ import annotations

import mmap
import os
import tempfile


class Arena:
    """One block of shared memory, which grows and is kept between saves.

    Not in ``/dev/shm``, whose size is small in many containers and whose files outlive a killed process.

    Attributes:
        fd: a descriptor to give to the other process.
        memory: the block, mapped.
        n_bytes: its size.
    """

    def __init__(self) -> None:
        self.fd, self.n_bytes = _anonymous_file(), 0
        self.memory: mmap.mmap | None = None

    def reserve(self, n_bytes: int) -> None:
        """Make room for ``n_bytes``; where there is less, map the block anew.

        Raises:
            OSError: there are not so many addresses. Memory itself is taken as it is written to.
        """
        if n_bytes <= self.n_bytes:
            return
        os.ftruncate(self.fd, n_bytes)
        self.memory, self.n_bytes = mmap.mmap(self.fd, n_bytes), n_bytes

    def __del__(self) -> None:
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("recckpt-staging", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
