"""Moves files of one near save between the hosts of its ranks, in rounds that bound what is in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from recckpt.near.moved_files import Incoming, Outgoing
from recckpt.near.moves import Move, MoveFailure, Rounds, Stretch, rounds_by_pair
from recckpt.parallel.meetings import Meetings
from recckpt.parallel.process_group import Parcel
from recckpt.parallel.reused_buffer import ReusedBuffer
from recckpt.storage import Storage

ROUND_BYTES = 8 << 20  # that a rank sends, or is sent, at a meeting


@dataclass(frozen=True)
class MoveBuffers:
    """Memory for what a rank sends and what it is sent in a round, kept for the next. Not thread-safe."""

    sent: ReusedBuffer = field(default_factory=ReusedBuffer)
    received: ReusedBuffer = field(default_factory=ReusedBuffer)


def move(
    meetings: Meetings,
    storage: Storage,
    directory: str,
    moves: Sequence[Move],
    buffers: MoveBuffers | None = None,
    *,
    round_bytes: int = ROUND_BYTES,
) -> list[MoveFailure]:
    """Move files of a near save, and return those that did not arrive, the same on all ranks. Collective.

    A file appears at its receiver once it has its size and its checksum (rule *copy_checked*), in the place of one that
    was there. One that cannot be read, does not fit or cannot be written is a failure of its own move alone.

    Args:
        meetings: where the ranks meet.
        storage: of the near saves on the host of this rank.
        directory: that of the near save.
        moves: the same on all ranks, in the same order; none from a rank to itself.
        buffers: kept from one near save to the next; None for those of this call.
        round_bytes: that a rank sends, or is sent, at a meeting.

    Raises:
        RecckptError: another rank has failed.
        RankLostError: another rank is missing.
    """
    if not moves:
        return []
    rank, numbered = meetings.rank, list(enumerate(moves))
    with ExitStack() as stack:
        sent = {n: Outgoing(storage, directory, each) for n, each in numbered if each.sender == rank}
        received = {n: Incoming(storage, directory, each) for n, each in numbered if each.receiver == rank}
        for leaving in sent.values():
            stack.callback(leaving.close)
        for arriving in received.values():
            stack.callback(arriving.discard)
        _exchange(meetings, rounds_by_pair(moves, round_bytes), sent, received, buffers or MoveBuffers())
        unfit = {n: file.publish() for n, file in received.items()}
        unread = {n: file.failure for n, file in sent.items()}
    of_ranks = meetings.gather((unfit, unread))
    failures: dict[int, str] = {}
    for kind in (0, 1):  # what the sender says is the cause of what the receiver found
        for each in of_ranks:
            failures |= {n: why for n, why in each[kind].items() if why is not None}
    return [MoveFailure(moves[n], failures[n]) for n in sorted(failures)]


def _exchange(
    meetings: Meetings,
    by_pair: Mapping[tuple[int, int], Rounds],
    sent: Mapping[int, Outgoing],
    received: Mapping[int, Incoming],
    buffers: MoveBuffers,
) -> None:
    """Send what goes from each rank to each other, round by round, and take what is sent to this rank."""
    rank = meetings.rank

    def stretches(sender: int, receiver: int, number: int) -> Sequence[Stretch]:
        rounds = by_pair.get((sender, receiver), ())
        return rounds[number] if number < len(rounds) else ()

    for number in range(max(map(len, by_pair.values()))):
        parcels = _packed(sent, [stretches(rank, to, number) for to in range(meetings.size)], buffers.sent)
        for sender, parcel in enumerate(meetings.exchange(parcels, buffers.received)):
            at = 0
            for stretch in stretches(sender, rank, number):
                received[stretch.number].take(parcel[at : at + stretch.n_bytes], stretch.begin)
                at += stretch.n_bytes


def _packed(sent: Mapping[int, Outgoing], to_ranks: Sequence[Sequence[Stretch]], buffer: ReusedBuffer) -> list[Parcel]:
    """Return what goes to each rank, one after the other in the buffer."""
    all_bytes = buffer.take(sum(stretch.n_bytes for stretches in to_ranks for stretch in stretches))
    parcels, at = [], 0
    for stretches in to_ranks:
        begin = at
        for stretch in stretches:
            sent[stretch.number].fill(all_bytes[at : at + stretch.n_bytes], stretch.begin)
            at += stretch.n_bytes
        parcels.append(all_bytes[begin:at])
    return parcels
