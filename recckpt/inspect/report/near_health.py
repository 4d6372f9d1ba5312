"""What became of the near saves of a run, as data (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SaveCost:
    """What a save of a kind costs, on the average of the last ones; None where that is not known.

    Attributes:
        pause_sec: how long training stands still for it.
        total_sec: from the call until it counts.
        n_bytes: of its files.
    """

    pause_sec: float | None
    total_sec: float | None
    n_bytes: float | None


@dataclass(frozen=True)
class NearHealth:
    """The near saves before the last checkpoints, by the lines of these in the timeline.

    Attributes:
        due: how many were due.
        made: how many were acknowledged.
        failed: how many have failed.
        skipped: why -> how many were not begun.
        every_steps: from one to the next that was due, on average; None where that is not known.
        near: what one costs.
        delta: what a delta costs; None where there are none.
        hosts: how many hosts wrote the newest.
        copies: how many other hosts have the files of each of them.
        process_steps: about how many steps are lost at most where processes die; None where that is not known.
        host_steps: the same where a host does.
    """

    due: int
    made: int
    failed: int
    skipped: Mapping[str, int]
    every_steps: float | None
    near: SaveCost
    delta: SaveCost | None
    hosts: int | None
    copies: int | None
    process_steps: int | None
    host_steps: int | None
