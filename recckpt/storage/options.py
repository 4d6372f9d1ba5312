"""What a saver is told of the way to its storage."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from recckpt.storage.staging_dir import WorkDir
from recckpt.storage.transfer_options import Transfers, waiting
from recckpt.storage.upload_limit import UploadSlots
from recckpt.types import positive_int


def transfers_of(
    output_dir: str,
    *,
    max_uploads: int | None,
    work_dir: str | os.PathLike[str] | None,
    pre_download: bool,
    visible_sec: float,
    timeout_sec: float,
) -> Transfers:
    """Return the way of files that the options of :class:`recckpt.Saver` ask for; makes the work dir.

    Raises:
        ValueError: an option is not what it should be.
        OSError: the work dir cannot be written.
    """
    if type(pre_download) is not bool:
        raise ValueError(f"pre_download must be True or False, found {pre_download!r}")
    if type(visible_sec) not in (int, float) or not 0 <= visible_sec < float("inf"):
        raise ValueError(f"visible_sec must be a finite number of at least 0, found {visible_sec!r}")
    if not isinstance(work_dir, str | os.PathLike | None) or "://" in str(work_dir) or work_dir == "":
        raise ValueError(f"work_dir must be a path on this host, found {work_dir!r}")
    slots = None
    if max_uploads is not None:
        url = str(output_dir)
        of = url if "://" in url else str(Path(url).absolute())
        slots = UploadSlots(positive_int("max_uploads", max_uploads), of, timeout_sec)
    copies = None if work_dir is None else WorkDir(os.fspath(work_dir))
    downloads = copies or WorkDir(tempfile.gettempdir())
    if copies is not None:
        copies.prepare()
    return Transfers(slots, copies, downloads if pre_download else None, waiting(min(visible_sec, timeout_sec / 2)))
