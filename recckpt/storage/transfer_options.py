"""How files travel between this host and a storage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from recckpt.storage.retry import RetryPolicy

if TYPE_CHECKING:
    from recckpt.storage.staging_dir import WorkDir
    from recckpt.storage.upload_limit import UploadSlots

VISIBLE_SEC = 90.0  # NFS keeps what it knows of a directory for 60


def waiting(timeout_sec: float = VISIBLE_SEC) -> RetryPolicy:
    """Return how to look for what others have written, at most for so long."""
    return RetryPolicy(first_sec=0.1, cap_sec=2.0, deadline_sec=timeout_sec)


@dataclass(frozen=True)
class Transfers:
    """The way of files; by itself, straight up and straight down.

    Attributes:
        slots: what each file that goes up has to take one of.
        work_dir: where a save writes its files first.
        download_dir: where a load copies files to that cannot be mapped where they lie.
        visible: how long files of other hosts are waited for.
    """

    slots: UploadSlots | None = None
    work_dir: WorkDir | None = None
    download_dir: WorkDir | None = None
    visible: RetryPolicy = field(default_factory=waiting)
