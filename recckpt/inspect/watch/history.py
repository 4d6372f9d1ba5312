"""The saves of a timeline, as far as its lines can be believed: anybody may have written them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from statistics import median
from typing import Any

_LAST = 20  # saves that say how it usually goes


@dataclass(frozen=True)
class SaveLine:
    """One save; what its line does not say, or says wrong, is None."""

    ckpt_id: str | None
    step: int | None
    time: datetime | None
    blocked_sec: float | None  # how long training stood still, on the slowest rank
    total_sec: float | None
    error: str | None  # why it failed


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

    saves: Sequence[SaveLine]  # those that are committed
    failed: Sequence[SaveLine]  # those that failed since the last of them

    @property
    def pause(self) -> Pause | None:
        """How long training stood still, None where no line says it."""
        found = [line.blocked_sec for line in self.saves[-_LAST:] if line.blocked_sec is not None]
        return Pause(found[-1], median(found), max(found), len(found)) if found else None

    @property
    def every_sec(self) -> float | None:
        """The usual seconds from one save to the next, None where that cannot be told yet."""
        times = [line.time for line in self.saves[-_LAST:] if line.time is not None]
        if len(times) < 2:
            return None
        between = [(after - before).total_seconds() for before, after in pairwise(times)]
        usual = median(between) or (times[-1] - times[0]).total_seconds() / len(between)  # times are in whole seconds
        return usual if usual > 0 else None

    def of(self, ckpt_id: str) -> SaveLine | None:
        """Return the last line of a checkpoint."""
        return next((line for line in reversed(self.saves) if line.ckpt_id == ckpt_id), None)


def history_of(lines: Iterable[Mapping[str, Any]]) -> History:
    """Return what the lines of a timeline say."""
    saves: list[SaveLine] = []
    failed: list[SaveLine] = []
    for line in map(_save_line, lines):
        if line.error is None:
            saves.append(line)
            failed = []
        else:
            failed.append(line)
    return History(saves, failed)


def time_of(text: object) -> datetime | None:
    """Return a moment as manifests and timelines write it, None where it is none."""
    try:
        found = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def _save_line(line: Mapping[str, Any]) -> SaveLine:
    step, ckpt_id, error = line.get("step"), line.get("ckpt_id"), line.get("error")
    blocked = _seconds(line.get("max_blocked_sec"))
    return SaveLine(
        ckpt_id=ckpt_id if isinstance(ckpt_id, str) else None,
        step=step if type(step) is int else None,
        time=time_of(line.get("time")),
        blocked_sec=blocked if blocked is not None else _seconds(line.get("blocked_sec")),
        total_sec=_seconds(line.get("total_sec")),
        error=None if error is None else str(error),
    )


def _seconds(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= sys.float_info.max else None
