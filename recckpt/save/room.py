"""Whether a save fits: how many bytes each rank writes, and the room that it sees for them."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recckpt.dense.sharded import is_sharded, local_bytes
from recckpt.live.attached import AttachedTable
from recckpt.save.choice import Choice, slots_of_table
from recckpt.save.job import Destination
from recckpt.sparse.files.table_rows import source_of
from recckpt.storage.transfers import no_work_room
from recckpt.text import size
from recckpt.types import SavableTable


@dataclass(frozen=True)
class WorkRoom:
    """The room of a work dir; ranks whose work dirs are on one device of one host share it."""

    url: str
    device: tuple[str, int] | None
    free_bytes: int | None


@dataclass(frozen=True)
class Room:
    """The room that a rank sees for a save; bytes are None where a storage does not know its room."""

    url: str  # of the output dir
    free_bytes: int | None
    min_free_bytes: int  # what is to be left
    work: WorkRoom | None
    ranks: frozenset[int] | None = None  # whose files take of it; None for all
    remedy: str = "make room, or lower max_keep"


def measured_room(to: Destination) -> Room:
    """Return the room that this rank sees.

    Raises:
        OSError: the output dir is gone, or the storage failed.
    """
    to.storage.check_there()
    work_dir = to.transfers.work_dir
    work = WorkRoom(work_dir.url, work_dir.device, work_dir.free_bytes()) if work_dir else None
    return Room(to.storage.url, to.storage.free_bytes(), to.min_free_bytes, work)


def shortage(rooms: Sequence[Room], needs: Sequence[int]) -> tuple[int, OSError] | None:
    """Return the first rank that sees too little room for what all write, and the error that says so; pure.

    Args:
        rooms: what each rank sees.
        needs: about how many bytes each rank writes.
    """
    by_device = Counter[Any]()
    for room, n_bytes in zip(rooms, needs, strict=True):
        if room.work is not None:
            by_device[room.work.device] += n_bytes
    for rank, room in enumerate(rooms):
        total = sum(n_bytes for other, n_bytes in enumerate(needs) if room.ranks is None or other in room.ranks)
        if room.free_bytes is not None and room.free_bytes - total < room.min_free_bytes:
            kept = f" and leave {size(room.min_free_bytes)}" if room.min_free_bytes else ""
            problem = f"found {size(room.free_bytes)} free, expected {size(total)} for the save{kept}"
            return rank, OSError(errno.ENOSPC, f"{problem}; {room.remedy}", room.url)
        work = room.work
        if work is not None and work.free_bytes is not None and work.free_bytes < by_device[work.device]:
            return rank, no_work_room(work.url, work.free_bytes, by_device[work.device])
    return None


def estimated_bytes(tables: Mapping[str, SavableTable], dense: Mapping[str, Any], rank: int, choice: Choice) -> int:
    """Return about how many bytes a rank writes: its rows, its pieces, and as rank 0 the dense state.

    0 where nothing can be said, of a state that staging refuses.
    """
    try:
        return sum(_rows_bytes(table, choice) for table in tables.values()) + sum(
            _written_bytes(value, rank) for value in dense.values() if isinstance(value, Tensor)
        )
    except Exception:
        return 0


def _rows_bytes(table: SavableTable, choice: Choice) -> int:
    """Return the bytes of the rows of a table; 0 where conditions choose them, and a save finds out how many it has."""
    slots = slots_of_table(table)
    chosen = choice.of_table(table).of(table.name, slots)
    if chosen is not None and chosen.where is not None:
        return 0
    row_bytes = 8 + sum(slot.row_bytes for slot in slots) if chosen is None else chosen.row_bytes
    if isinstance(table, AttachedTable):
        return table.n_saved * row_bytes
    return source_of(table).n_rows * row_bytes


def _written_bytes(value: Tensor, rank: int) -> int:
    if is_sharded(value):
        return local_bytes(value)
    return value.nbytes if rank == 0 else 0
