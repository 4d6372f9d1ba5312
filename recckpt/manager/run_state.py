"""Where a run is."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from recckpt.format import layout

EVENT_TIME = "event_time"  # part of the format: in the state of a manifest


@dataclass
class Run:
    """Where a run is."""

    global_step: int = 0  # steps so far
    held_step: int | None = None  # the step whose state is in a checkpoint that stays, None where it is in none
    event_time: float | None = None  # the latest time of an event in the data so far


def pinned_id(step: Any) -> str:
    """Return the id of the checkpoint of a step, or raise TypeError where it is not an int."""
    try:
        return layout.step_id(index(step))
    except TypeError:
        raise TypeError(
            f"step must be an int, found {step!r}: a manager pins its own checkpoints, step 300 for 'ckpt_300'"
        ) from None
