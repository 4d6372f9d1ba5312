"""Moves files of one near save between the hosts of its ranks, in rounds that bound what is in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

import numpy as np

from recckpt.near.moved_files import Incoming, Outgoing
from recckpt.near.moves import Move, MoveFailure, Stretch, rounds_by_pair
from recckpt.parallel.meetings import Meetings
from recckpt.parallel.process_group import Parcel
from recckpt.storage import Storage

ROUND_BYTES = 8 << 20  # that a rank sends, or is sent, at a meeting
_T = TypeVar("_T")


def move(
    meetings: Meetings, storage: Storage, directory: str, moves: Sequence[Move], *, round_bytes: int = ROUND_BYTES
) -> list[MoveFailure]:
    """Move files of a near save, and return those that did not arrive, the same on all ranks. Collective.

    A file appears at its receiver once it has its size and its checksum (rule *copy_checked*), in the place of one that
    was there. One that cannot be read, does not fit or cannot be written is a failure of its own move alone.

    Args:
        meetings: where the ranks meet.
        storage: of the near saves on the host of this rank.
        directory: that of the near save.
        moves: the same on all ranks, in the same order; none from a rank to itself.
        round_bytes: that a rank sends, or is sent, at a meeting.

    Raises:
        RecckptError: another rank has failed.
        RankLostError: another rank is missing.
    """
    if not moves:
        return []
    rank, numbered = meetings.rank, dict(enumerate(moves))
    with ExitStack() as stack:
        sent = {n: Outgoing(storage, directory, each) for n, each in numbered.items() if each.sender == rank}
        for leaving in sent.values():
            stack.callback(leaving.close)
        failures = _of_all(meetings, {n: file.failure for n, file in sent.items()})
        going = {n: each for n, each in numbered.items() if n not in failures}
        received = {n: Incoming(storage, directory, each) for n, each in going.items() if each.receiver == rank}
        for arriving in received.values():
            stack.callback(arriving.discard)
        _exchange(meetings, going, sent, received, round_bytes)
        digests = _joined(meetings.gather({n: file.digest for n, file in sent.items()}))
        failures |= _of_all(meetings, {n: file.publish(digests[n]) for n, file in received.items()})
        failures |= _of_all(meetings, {n: file.failure for n, file in sent.items()})  # which is the cause of the other
    return [MoveFailure(moves[n], failures[n]) for n in sorted(failures)]


def _exchange(
    meetings: Meetings,
    moves: Mapping[int, Move],
    sent: Mapping[int, Outgoing],
    received: Mapping[int, Incoming],
    round_bytes: int,
) -> None:
    """Send the bytes of all files, round by round, and take what is sent to this rank."""
    rank, by_pair = meetings.rank, rounds_by_pair(moves, round_bytes)

    def stretches(sender: int, receiver: int, number: int) -> Sequence[Stretch]:
        rounds = by_pair.get((sender, receiver), ())
        return rounds[number] if number < len(rounds) else ()

    for number in range(max(map(len, by_pair.values()), default=0)):
        parcels = [_packed(sent, stretches(rank, to, number)) for to in range(meetings.size)]
        for sender, parcel in enumerate(meetings.exchange(parcels)):
            at = 0
            for stretch in stretches(sender, rank, number):
                received[stretch.number].take(parcel[at : at + stretch.n_bytes])
                at += stretch.n_bytes


def _packed(sent: Mapping[int, Outgoing], stretches: Sequence[Stretch]) -> Parcel:
    parcel = np.zeros(sum(stretch.n_bytes for stretch in stretches), np.uint8)
    at = 0
    for stretch in stretches:
        sent[stretch.number].read_into(parcel[at : at + stretch.n_bytes])
        at += stretch.n_bytes
    return parcel


def _of_all(meetings: Meetings, own: Mapping[int, str | None]) -> dict[int, str]:
    """Return the failures of all ranks, by the number of the move."""
    return _joined(meetings.gather({number: why for number, why in own.items() if why is not None}))


def _joined(of_ranks: Sequence[Mapping[int, _T]]) -> dict[int, _T]:
    return {number: value for each in of_ranks for number, value in each.items()}
