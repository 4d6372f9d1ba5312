"""Where a run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from recckpt.format import layout
from recckpt.format.manifest import Scalar
from recckpt.policies.evict import EVENT_TIME
from recckpt.policies.when import Ends, Moment
from recckpt.text import plural

WINDOWS, EPOCHS = "windows", "epochs"  # part of the format: in the state of a manifest


@dataclass
class Run:
    """Where a run is."""

    global_step: int = 0  # steps so far
    windows: int = 0  # windows of the data that have ended
    epochs: int = 0  # epochs that have ended
    held_step: int | None = None  # the step whose state is in a checkpoint that stays, None where it is in none
    event_time: float | None = None  # the latest time of an event in the data so far

    def count(self, ends: Ends) -> None:
        """Count what has ended; no checkpoint holds that yet."""
        self.global_step += ends == "step"
        self.windows += ends == "window"
        self.epochs += ends == "epoch"
        self.held_step = None

    def moment(self, seconds: float, metrics: Mapping[str, float] | None = None, ends: Ends = "step") -> Moment:
        """Return where it is, for policies."""
        counts = {"windows": self.windows, "epochs": self.epochs}
        return Moment(self.global_step, seconds, self.event_time, metrics or {}, **counts, ends=ends)

    @property
    def counted(self) -> str:
        """What ranks compare, in words."""
        return f"{plural(self.windows, 'window')} and {plural(self.epochs, 'epoch')}"

    @property
    def state(self) -> dict[str, Scalar]:
        """What a manifest says of it, beside the step."""
        found = {EVENT_TIME: self.event_time, WINDOWS: self.windows or None, EPOCHS: self.epochs or None}
        return {name: value for name, value in found.items() if value is not None}

    def take(self, state: Mapping[str, Scalar], *, counts: bool) -> None:
        """Go on from what a manifest says: its event time if it has one, and with the step what counts beside it."""
        event_time = state.get(EVENT_TIME)
        if isinstance(event_time, int | float):
            self.event_time = float(event_time)
        if counts:
            self.windows, self.epochs = (_count(state.get(name)) for name in (WINDOWS, EPOCHS))


def _count(value: Scalar) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def pinned_id(step: Any) -> str:
    """Return the id of the checkpoint of a step, or raise TypeError where it is not an int."""
    try:
        return layout.step_id(index(step))
    except TypeError:
        raise TypeError(
            f"step must be an int, found {step!r}: a manager pins its own checkpoints, step 300 for 'ckpt_300'"
        ) from None
