"""What near saves of a host would give back now; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

from recckpt.format.moments import time_of
from recckpt.inspect.save_times import NearTimes
from recckpt.inspect.watch.history import History
from recckpt.near.here import NearHere
from recckpt.output_dir.listing import Checkpoint
from recckpt.text import count, duration, escaped, one_line, plural, size


@dataclass(frozen=True)
class NewestNear:
    """The newest near save that counts."""

    name: str
    step: int | None
    time: str
    age_sec: float | None  # None where its time cannot be read
    rows: int  # that it holds
    n_bytes: int
    base: str | None  # the checkpoint that it stands on
    shards: int
    shards_here: int  # whose files are all on this host


@dataclass(frozen=True)
class Loss:
    """What was trained since what would be restored: the seconds, and about how many steps that is, where known."""

    sec: float | None
    steps: int | None


@dataclass(frozen=True)
class NearNow:
    """The near saves of a run on one host at one moment.

    Attributes:
        newest: the newest that counts; None where there is none.
        n_saves: how many count.
        with_processes: what is lost where the processes of the run die now.
        with_host: what is lost where the host does, with what no other host has of its near saves.
        is_overdue: whether the next checkpoint was expected since: the run may have ended, and loses nothing then.
    """

    newest: NewestNear | None
    n_saves: int
    with_processes: Loss
    with_host: Loss
    is_overdue: bool


def near_now(saves: Sequence[NearHere], newest: Checkpoint | None, history: History, now: datetime) -> NearNow:
    """Return what near saves would give back.

    Args:
        saves: those that count, newest first.
        newest: the newest checkpoint.
        history: the timeline of the run, by which its pace is known, and by its near saves.
        now: the time.
    """
    pace = steps_per_sec([each.save for each in saves], history)
    ages = [_age(each, now) for each in ([newest] if newest is not None else [])]
    with_host = _loss([*ages, *_ages([each for each in saves if each.is_elsewhere], now)], pace)
    with_processes = _loss([*ages, *_ages(saves, now)], pace)
    limit, age = history.overdue_sec, with_processes.sec
    is_overdue = limit is not None and age is not None and age > limit
    return NearNow(_newest(saves[0], now) if saves else None, len(saves), with_processes, with_host, is_overdue)


def near_facts(near: NearNow) -> Iterator[tuple[str, str]]:
    """Yield what people see of it: names and values."""
    yield "near", _words_of(near)
    ended = ", nothing if the run has ended" if near.is_overdue else ""
    lost = f"{_lost(near.with_processes)} if its processes die, {_lost(near.with_host)} if the host does"
    yield "lost now", f"{lost}{ended}"


def words_of_failed(near: NearTimes, ckpt_id: str) -> str:
    """Say how many of the near saves before a checkpoint failed, and why the last of them did."""
    why = "" if near.error is None else f", the last: {one_line(near.error)}"
    return f"{count(near.failed)} of {count(near.n_due)} before {escaped(ckpt_id)}{why}"


def _ages(saves: Sequence[NearHere], now: datetime) -> list[float | None]:
    """Return the age of the newest of some, if there is one."""
    return [_age(each.save, now) for each in saves[:1]]


def _words_of(near: NearNow) -> str:
    newest = near.newest
    if newest is None:
        return "no near save that counts"
    ago = "at an unknown time" if newest.age_sec is None else f"{duration(newest.age_sec)} ago"
    step = "" if newest.step is None else f"step {count(newest.step)}, "
    base = "" if newest.base is None else f" on {escaped(newest.base)}"
    part = (
        f", {newest.shards_here} of {plural(newest.shards, 'shard')} here" if newest.shards_here < newest.shards else ""
    )
    what = f"{plural(newest.rows, 'row')}, {size(newest.n_bytes)}{base}{part}"
    return f"{ago}: {step}{what}; {count(near.n_saves)} kept"


def _lost(loss: Loss) -> str:
    if loss.sec is None:
        return "all"
    return f"{duration(loss.sec)} of training" if loss.steps is None else f"about {plural(loss.steps, 'step')}"


def _newest(near: NearHere, now: datetime) -> NewestNear:
    save, record = near.save, near.save.manifest
    return NewestNear(
        name=record.save_id,
        step=record.step,
        time=record.time,
        age_sec=_age(save, now),
        rows=sum(table.own_rows for table in record.tables),
        n_bytes=record.n_bytes,
        base=None if record.parent is None else record.parent.ckpt_id,
        shards=near.n_shards,
        shards_here=near.n_here,
    )


def _loss(ages: Sequence[float | None], pace: float | None) -> Loss:
    sec = min((age for age in ages if age is not None), default=None)
    return Loss(sec, None if sec is None or pace is None else round(sec * pace))


def _age(save: Checkpoint, now: datetime) -> float | None:
    time = time_of(save.manifest.time)
    return None if time is None else max(0.0, (now - time).total_seconds())


def steps_per_sec(saves: Sequence[Checkpoint], history: History) -> float | None:
    """Return how fast the run trains, by the steps and times of its last saves; None until that is known."""
    made: list[tuple[str | None, int | None]] = [(each.manifest.time, each.manifest.step) for each in saves]
    made += [(line.time, line.step) for line in history.last]
    known = sorted((time, step) for text, step in made if step is not None and (time := time_of(text)) is not None)
    paces = [
        (later_step - step) / seconds
        for (time, step), (later, later_step) in pairwise(known)
        if (seconds := (later - time).total_seconds()) > 0 and later_step > step
    ]
    return median(paces) if paces else None
