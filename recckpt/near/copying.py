"""Copies of a near save on other hosts, made before it is sealed."""

from __future__ import annotations

from collections.abc import Sequence

from recckpt.errors import RecckptError
from recckpt.format.manifest import FileEntry
from recckpt.near.moves import Move
from recckpt.near.moving import MoveBuffers, move
from recckpt.near.ring import receivers
from recckpt.parallel.meetings import Meetings
from recckpt.storage import Storage


def copy_files(
    meetings: Meetings,
    storage: Storage,
    directory: str,
    files: Sequence[FileEntry],
    *,
    hosts: Sequence[str],
    copies: int,
    buffers: MoveBuffers,
) -> None:
    """Copy the files of each rank to the hosts that follow its own, and return once all are there. Collective.

    Args:
        meetings: where the ranks meet.
        storage: of the near saves on the host of this rank.
        directory: that of the near save, which each host has made.
        files: what this rank has written there.
        hosts: the host of each rank, the same on all ranks.
        copies: how many other hosts get a copy, the same on all ranks.
        buffers: kept from one near save to the next.

    Raises:
        RecckptError: a copy did not arrive, on all ranks alike; or another rank has failed, or is missing.
    """
    takers = receivers(hosts, copies)
    moves = [
        Move(file.name, file.n_bytes, file.xxh3, sender, taker)
        for sender, entries in enumerate(meetings.gather(files))
        for file in entries
        for taker in takers[sender]
    ]
    failures = move(meetings, storage, directory, moves, buffers)
    if failures:
        first = failures[0]
        raise RecckptError(
            f"{len(failures)} of {len(moves)} copies did not arrive, the first on its way from rank "
            f"{first.move.sender} to rank {first.move.receiver}: {first.reason}"
        )
