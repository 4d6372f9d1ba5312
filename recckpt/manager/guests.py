"""What a manager asks of guests: other saves beside its checkpoints, and what else a run may start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from recckpt.output_dir.listing import Checkpoint, Listing
from recckpt.parallel.ranks import Ranks
from recckpt.policies.schedule import Agreed, Kind, SaveCounts
from recckpt.policies.when import Moment
from recckpt.save.job import State

Usable = Callable[[], tuple[Listing, Sequence[Checkpoint]]]
Needed = Callable[[Checkpoint], frozenset[str]]
_T = TypeVar("_T")


class SideSaves(Protocol):
    """Saves that steps make beside checkpoints, such as near saves. Collective; not thread-safe."""

    def start(self, begin: Moment) -> None:
        """Begin to count from where the run is, as after a restore."""

    def see(self, now: Moment) -> None:
        """Take note of the first event time that is known, and of one that was set back."""

    def is_due(self, now: Moment, agreed: Agreed, is_window_open: Callable[[], bool], *, has_saved: bool) -> bool:
        """Say whether to make one now: a checkpoint takes its place, and it waits while gradients wait."""

    def begin(self, ranks: Ranks, step: int, state: State) -> Kind | None:
        """Begin one; return the kind of checkpoint to make in its place, where there is nothing yet that it stands on.

        Raises:
            WriterFencedError: another process has taken the output dir over.
        """

    def has_restored_newest(self, ranks: Ranks, order: tuple[int, int] | None) -> bool:
        """Say whether a run that makes these has restored one of this order, which is still the newest there."""

    def counted(self, counts: SaveCounts) -> SaveCounts:
        """Return the counts with those of these saves."""


class Candidates(Protocol):
    """What a run may start from, newest first, as far as it is known to be whole. Collective.

    Attributes:
        is_shared: whether ranks see it together only, and a plan too asks all of them.
    """

    is_shared: bool

    def find(self, ranks: Ranks, bank: Callable[[], _T], usable: Usable, needed: Needed) -> tuple[_T, list[Checkpoint]]:
        """Return the bank, and what there is: rank 0 asks ``usable`` for checkpoints, each rank ``needed`` for files.

        Raises:
            RecckptError: a rank failed, or is missing.
        """

    def without_damage(
        self, ranks: Ranks, before: Sequence[Checkpoint], left: Sequence[Checkpoint], needed: Needed
    ) -> list[Checkpoint]:
        """Return what of ``before`` can still be used, of which rank 0 has ``left`` what needs nothing damaged."""


class OwnCheckpoints:
    """The checkpoints of the output dir: what a run starts from where there are no guests."""

    is_shared = False

    def find(self, ranks: Ranks, bank: Callable[[], _T], usable: Usable, needed: Needed) -> tuple[_T, list[Checkpoint]]:
        return ranks.on_first(lambda: (bank(), list(usable()[1])))

    def without_damage(
        self, ranks: Ranks, before: Sequence[Checkpoint], left: Sequence[Checkpoint], needed: Needed
    ) -> list[Checkpoint]:
        return list(left)
