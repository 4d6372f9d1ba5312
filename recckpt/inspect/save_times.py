"""Reads the last saves from ``timeline.jsonl``. It may be edited by hand: fields of a wrong type count as missing."""

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

_LAST = 20  # number of last saves that define what is usual
_OVERDUE = 3  # a save is overdue after this multiple of the usual interval
_LEAST_OVERDUE_SEC = 60.0  # so that a save in a loop by hand is not overdue at once
_COUNTS = frozenset({"event_time", "windows", "epochs"})  # counts of a manager, among the numbers of a checkpoint
NEAR = "near"  # kind of a failed near save, which does not count as a failed checkpoint


@dataclass(frozen=True)
class NearTimes:
    """The near saves between the previous checkpoint and this one; None or 0 for fields that the line lacks."""

    made: int  # number acknowledged
    failed: int  # number failed
    skipped: Mapping[str, int]  # reason -> number skipped
    steps: tuple[int, int] | None  # the first and the last step at which one was due
    gap_steps: int | None  # most steps from one acknowledged near save or checkpoint to the next
    hosts: int | None  # number of hosts that wrote the newest acknowledged near save
    copies: int | None  # number of other hosts with a copy of each host's files
    blocked_sec: float | None  # pause of training for all acknowledged near saves
    total_sec: float | None  # total time from step to acknowledgement
    n_bytes: float | None  # bytes of their files, without copies
    error: str | None = None  # error of the newest failed near save

    @property
    def n_due(self) -> int:
        return self.made + self.failed + sum(self.skipped.values())


@dataclass(frozen=True)
class SaveTimes:
    """A save, from its line in ``timeline.jsonl``; None for fields that the line lacks."""

    ckpt_id: str | None  # id of the checkpoint
    step: int | None  # global step
    kind: str | None  # ``"full"`` or ``"delta"``
    time: str | None  # time of the commit, or of the failure
    blocked_sec: float | None  # pause of training, on the rank that waited longest
    write_sec: float | None  # time of the slowest shard to write all its files
    commit_sec: float | None  # time to make the save visible and durable
    total_sec: float | None  # from the call to the end of the save
    n_bytes: float | None  # bytes of all files
    n_rows: float | None  # rows of all tables
    error: str | None  # why the save failed; None if it did not fail
    near: NearTimes | None = None  # the near saves before it; None if there were none
    # numbers saved with it, and learning rates; ``"nan"``, ``"inf"``, ``"-inf"`` for non-finite values
    metrics: Mapping[str, float | str] = field(default_factory=dict)


def timeline_of(storage: Storage) -> list[dict[str, Any]]:
    """Return the lines of the timeline, oldest first; [] if there is no readable timeline."""
    try:
        return read_timeline(storage)
    except NOT_READABLE:  # a directory has this name
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
    saves: Sequence[SaveTimes]  # committed saves
    failed: Sequence[SaveTimes]  # saves that failed since the last committed save
    ended: str | None = None  # time when training ended normally, unless a save began later

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
