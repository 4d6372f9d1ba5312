"""Where a run is, and which ranks take part in it."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from recckpt.format import layout
from recckpt.parallel.ranks import Group, this_rank
from recckpt.saver import Saver

EVENT_TIME = "event_time"  # part of the format: in the state of a manifest


@dataclass
class Run:
    """Where a run is.

    Attributes:
        global_step: steps so far.
        held_step: the step whose state is in a checkpoint that stays, None where it is in none.
        event_time: the latest time of an event in the data so far.
    """

    global_step: int = 0
    held_step: int | None = None
    event_time: float | None = None


@dataclass(frozen=True)
class Ranks:
    """This rank and how many there are.

    Attributes:
        saver: has the group.
        shard_id: number of this rank; None for that of this process.
        shard_num: number of ranks; None for those of this job.
    """

    saver: Saver
    shard_id: int | None = None
    shard_num: int | None = None

    @property
    def rank(self) -> int:
        """Number of this rank, by the process group as it is now."""
        return this_rank(self.shard_id, self.shard_num)[0]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return this_rank(self.shard_id, self.shard_num)[1]

    @property
    def group(self) -> Group:
        """All ranks. Collective the first time, where there are several."""
        return self.saver.group(self.rank, self.size)

    def gather(self, own: Any) -> list[Any]:
        """Return the answers of all ranks, in their order. Collective."""
        return [own] if self.size == 1 else self.group.all_gather(own)


def pinned_id(step: Any) -> str:
    """Return the id of the checkpoint of a step, or raise TypeError where it is none, such as an id."""
    try:
        return layout.step_id(index(step))
    except TypeError:
        raise TypeError(
            f"step must be an int, found {step!r}: a manager pins its own checkpoints, step 300 for 'ckpt_300'"
        ) from None
