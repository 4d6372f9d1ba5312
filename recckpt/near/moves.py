"""Files of a near save that go from rank to rank, and the rounds in which they go. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
    """Bytes [begin, end) of the file of a move, by the number of the move."""

    number: int
    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        """How many bytes these are."""
        return self.end - self.begin


Rounds = list[list[Stretch]]  # what one rank sends another, round by round


def rounds_by_pair(moves: Mapping[int, Move], round_bytes: int) -> dict[tuple[int, int], Rounds]:
    """Return what each sender sends each receiver in each round; the files of a pair follow each other, in order.

    Args:
        moves: by number.
        round_bytes: that a rank sends in one round, or is sent, at most; one for each of its peers in any case.
    """
    pairs: dict[tuple[int, int], dict[int, Move]] = {}
    for number, each in moves.items():
        pairs.setdefault((each.sender, each.receiver), {})[number] = each
    n_peers = Counter[tuple[str, int]]()
    for sender, receiver in pairs:
        n_peers.update([("sends", sender), ("receives", receiver)])
    share = max(1, round_bytes // max(n_peers.values(), default=1))
    return {pair: _rounds(of_pair, share) for pair, of_pair in pairs.items()}


def _rounds(moves: Mapping[int, Move], share: int) -> Rounds:
    made: Rounds = [[]]
    left = share
    for number, each in moves.items():
        begin, end = 0, -1
        while end < each.n_bytes:  # once at least: an empty file has a stretch too
            if not left:
                made.append([])
                left = share
            end = min(each.n_bytes, begin + left)
            made[-1].append(Stretch(number, begin, end))
            left -= end - begin
            begin = end
    return made
