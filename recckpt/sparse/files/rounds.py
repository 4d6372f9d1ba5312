"""In which rounds ranks send each other rows, so that none gets more at once than it has room for; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

Window = Mapping[int, int]  # what a rank sends at once: to which rank about how many bytes


def agreed_rounds(of_ranks: Sequence[Sequence[Window]], room: int) -> list[frozenset[int]]:
    """Return who sends its next window in each round.

    Args:
        of_ranks: of each rank, by its number: what it sends, in order.
        room: bytes that a rank gets in a round at most, unless one window alone has more for it.
    """
    n_sent = [0] * len(of_ranks)
    rounds = []
    while left := [rank for rank, windows in enumerate(of_ranks) if n_sent[rank] < len(windows)]:
        received, senders = Counter[int](), set[int]()
        for rank in sorted(left, key=lambda rank: n_sent[rank] - len(of_ranks[rank])):  # those with most to send first
            window = of_ranks[rank][n_sent[rank]]
            if all(not received[to] or received[to] + n_bytes <= room for to, n_bytes in window.items()):
                received.update(window)
                senders.add(rank)
                n_sent[rank] += 1
        rounds.append(frozenset(senders))
    return rounds
