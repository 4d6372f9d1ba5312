"""The position of a run: its counts, event time and metadata."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from operator import index
from time import monotonic
from typing import Any

from recckpt.format import layout
from recckpt.format.manifest import StateValue
from recckpt.policies.evict import EVENT_TIME
from recckpt.policies.when import Ends, Moment
from recckpt.text import plural

log = logging.getLogger("recckpt")

_DAY_SEC = 86_400.0
_LONG_SEC = 30 * _DAY_SEC  # the next record of the data is seldom so much later
_AHEAD = (
    "event_time %r (%s) is %.0f days ahead of the clock and of the last event_time: this and similar values are "
    "ignored. If the data really has this time, set it first: manager.event_time = ..."
)
_LEAP = (
    "event_time %r (%s) is %.0f days later than the last one: tables that evict by event time drop all rows not "
    "looked up since; if a record was wrong, set it back by manager.event_time = ..., on all ranks"
)
WINDOWS, EPOCHS, METADATA = "windows", "epochs", "metadata"  # part of the format: in the state of a manifest


@dataclass
class Run:
    global_step: int = 0  # steps so far
    windows: int = 0  # windows of the data that have ended
    epochs: int = 0  # epochs that have ended
    is_saved: bool = False  # whether a lasting checkpoint holds the state of this step
    near_order: tuple[int, int] | None = None  # order of the near save from which the last restore took everything
    event_time: float | None = None  # the latest time of an event in the data so far
    metadata: Mapping[str, StateValue] = field(default_factory=dict)  # facts about the run, for people
    step_prefix: str = layout.STEP_PREFIX  # prefix of the ids of its checkpoints
    _warned_of: frozenset[str] = frozenset()  # warnings about event times that were logged

    @property
    def ckpt_id(self) -> str:
        return layout.step_id(self.global_step, self.step_prefix)

    def id_of(self, step: Any) -> str:
        try:
            return layout.step_id(index(step), self.step_prefix)
        except TypeError:
            example = layout.step_id(300, self.step_prefix)
            raise TypeError(
                f"step must be an int, found {step!r:.100}: a manager names its own checkpoints, step 300 for "
                f"{example!r}"
            ) from None

    def checked_step(self, step: Any) -> int:
        """Return the step to move to; None means the present step.

        TypeError if the step is not an int, ValueError if the run is past it or no checkpoint can have it.
        """
        if step is None:
            return self.global_step
        at = layout.step_of_id(self.id_of(step), self.step_prefix)
        if at is None or at < self.global_step:
            raise ValueError(
                f"step must be an int from {self.global_step}, where the run is, to 10^18 - 1, found {step!r}: a run "
                "goes back by restore(step)"
            )
        return at

    def move_to(self, step: int) -> None:
        """Set the run's step to a step that the caller counted; no checkpoint has this step yet."""
        if step != self.global_step:
            self.global_step, self.is_saved = step, False

    def count(self, ends: Ends) -> None:
        self.global_step += ends == "step"
        self.windows += ends == "window"
        self.epochs += ends == "epoch"
        self.is_saved = False

    def note_saved(self, is_saved: bool = True) -> None:
        self.is_saved = is_saved

    def plausible(self, event_time: float | None) -> float | None:
        """Return the event time of a batch; None if it is a day ahead of both the clock and the last event time.

        Such a time is probably wrong, and would stay the latest event time of the run.
        """
        if event_time is None:
            return None
        since, ahead = event_time - (self.event_time or 0.0), event_time - time.time()
        if min(since, ahead) > _DAY_SEC:
            text, seconds = _AHEAD, ahead
        elif self.event_time is not None and since > _LONG_SEC:
            text, seconds = _LEAP, since
        else:
            return event_time
        if text not in self._warned_of:
            self._warned_of |= {text}
            try:
                date = f"{datetime.fromtimestamp(event_time, timezone.utc):%Y-%m-%d}"
            except (OverflowError, ValueError, OSError):
                date = "no date"  # a time that calendars lack
            log.warning(text, event_time, date, seconds / _DAY_SEC)
        return event_time if text is _LEAP else None

    def stand_at(self, event_time: float) -> None:
        self.event_time = event_time

    def describe(self, metadata: Mapping[str, StateValue]) -> None:
        self.metadata = metadata

    def note_event(self, *times: float | None) -> None:
        """Set the event time to the latest of these times, if it is later than the present event time."""
        self.event_time = max((time for time in (self.event_time, *times) if time is not None), default=None)

    def moment(self, metrics: Mapping[str, float] | None = None, ends: Ends = "step") -> Moment:
        counts = {"windows": self.windows, "epochs": self.epochs}
        return Moment(self.global_step, monotonic(), self.event_time, metrics or {}, **counts, ends=ends)

    @property
    def counted(self) -> str:
        return f"{plural(self.windows, 'window')} and {plural(self.epochs, 'epoch')}"

    @property
    def state(self) -> dict[str, StateValue]:
        """The part of this state that a manifest stores beside the step."""
        counts: dict[str, StateValue] = {WINDOWS: self.windows or None, EPOCHS: self.epochs or None}
        values = {EVENT_TIME: self.event_time, **counts, METADATA: self.metadata or None}
        return {name: value for name, value in values.items() if value is not None}

    def start_at(self, step: int | None) -> None:
        """Count from a step that was loaded from another run; do nothing for None."""
        self.global_step, self.is_saved, self.near_order = step or self.global_step, False, None

    def go_on(
        self, state: Mapping[str, StateValue], step: int | None, *, near_order: tuple[int, int] | None = None
    ) -> None:
        """Continue from a manifest's state: its event time and metadata, if any, and its counts if ``step`` is given.

        ``near_order`` is the order of the near save from which everything was restored.
        """
        self.near_order = near_order
        event_time, metadata = state.get(EVENT_TIME), state.get(METADATA)
        if isinstance(metadata, Mapping):
            self.metadata = {**metadata, **self.metadata}
        if isinstance(event_time, int | float):
            self.event_time = float(event_time)
        if step is not None:
            self.global_step = step
            counts = (state.get(name) for name in (WINDOWS, EPOCHS))
            self.windows, self.epochs = (n if isinstance(n, int) and n > 0 else 0 for n in counts)
