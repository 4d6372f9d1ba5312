"""Which near saves are kept: the newest two of those that were acknowledged, or named at a takeover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recckpt.format import near_names
from recckpt.output_dir.listing import Checkpoint

_GENERATIONS = 2


@dataclass(frozen=True)
class Generation:
    """A near save that is kept, or under way.

    Attributes:
        directory: in the near dir.
        order: its epoch and cut.
        base: save id of the checkpoint that it stands on.
    """

    directory: str
    order: tuple[int, int]
    base: str

    @classmethod
    def of(cls, save: Checkpoint) -> Generation:
        """Return what is known of one that is there."""
        parent = save.manifest.parent
        assert parent is not None  # as the seal was checked for
        return cls(save.directory, save.manifest.order, parent.save_id)


def newest(generations: Iterable[Generation]) -> tuple[Generation, ...]:
    """Return those that stay. Rule *two_generations*: damage of the newest lets the one before be restored."""
    return tuple(sorted(generations, key=lambda each: each.order)[-_GENERATIONS:])


@dataclass(frozen=True)
class Kept:
    """What stays on every host: once a near save is acknowledged, or before the first one of a job.

    Attributes:
        epoch: near saves up to this one go (rule *gc_by_epoch*).
        directories: but for these.
        forgotten: requests to forget ids, of which these have none.
    """

    epoch: int
    directories: frozenset[str] = frozenset()
    forgotten: frozenset[str] = frozenset()

    @classmethod
    def of(cls, generations: Iterable[Generation], epoch: int, forgotten: frozenset[str]) -> Kept:
        """Return the newest of some."""
        return cls(epoch, frozenset(each.directory for each in newest(generations)), forgotten)

    def lets_go(self, directory: str) -> bool:
        """Say whether a near save goes."""
        parsed = near_names.parse_near(directory)
        return parsed is not None and parsed[0] <= self.epoch and directory not in self.directories
