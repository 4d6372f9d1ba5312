"""Copies files of a near save between the hosts of its ranks, in rounds with bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import xxhash

from recckpt.errors import RecckptError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.parallel.process_group import Parcel, ReusedBuffer
from recckpt.parallel.ranks import Meetings
from recckpt.storage import Draft, Storage

_READ_BYTES = 1 << 20  # per read, so that the bytes are still in the CPU cache when copied
ROUND_BYTES = 8 << 20  # the most that a rank sends, or receives, per round


def copies_of(hosts: Sequence[str], copies: int) -> dict[str, tuple[str, ...]]:
    """Return, for each host, the hosts that get copies of its files: the next ``copies`` in order; {} without copies.

    ``hosts`` has the host of each rank.
    """
    ring = sorted(set(hosts))
    n_copies = min(copies, len(ring) - 1)
    if not n_copies:
        return {}
    return {host: tuple((ring * 2)[at + 1 : at + 1 + n_copies]) for at, host in enumerate(ring)}


def receivers(hosts: Sequence[str], copies: int) -> list[tuple[int, ...]]:
    """Return, for each rank, the ranks that receive its files: one on each host that gets a copy.

    Receivers are matched by order: the second rank of a host receives the files of the second rank of another host.
    """
    targets = copies_of(hosts, copies)
    ranks_on = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in set(hosts)}
    places = [ranks_on[host].index(rank) for rank, host in enumerate(hosts)]
    return [
        tuple(ranks_on[target][place % len(ranks_on[target])] for target in targets.get(host, ()))
        for host, place in zip(hosts, places, strict=True)
    ]


def writers(hosts: Sequence[str], copies: int) -> list[frozenset[int]]:
    """Return, for each rank, the ranks whose files are on its host: the host's own ranks, and ranks copied there."""
    targets = copies_of(hosts, copies)
    return [
        frozenset(rank for rank, host in enumerate(hosts) if here in (host, *targets.get(host, ()))) for here in hosts
    ]


@dataclass(frozen=True)
class Move:
    name: str  # within the directory of the near save
    n_bytes: int
    xxh3: int | None  # checksum of the file; if None, the receiver compares with the checksum that the sender computes
    sender: int  # the rank that has the file
    receiver: int  # the rank that gets the file, on another host


@dataclass(frozen=True)
class MoveFailure:
    move: Move
    reason: str  # what was found, where, and what was expected


@dataclass(frozen=True)
class Stretch:
    """Bytes [begin, end) of a sent file, which is followed by the checksum of the bytes read."""

    number: int  # number of the move
    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        return self.end - self.begin


DIGEST_BYTES = 8  # length of the checksum behind each file
Rounds = list[list[Stretch]]  # the stretches that one rank sends to another, per round


def rounds_by_pair(moves: Sequence[Move], round_bytes: int) -> dict[tuple[int, int], Rounds]:
    """Return (sender, receiver) -> the bytes to send per round; a pair sends its files one after another, in order.

    No rank sends or receives more than ``round_bytes`` in one round, but at least one byte for each peer.
    """
    pairs: dict[tuple[int, int], dict[int, int]] = {}
    for number, each in enumerate(moves):
        pairs.setdefault((each.sender, each.receiver), {})[number] = each.n_bytes + DIGEST_BYTES
    n_peers = Counter[tuple[str, int]]()
    for sender, receiver in pairs:
        n_peers.update([("sends", sender), ("receives", receiver)])
    share = max(1, round_bytes // max(n_peers.values(), default=1))
    return {pair: _rounds(sizes, share) for pair, sizes in pairs.items()}


def _rounds(sizes: Mapping[int, int], share: int) -> Rounds:
    made: Rounds = []
    left = 0
    for number, n_bytes in sizes.items():
        begin = 0
        while begin < n_bytes:
            if not left:
                made.append([])
                left = share
            end = min(n_bytes, begin + left)
            made[-1].append(Stretch(number, begin, end))
            left -= end - begin
            begin = end
    return made


class Outgoing:
    """A file that this rank sends, read from start to end; ``failure`` says why reading failed. Not thread-safe."""

    def __init__(self, storage: Storage, directory: str, of: Move) -> None:
        self._storage, self._path, self._n_bytes = storage, layout.join(directory, of.name), of.n_bytes
        self._file: BinaryIO | None = None
        self._hash, self._n_read = xxhash.xxh3_64(), 0
        self.failure: str | None = None
        try:
            found = storage.size(self._path)
            if found != of.n_bytes:
                self.failure = f"{self._path}: found {found} bytes, expected {of.n_bytes}"
        except OSError as error:
            self.failure = str(error)

    def fill(self, parcel: Parcel, begin: int) -> None:
        """Fill a parcel with the bytes from ``begin`` on. After a read failure the contents are arbitrary."""
        n_bytes = min(len(parcel), max(0, self._n_bytes - begin))
        try:
            if self.failure is None:
                self._read_into(parcel[:n_bytes])
        except OSError as error:
            self.failure = str(error)
        if self.failure is None and len(parcel) > n_bytes:
            self.close()  # closed as soon as it is read, because there may be many files
            at = begin + n_bytes - self._n_bytes
            parcel[n_bytes:] = np.frombuffer(self._hash.digest(), np.uint8)[at : at + len(parcel) - n_bytes]

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _read_into(self, parcel: Parcel) -> None:
        at = 0
        while at < len(parcel):
            if self._file is None:
                self._file = self._storage.open(self._path)
            data = self._file.read(min(len(parcel) - at, _READ_BYTES))
            if not data:
                raise OSError(f"{self._path}: found {self._n_read} bytes, expected {self._n_bytes}")
            self._hash.update(data)
            parcel[at : at + len(data)] = np.frombuffer(data, np.uint8)
            at += len(data)
            self._n_read += len(data)


class Incoming:
    """A file that this rank receives; it becomes visible when it is published. Not thread-safe."""

    def __init__(self, storage: Storage, directory: str, of: Move) -> None:
        self._storage, self._path, self._of = storage, layout.join(directory, of.name), of
        self._draft: Draft | None = None
        self._hash, self._digest = xxhash.xxh3_64(), b""
        self._failure: str | None = None

    def take(self, parcel: Parcel, begin: int) -> None:
        """Write the parcel's bytes from ``begin`` on. After a write failure, ignore all further bytes."""
        n_bytes = min(len(parcel), max(0, self._of.n_bytes - begin))
        self._digest += parcel[n_bytes:].tobytes()
        if self._failure is not None:
            return
        try:
            if self._draft is None:
                self._draft = self._storage.draft(self._path)
            if n_bytes:
                self._draft.write(parcel[:n_bytes].data)
                self._hash.update(parcel[:n_bytes].data)
            if len(self._digest) == DIGEST_BYTES:
                self._draft.seal()
        except OSError as error:
            self._failure = str(error)

    def publish(self) -> str | None:
        """Publish the file if its size and checksum are right; otherwise return the problem."""
        found, expected = self._hash.intdigest(), self._of.xxh3
        if expected is None:
            expected = int.from_bytes(self._digest, "big")
        if self._failure is None and found != expected:
            self._failure = f"{self._path}: arrived with the checksum {found:016x}, expected {expected:016x}"
        if self._failure is not None or self._draft is None:
            return self._failure
        try:
            self._draft.close()
        except OSError as error:
            return str(error)
        self._draft = None
        return None

    def discard(self) -> None:
        if self._draft is not None:
            self._draft.discard()


@dataclass(frozen=True)
class MoveBuffers:
    """Memory for the bytes that a rank sends and receives in a round, reused in the next round. Not thread-safe."""

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
    """Copy files of a near save between ranks; return the failed moves, the same on all ranks. Collective.

    A file appears at its receiver once its size and checksum are right (rule *copy_checked*), and replaces an existing
    file. A file that cannot be read, does not fit or cannot be written fails only its own move. ``moves`` must be the
    same on all ranks, in the same order, and no move may be from a rank to itself. A rank sends and receives at most
    ``round_bytes`` per round.
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
    for kind in (0, 1):  # a sender's failure replaces the receiver's, because it is the cause
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
    all_bytes = buffer.take(sum(stretch.n_bytes for stretches in to_ranks for stretch in stretches))
    parcels, at = [], 0
    for stretches in to_ranks:
        begin = at
        for stretch in stretches:
            sent[stretch.number].fill(all_bytes[at : at + stretch.n_bytes], stretch.begin)
            at += stretch.n_bytes
        parcels.append(all_bytes[begin:at])
    return parcels


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
    """Copy each rank's files to the hosts that follow its own host; return when all files have arrived. Collective.

    ``files`` are the files of this rank, in a directory that each host has created; ``hosts`` has the host of each
    rank. All arguments but ``storage`` and ``files`` are the same on all ranks. If a copy did not arrive, all ranks
    raise the same RecckptError.
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
