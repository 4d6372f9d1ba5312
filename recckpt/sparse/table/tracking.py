"""How often and when the rows of a table were looked up in training: scalar slots that the table keeps by itself."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.format.tables import ClockDates
from recckpt.sparse.table.row_store import RowStore
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


@dataclass
class TableTime:
    """What the manager or the user has last said of where training is.

    Attributes:
        step: the steps made so far; None where it was not told.
        event_time: what counts as now, in seconds since 1970; None for the clock.
    """

    step: int | None = None
    event_time: float | None = None

    def reach(self, step: int) -> None:
        """Note the step that training has reached."""
        self.step = step

    def stand_at(self, event_time: float | None) -> None:
        """Let this time count as now, until another one does; None for the clock."""
        self.event_time = event_time

    @property
    def now(self) -> Now:
        """The step and the time that a look-up of this moment leaves in its rows."""
        return Now(self.step or 0, time.time() if self.event_time is None else self.event_time)


class Tracking:
    """The slots in which a table keeps how often and when its rows were looked up in training.

    Args:
        names: of what is tracked, keys of ``TRACKED``; none of a table that tracks nothing.
        table_time: that of the table, which :meth:`set_step` and :meth:`set_event_time` change.

    Attributes:
        clock_dates: when the clock has dated rows, which stay so until an event time comes; saved with them.
    """

    def __init__(self, names: tuple[str, ...], table_time: TableTime) -> None:
        self.names = names
        self.clock_dates: ClockDates | None = None
        self._slots = frozenset(TRACKED[name].name for name in names)
        self._table_time = table_time

    @property
    def counts(self) -> bool:
        """Whether occurrences are counted."""
        return COUNT in self._slots

    def add_slots(self, store: RowStore) -> None:
        """Declare the slots."""
        for name in self.names:
            store.add_column(TRACKED[name])
        self.date_new_rows(store)

    def set_step(self, store: RowStore, step: int) -> None:
        """Date rows with a step from now on."""
        self._table_time.reach(step)
        self.date_new_rows(store)

    def set_event_time(self, store: RowStore, event_time: float | None) -> None:
        """Date rows with a time from now on, those too that the clock has dated so far; None for the clock."""
        with store.lock:
            self._table_time.stand_at(event_time)
            self._date_again(store)
            self.date_new_rows(store)

    def note_clock(self, store: RowStore, dates: ClockDates | None) -> None:
        """Note when a clock has dated rows that were loaded here; None where it has not."""
        if dates is None or "time" not in self.names:
            return
        with store.lock:
            self.clock_dates = dates.joined(self.clock_dates)
            self._date_again(store)

    def date_new_rows(self, store: RowStore) -> None:
        """Let rows that are not looked up be as new as they are: the age of a row counts from when it was added."""
        with store.lock:  # an event time may come meanwhile
            for name, value in self._stamps().items():
                store.set_initial(name, value)

    def visit(self, occurrences: Int64s) -> Visit:
        """Return what a look-up of ids that occur so often leaves behind; under the lock of the store."""
        return Visit(occurrences, COUNT if self.counts else "", self._stamps())

    def _date_again(self, store: RowStore) -> None:
        """Give rows that the clock has dated the event time, if there is one: of that run they are the first."""
        dates, event_time = self.clock_dates, self._table_time.event_time
        if dates is None or event_time is None:
            return
        begin = 0
        for times in list(store.columns[LAST_TIME].pieces(0, len(store))):
            is_of_clock = (times >= dates.first) & (times <= dates.last)
            rows = begin + is_of_clock.nonzero().flatten().cpu().numpy()
            if len(rows):
                store.write(rows, {LAST_TIME: times.new_full((len(rows),), event_time)})
            begin += len(times)
        self.clock_dates = None  # last: what an exception ends is done when the next event time comes

    def _stamps(self) -> dict[str, int | float]:
        now = self._table_time.now
        if self._table_time.event_time is None and LAST_TIME in self._slots:
            self.clock_dates = ClockDates(now.time, now.time).joined(self.clock_dates)
        return {name: value for name, value in ((LAST_STEP, now.step), (LAST_TIME, now.time)) if name in self._slots}


def checked_step(table: str, step: Any) -> int:
    """Return the number of steps that training has made, or raise ValueError where it cannot be one."""
    if not isinstance(step, int | np.integer) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        raise ValueError(f"table {table!r}: step must be an int of at least 0, found {step!r}")
    return int(step)


def checked_event_time(table: str, event_time: Any) -> float | None:
    """Return a time in seconds since 1970, or None; or raise ValueError where it is in other units."""
    is_number = isinstance(event_time, int | float) and not isinstance(event_time, bool)
    if event_time is not None and not (is_number and -math.inf < event_time <= MAX_EVENT_TIME):  # which NaN is not
        raise ValueError(
            f"table {table!r}: event_time is in seconds since 1970, found {event_time!r:.100}; divide "
            "milliseconds by 1000, nanoseconds by 1e9"
        )
    return None if event_time is None else float(event_time)


def checked_track(table: str, track: Any) -> tuple[str, ...]:
    """Return what is to be tracked, in the order of the slots, or raise ValueError where something is not known."""
    names = [track] if isinstance(track, str) else list(track)
    unknown = [name for name in names if name not in TRACKED]
    if unknown or len({*names}) < len(names):
        raise ValueError(f"table {table!r}: found track={track!r}, expected some of {tuple(TRACKED)}, each once")
    return tuple(name for name in TRACKED if name in names)
