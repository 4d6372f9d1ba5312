"""How the saves of a timeline went: what failed since the last good one, how long training stood still, how often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from recckpt.format.moments import time_of
from recckpt.inspect.save_times import NEAR, SaveTimes, save_times

_LAST = 20  # saves that say how it usually goes
_OVERDUE = 3  # times the usual, from when on a save is missed
_LEAST_OVERDUE_SEC = 60.0  # a loop of saves by hand is not missed at once


@dataclass(frozen=True)
class Pause:
    """How long training stood still: for the last save, and for the last ones."""

    last_sec: float
    median_sec: float
    max_sec: float
    n_saves: int


@dataclass(frozen=True)
class History:
    """How the last saves went, oldest first."""

    saves: Sequence[SaveTimes]  # those that are committed
    failed: Sequence[SaveTimes]  # those that failed since the last of them

    @classmethod
    def of_committed(cls, saves: Iterable[SaveTimes]) -> History:
        """Return that of some saves without those that failed."""
        return cls([save for save in saves if save.error is None], [])

    @property
    def pause(self) -> Pause | None:
        """How long training stood still, None where no line says it."""
        pauses = [line.blocked_sec for line in self.saves[-_LAST:] if line.blocked_sec is not None]
        return Pause(pauses[-1], median(pauses), max(pauses), len(pauses)) if pauses else None

    @property
    def last(self) -> Sequence[SaveTimes]:
        """The last saves, oldest first."""
        return self.saves[-_LAST:]

    @property
    def every_sec(self) -> float | None:
        """The usual seconds from one save to the next, None until that is known."""
        times = [time for line in self.saves[-_LAST:] if (time := time_of(line.time)) is not None]
        if len(times) < 2:
            return None
        between = [(after - before).total_seconds() for before, after in pairwise(times)]
        usual = median(between) or (times[-1] - times[0]).total_seconds() / len(between)  # times are in whole seconds
        return usual if usual > 0 else None

    @property
    def overdue_sec(self) -> float | None:
        """The age of the newest checkpoint from which on the next save is missed, None until that is known."""
        return None if self.every_sec is None else max(_OVERDUE * self.every_sec, _LEAST_OVERDUE_SEC)

    def of(self, ckpt_id: str) -> SaveTimes | None:
        """Return the last line of a checkpoint."""
        return next((line for line in reversed(self.saves) if line.ckpt_id == ckpt_id), None)


def history_of(lines: Iterable[Mapping[str, Any]]) -> History:
    """Return what the lines of a timeline say."""
    saves: list[SaveTimes] = []
    failed: list[SaveTimes] = []
    for line in (line for line in map(save_times, lines) if line.kind != NEAR):
        if line.error is None:
            saves.append(line)
            failed = []
        else:
            failed.append(line)
    return History(saves, failed)
