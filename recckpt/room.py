"""Is there room for a save? Asked before anything is written or staged."""

from __future__ import annotations

import errno

from recckpt.group import Group
from recckpt.storage import Storage
from recckpt.text import size


def check_rooms(storage: Storage, own_bytes: int, min_free_bytes: int, group: Group) -> None:
    """Refuse a save that would not fit into the storage, or those of this host not into the work dir. Collective.

    Args:
        storage: where the save goes.
        own_bytes: an estimate of what this rank writes.
        min_free_bytes: what must be left of the storage's room afterwards.
        group: all ranks.

    Raises:
        OSError: ENOSPC, with what is free and what is needed.
    """
    work_dir = storage.transfers.work_dir
    needs = group.all_gather((own_bytes, work_dir and work_dir.device))
    check_room(storage, sum(n_bytes for n_bytes, _ in needs), min_free_bytes)
    if work_dir is not None:
        work_dir.check_room(sum(n_bytes for n_bytes, device in needs if device == work_dir.device))


def check_room(storage: Storage, n_bytes: int, min_free_bytes: int) -> None:
    """Refuse a save that would not fit, where the storage knows its room; others find out when they write.

    Args:
        storage: where the save goes.
        n_bytes: an estimate of what the save writes.
        min_free_bytes: what must be left afterwards.

    Raises:
        OSError: ENOSPC, with what is free and what is needed.
    """
    free = storage.free_bytes()
    if free is not None and free - n_bytes < min_free_bytes:
        kept = f" and leave {size(min_free_bytes)}" if min_free_bytes else ""
        raise OSError(
            errno.ENOSPC,
            f"found {size(free)} free, expected {size(n_bytes)} for the save{kept}; make room, or lower max_keep",
            storage.url,
        )
