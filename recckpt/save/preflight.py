"""What refuses a save before anything is staged: too little room, or an id that several ranks own."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from recckpt.format import layout
from recckpt.format.buckets import Slice
from recckpt.format.json_fields import MAX_COUNT
from recckpt.parallel.ranks import Ranks
from recckpt.sparse.split import state_of
from recckpt.sparse.table.table import HashTable
from recckpt.storage import Storage
from recckpt.storage.transfers import WorkDir
from recckpt.text import size


def check_moment(model: nn.Module) -> None:
    """Refuse a save in the middle of a change of a table by this thread: rows of the change would be torn, or wait.

    Raises:
        RuntimeError: there is such a change; names the table.
    """
    for module in model.modules():
        if isinstance(module, HashTable) and _is_owned(module.store.lock):
            raise RuntimeError(
                f"save was called in the middle of a change of table {module.name!r}, from a signal handler or an "
                "initializer: set a flag there, and save in the training loop (CheckpointManager has save_on_signal)"
            )


def _is_owned(lock: Any) -> bool:
    """Say whether this thread has a lock, by its own method that the documents leave out."""
    return bool(lock._is_owned())


def check_rooms(storage: Storage, work_dir: WorkDir | None, own_bytes: int, min_free_bytes: int, ranks: Ranks) -> None:
    """Refuse a save that would not fit into the storage, or those of this host not into the work dir. Collective.

    Args:
        storage: where the save goes.
        work_dir: where its files lie first.
        own_bytes: an estimate of what this rank writes.
        min_free_bytes: what must be left of the storage's room afterwards.
        ranks: all ranks.

    Raises:
        OSError: ENOSPC, with what is free and what is needed.
    """
    needs = ranks.gather((own_bytes, work_dir and work_dir.device))
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
        OSError: ENOSPC, with what is free and what is needed; or the output dir is gone.
    """
    storage.check_there()
    free = storage.free_bytes()
    if free is not None and free - n_bytes < min_free_bytes:
        kept = f" and leave {size(min_free_bytes)}" if min_free_bytes else ""
        raise OSError(
            errno.ENOSPC,
            f"found {size(free)} free, expected {size(n_bytes)} for the save{kept}; make room, or lower max_keep",
            storage.url,
        )


def check_name(ckpt_id: str, step: int | None) -> None:
    """Refuse what no directory can be called, and what no manifest can hold as its step.

    Raises:
        ValueError: the id cannot be one, or the step is not an int between 0 and 10^18.
    """
    layout.encode_id(ckpt_id)
    if step is not None and (type(step) is not int or not 0 <= step < MAX_COUNT):
        raise ValueError(f"step must be an int of at least 0, below 10^18, or None, found {step!r}")


Owned = Mapping[Slice | None, Sequence[str]]


def check_owners(model: nn.Module, ranks: Ranks) -> None:
    """Refuse tables of which several ranks own the same ids. Collective; all ranks raise alike.

    Raises:
        ValueError: names the tables.
    """
    if ranks.size == 1:
        return
    owned = ranks.gather(_owned(model))
    overlaps = [text for name in _names(owned) for text in _overlap(name, owned)]
    if overlaps:
        raise ValueError(
            f"{'; '.join(overlaps)}: an id belongs to one rank, or it is saved several times and cannot be loaded; "
            "make the table a recckpt.sparse.ShardedHashTable, or give it slice=gen_slice(rank, ranks)"
        )


def _owned(model: nn.Module) -> Owned:
    """Return the names of tables by slice; those of a model that staging refuses are of no account."""
    found: dict[Slice | None, list[str]] = {}
    try:
        tables = state_of(model)[0]
    except Exception:
        return found
    for name, table in tables.items():
        found.setdefault(getattr(table, "slice", None), []).append(name)
    return found


def _names(owned: Sequence[Owned]) -> list[str]:
    return sorted({name for of_rank in owned for names in of_rank.values() for name in names})


def _overlap(name: str, owned: Sequence[Owned]) -> list[str]:
    """Say which two ranks own the same ids of a table, if two do: neighbours, once they are in the order of ids."""
    ranges = sorted(
        ((own.begin / own.size, own.end / own.size, rank) if own else (0.0, 1.0, rank))
        for rank, of_rank in enumerate(owned)
        for own, names in of_rank.items()
        if name in names and (own is None or own.begin < own.end)
    )
    for (_, end, one), (begin, _, other) in pairwise(ranges):
        if begin < end:
            return [f"table {name!r}: ranks {min(one, other)} and {max(one, other)} own the same ids"]
    return []
