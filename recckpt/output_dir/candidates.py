"""The checkpoints that a run may start from: the ones in its output dir, and saves that guests add."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.parallel.ranks import Ranks

Usable = Callable[[], tuple[Listing, list[Checkpoint]]]
Needed = Callable[[Checkpoint], frozenset[str]]
_T = TypeVar("_T")


class CandidateFinder:
    """Finds the checkpoints that a run may start from, newest first. Guests with more candidates override this class.

    Collective; not thread-safe.
    """

    is_shared = False  # whether all ranks must search together, even for a plan

    def find(self, ranks: Ranks, bank: Callable[[], _T], usable: Usable, needed: Needed) -> tuple[_T, list[Checkpoint]]:
        """Return a bank and the candidates.

        Rank 0 calls ``bank``, which locates the bank, and ``usable``, which lists the output dir and its usable
        checkpoints. ``needed`` returns the files of a candidate that this rank reads.
        """
        return ranks.on_first(lambda: (bank(), usable()[1]))

    def without_damage(
        self, ranks: Ranks, before: Sequence[Checkpoint], left: Sequence[Checkpoint], needed: Needed
    ) -> Sequence[Checkpoint]:
        """Return the candidates of ``before`` that remain; ``left`` lacks those with damage that rank 0 knows of."""
        return left


def merged(checkpoints: Sequence[Checkpoint], saves: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Merge checkpoints and near saves, both newest first, into one order."""
    together, rest = list[Checkpoint](), list(checkpoints)
    for save in saves:
        while rest and rest[0].manifest.order > save.manifest.order:
            together.append(rest.pop(0))
        together.append(save)
    return [*together, *rest]
