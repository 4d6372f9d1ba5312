"""How the files of saves and loads travel between this host and a storage, by the options of a saver."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from recckpt.storage.local import LocalStorage
from recckpt.storage.retry import RetryPolicy
from recckpt.storage.upload_limit import UploadSlots
from recckpt.storage.upload_rate import UploadRate
from recckpt.text import size
from recckpt.types import byte_count, flag, positive_int

VISIBLE_SEC = 90.0  # an NFS client may use a listing for 60
VISIBLE = RetryPolicy(first_sec=0.1, cap_sec=2.0, deadline_sec=VISIBLE_SEC)


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
            raise no_work_room(self.url, free, n_bytes)


def no_work_room(url: str, free: int, n_bytes: int) -> OSError:
    """Return the error of a work dir in which ``n_bytes`` do not fit."""
    problem = f"found {size(free)} free in the work dir, expected {size(n_bytes)}; make room, or use another"
    return OSError(errno.ENOSPC, problem, url)


@dataclass(frozen=True)
class Uploads:
    """What the processes of one host keep to together as they send files; by default, nothing."""

    slots: UploadSlots | None = None  # each file takes one of them
    rate: UploadRate | None = None  # each piece of a file waits for its turn


@dataclass(frozen=True)
class Transfers:
    """How files travel; by default, straight up and straight down."""

    uploads: Uploads = Uploads()  # what limits files that go up
    work_dir: WorkDir | None = None  # where a save writes its files first
    download_dir: WorkDir | None = None  # where a load copies files to that cannot be mapped in the storage
    visible: RetryPolicy = VISIBLE  # how, and for how long, to look for files that other hosts have written


def uploads_of(
    output_dir: str, max_uploads: int | None, max_upload_rate: int | str | None, timeout_sec: float
) -> Uploads:
    """Return what the options of :class:`recckpt.Saver` ask for; ValueError where one is invalid."""
    url = str(output_dir)
    to = url if "://" in url else str(Path(url).absolute())
    slots = rate = None
    if max_uploads is not None:
        slots = UploadSlots(positive_int("max_uploads", max_uploads), to, timeout_sec)
    if max_upload_rate is not None:
        rate = UploadRate(byte_count("max_upload_rate", max_upload_rate), to)
    return Uploads(slots, rate)


def transfers_of(
    uploads: Uploads,
    *,
    work_dir: str | os.PathLike[str] | None,
    pre_download: bool,
    visible_sec: float,
    timeout_sec: float,
) -> Transfers:
    """Return what the options of :class:`recckpt.Saver` ask for, and make the work dir.

    Raises:
        ValueError: an option is invalid.
        OSError: the work dir cannot be written.
    """
    flag("pre_download", pre_download)
    if type(visible_sec) not in (int, float) or not 0 <= visible_sec < float("inf"):
        raise ValueError(f"visible_sec must be a finite number of at least 0, found {visible_sec!r}")
    if not isinstance(work_dir, str | os.PathLike | None) or "://" in str(work_dir) or work_dir == "":
        raise ValueError(f"work_dir must be a path on this host, found {work_dir!r}")
    copies = None if work_dir is None else WorkDir(os.fspath(work_dir))
    downloads = copies or WorkDir(tempfile.gettempdir())
    if copies is not None:
        copies.prepare()
    visible = replace(VISIBLE, deadline_sec=min(visible_sec, timeout_sec / 2))
    return Transfers(uploads, copies, downloads if pre_download else None, visible)
