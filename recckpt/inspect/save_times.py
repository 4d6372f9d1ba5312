"""The last saves, from ``timeline.jsonl``. People may have edited it: a field of another type counts as missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from recckpt.format.codec import time_of
from recckpt.format.manifest import NOT_FINITE
from recckpt.output_dir.index_file import ENDED, read_timeline
from recckpt.storage import NOT_READABLE, Storage

_LAST = 20  # saves that say how it usually goes
_OVERDUE = 3  # times the usual, from when on a save is missed
_LEAST_OVERDUE_SEC = 60.0  # a loop of saves by hand is not missed at once
_COUNTS = frozenset({"event_time", "windows", "epochs"})  # of a manager, among the numbers of a checkpoint
NEAR = "near"  # the kind of a near save that has failed, which fails no checkpoint


@dataclass(frozen=True)
class NearTimes:
    """The near saves between a checkpoint and the previous checkpoint; None or 0 for fields that the line lacks."""

    made: int  # those that were acknowledged
    failed: int  # those that have failed
    skipped: Mapping[str, int]  # why -> those that were not begun
    steps: tuple[int, int] | None  # the first and the last step with one due
    gap_steps: int | None  # most steps from one acknowledged near save or checkpoint to the next
    hosts: int | None  # how many hosts wrote the newest that was made
    copies: int | None  # how many other hosts have the files of each
    blocked_sec: float | None  # pause of training for all that were made
    total_sec: float | None  # from the step of each until it was acknowledged, in all
    n_bytes: float | None  # of their files, without copies
    error: str | None = None  # why the newest failed one failed

    @property
    def n_due(self) -> int:
        return self.made + self.failed + sum(self.skipped.values())


@dataclass(frozen=True)
class SaveTimes:
    """A save, from its line in ``timeline.jsonl``; None for fields that the line lacks."""

    ckpt_id: str | None  # the checkpoint
    step: int | None  # global step
    kind: str | None  # ``"full"`` or ``"delta"``
    time: str | None  # when it was committed, or failed
    blocked_sec: float | None  # pause of training, on the rank that waited longest
    write_sec: float | None  # writing all files of the slowest shard
    commit_sec: float | None  # making it visible and durable
    total_sec: float | None  # from the call to the end
    n_bytes: float | None  # of all files
    n_rows: float | None  # of all tables
    error: str | None  # why it failed; None if it did not
    near: NearTimes | None = None  # the near saves before it; None if there were none
    # numbers that it was saved with, and learning rates; ``"nan"``, ``"inf"``, ``"-inf"`` for those that are not finite
    metrics: Mapping[str, float | str] = field(default_factory=dict)


def timeline_of(storage: Storage) -> list[dict[str, Any]]:
    """Return the lines of the timeline, oldest first; [] if there is no readable timeline."""
    try:
        return read_timeline(storage)
    except NOT_READABLE:  # a directory in its place
        return []


def saves_of(lines: Iterable[Mapping[str, Any]]) -> list[SaveTimes]:
    """Return the saves among the lines of a timeline."""
    return [save_times(line) for line in lines if "ckpt_id" in line and line.get("kind") not in (NEAR, ENDED)]


def seconds_to_write(saves: Iterable[SaveTimes], n_bytes: int, n_checkpoints: int) -> float | None:
    """Estimate how long this many bytes and checkpoints take at the pace of past saves; None if that is unknown."""
    lines = [save for save in saves if save.n_bytes and save.write_sec and save.error is None]
    if not lines:
        return None
    rate = sum(save.n_bytes or 0 for save in lines) / sum(save.write_sec or 0 for save in lines)
    return n_bytes / rate + n_checkpoints * median(save.commit_sec or 0.0 for save in lines)


def save_times(line: Mapping[str, Any]) -> SaveTimes:
    step, longest, error = line.get("step"), _number(line.get("max_blocked_sec")), line.get("error")
    return SaveTimes(
        ckpt_id=_text(line.get("ckpt_id")),
        step=step if type(step) is int and abs(step) < 1 << 53 else None,
        kind=_text(line.get("kind")),
        time=_text(line.get("time")),
        blocked_sec=_number(line.get("blocked_sec")) if longest is None else longest,
        write_sec=_number(line.get("write_sec")),
        commit_sec=_number(line.get("commit_sec")),
        total_sec=_number(line.get("total_sec")),
        n_bytes=_number(line.get("n_bytes")),
        n_rows=_number(line.get("n_rows")),
        error=None if error is None else str(error),
        near=_near_times(line.get("near")),
        metrics=_metrics(line.get("metrics")),
    )


def _metrics(values: object) -> dict[str, float | str]:
    """Return the numbers, including non-finite ones given as text, without the manager's counts."""
    named = values.items() if isinstance(values, Mapping) else ()
    numbers = ((name, value if value in NOT_FINITE else _finite(value)) for name, value in named)
    return {name: number for name, number in numbers if number is not None and name not in _COUNTS}


def _near_times(values: object) -> NearTimes | None:
    if not isinstance(values, Mapping):
        return None
    skipped, steps = values.get("skipped"), values.get("steps")
    whole = [step for step in steps if _count(step) is not None] if isinstance(steps, list) else []
    return NearTimes(
        made=_count(values.get("made")) or 0,
        failed=_count(values.get("failed")) or 0,
        skipped={why: _count(n) or 0 for why, n in skipped.items()} if isinstance(skipped, Mapping) else {},
        steps=(min(whole), max(whole)) if whole else None,
        gap_steps=_count(values.get("gap_steps")),
        hosts=_count(values.get("hosts")),
        copies=_count(values.get("copies")),
        blocked_sec=_number(values.get("blocked_sec")),
        total_sec=_number(values.get("total_sec")),
        n_bytes=_number(values.get("n_bytes")),
        error=_text(values.get("error")),
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _number(value: object) -> float | None:
    number = _finite(value)
    return number if number is not None and 0 <= number < 1e18 else None


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


@dataclass(frozen=True)
class Pause:
    last_sec: float
    median_sec: float
    max_sec: float
    n_saves: int


@dataclass(frozen=True)
class History:
    saves: Sequence[SaveTimes]  # those that are committed
    failed: Sequence[SaveTimes]  # those that failed since the last of them
    ended: str | None = None  # when training ended well, if no save was begun since

    @classmethod
    def of_committed(cls, saves: Iterable[SaveTimes]) -> History:
        return cls([save for save in saves if save.error is None], [])

    @property
    def last(self) -> Sequence[SaveTimes]:
        return self.saves[-_LAST:]

    @property
    def pause(self) -> Pause | None:
        pauses = [line.blocked_sec for line in self.last if line.blocked_sec is not None]
        return Pause(pauses[-1], median(pauses), max(pauses), len(pauses)) if pauses else None

    @property
    def every_sec(self) -> float | None:
        """The usual seconds from one save to the next; None until known."""
        times = [time for line in self.last if (time := time_of(line.time)) is not None]
        if len(times) < 2:
            return None
        between = [(after - before).total_seconds() for before, after in pairwise(times)]
        usual = median(between) or (times[-1] - times[0]).total_seconds() / len(between)  # times are in whole seconds
        return usual if usual > 0 else None

    @property
    def overdue_sec(self) -> float | None:
        """The age of the newest checkpoint at which the next save counts as missed; None until known."""
        return None if self.every_sec is None else max(_OVERDUE * self.every_sec, _LEAST_OVERDUE_SEC)


def history_of(lines: Iterable[Mapping[str, Any]]) -> History:
    saves: list[SaveTimes] = []
    failed: list[SaveTimes] = []
    ended: str | None = None
    for line in (line for line in map(save_times, lines) if line.kind != NEAR):
        ended = (line.time or "") if line.kind == ENDED else None
        if line.kind == ENDED:
            continue
        if line.error is None:
            saves.append(line)
            failed = []
        else:
            failed.append(line)
    return History(saves, failed, ended)
