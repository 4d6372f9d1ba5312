"""Files of a near save that go from rank to rank, and the rounds in which they go. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """One file of a near save that goes from one rank to another.

    Attributes:
        name: within the directory of the near save.
        n_bytes: its size.
        xxh3: its checksum; None where none is known, so that what arrives is compared with what was read.
        sender: the rank that has it.
        receiver: the rank that is to have it, on another host.
    """

    name: str
    n_bytes: int
    xxh3: int | None
    sender: int
    receiver: int


@dataclass(frozen=True)
class MoveFailure:
    """A file that did not arrive.

    Attributes:
        move: which.
        reason: what was found, where, and what was expected.
    """

    move: Move
    reason: str


@dataclass(frozen=True)
class Stretch:
    """Bytes [begin, end) of what a move sends: the file, and the checksum of what was read of it."""

    number: int  # of the move
    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        """How many bytes these are."""
        return self.end - self.begin


DIGEST_BYTES = 8  # behind each file
Rounds = list[list[Stretch]]  # what one rank sends another, round by round


def rounds_by_pair(moves: Sequence[Move], round_bytes: int) -> dict[tuple[int, int], Rounds]:
    """Return what each sender sends each receiver in each round; the files of a pair follow each other, in order.

    Args:
        moves: all of them.
        round_bytes: that a rank sends in one round, or is sent, at most; one for each of its peers in any case.
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
