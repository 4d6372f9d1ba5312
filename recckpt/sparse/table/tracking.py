"""How often and when the rows of a table were looked up in training: scalar slots that the table keeps by itself."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.format.tables import ClockDates
from recckpt.sparse.table.slots import SlottedTable
from recckpt.sparse.table.visits import Visit
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]

COUNT, LAST_STEP, LAST_TIME = "count", "last_step", "last_time"  # part of the format
TRACKED = {  # what ``track`` may name
    "count": SlotSpec(COUNT, "int64", ()),
    "step": SlotSpec(LAST_STEP, "int64", ()),
    "time": SlotSpec(LAST_TIME, "float64", ()),
}


MAX_EVENT_TIME = 1e11  # seconds: the year 5138; milliseconds are below it until 1973


class Now(NamedTuple):
    """Where training is: its step, and a time in seconds since 1970."""

    step: int
    time: float


class TrackedTable(SlottedTable):
    """A table that knows what step it is, and keeps in its rows how often and when they were looked up in training."""

    track: tuple[str, ...] = ()
    _step: int | None = None
    _event_time: float | None = None
    _clock_dates: ClockDates | None = None

    @property
    def step(self) -> int:
        """The steps that training has made so far, as :class:`recckpt.CheckpointManager` says, or who sets this."""
        return self._step or 0

    @step.setter
    def step(self, step: int) -> None:
        if not isinstance(step, int | np.integer) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            raise ValueError(f"table {self.name!r}: step must be an int of at least 0, found {step!r}")
        self._step = int(step)
        self._date_new_rows()

    @property
    def is_step_known(self) -> bool:
        """Whether anybody has said what step it is."""
        return self._step is not None

    @property
    def event_time(self) -> float | None:
        """The time that counts as now, in seconds since 1970: that given to the manager last; None for the clock.

        Once it is set, rows that the clock has dated so far are dated with it.
        """
        return self._event_time

    @event_time.setter
    def event_time(self, event_time: float | None) -> None:
        is_number = isinstance(event_time, int | float) and not isinstance(event_time, bool)
        if event_time is not None and not (is_number and -math.inf < event_time <= MAX_EVENT_TIME):  # which NaN is not
            raise ValueError(
                f"table {self.name!r}: event_time is in seconds since 1970, found {event_time!r:.100}; divide "
                "milliseconds by 1000, nanoseconds by 1e9"
            )
        with self._store.lock:
            self._event_time = None if event_time is None else float(event_time)
            self._date_again()
            self._date_new_rows()

    @property
    def clock_dates(self) -> ClockDates | None:
        """When the clock has dated rows, which stay so until an event time comes; saved with them."""
        return self._clock_dates

    def note_clock(self, dates: ClockDates | None) -> None:
        """Take note of when a clock has dated rows that were loaded here, None where it has not."""
        if dates is None or "time" not in self.track:
            return
        with self._store.lock:
            self._clock_dates = dates.joined(self._clock_dates)
            self._date_again()

    @property
    def now(self) -> Now:
        """The step and the time that a look-up of this moment leaves in its rows."""
        return Now(self.step, time.time() if self._event_time is None else self._event_time)

    @property
    def counts_occurrences(self) -> bool:
        """Whether a look-up of this moment has to know how often each id occurs."""
        return self.training and COUNT in self._tracked_slots

    @property
    def _tracked_slots(self) -> list[str]:
        return [TRACKED[name].name for name in self.track]

    def _begin_tracking(self, track: Sequence[str]) -> None:
        """Declare the slots of what is tracked."""
        self.track = checked_track(self.name, track)
        for name in self.track:
            self._store.add_column(TRACKED[name])
        self._date_new_rows()

    def _date_new_rows(self) -> None:
        """Let rows that nobody looks up be as new as they are: the age of a row counts from when it was added."""
        with self._store.lock:  # an event time may come meanwhile
            for name, value in self._stamps().items():
                self._store.set_initial(name, value)

    def _date_again(self) -> None:
        """Give rows that the clock has dated the event time, if there is one: of that run they are the first."""
        dates, event_time, store = self._clock_dates, self._event_time, self._store
        if dates is None or event_time is None:
            return
        begin = 0
        for times in list(store.columns[LAST_TIME].pieces(0, len(store))):
            is_of_clock = (times >= dates.first) & (times <= dates.last)
            rows = begin + is_of_clock.nonzero().flatten().cpu().numpy()
            if len(rows):
                store.write(rows, {LAST_TIME: times.new_full((len(rows),), event_time)})
            begin += len(times)
        self._clock_dates = None  # last: what an exception ends is done when the next event time comes

    def _stamps(self) -> dict[str, int | float]:
        now = self.now
        slots = self._tracked_slots
        if self._event_time is None and LAST_TIME in slots:
            self._clock_dates = ClockDates(now.time, now.time).joined(self._clock_dates)
        return {name: value for name, value in ((LAST_STEP, now.step), (LAST_TIME, now.time)) if name in slots}

    def _visit(self, occurrences: Int64s) -> Visit:
        """Return what a look-up of ids that occur so often leaves behind."""
        return Visit(occurrences, COUNT if COUNT in self._tracked_slots else "", self._stamps())


def checked_track(table: str, track: Any) -> tuple[str, ...]:
    """Return what is to be tracked, in the order of the slots, or raise ValueError where something is not known."""
    names = [track] if isinstance(track, str) else list(track)
    unknown = [name for name in names if name not in TRACKED]
    if unknown or len({*names}) < len(names):
        raise ValueError(f"table {table!r}: found track={track!r}, expected some of {tuple(TRACKED)}, each once")
    return tuple(name for name in TRACKED if name in names)
