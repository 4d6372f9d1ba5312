"""The status of a run at one time, and the training that its near saves would recover; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

from recckpt.format import layout
from recckpt.format.codec import time_of
from recckpt.inspect.save_times import History, NearTimes, Pause
from recckpt.near.views import NearHere
from recckpt.output_dir.checkpoint_dir import Intent, state_of
from recckpt.output_dir.claims import Claim
from recckpt.output_dir.listing import Checkpoint, Listing


@dataclass(frozen=True)
class LastSave:
    ckpt_id: str
    step: int | None
    kind: str
    time: str
    age_sec: float | None  # None if its time cannot be read
    rows: int
    n_bytes: int
    n_links: int  # links of the chain that a restore reads
    total_sec: float | None  # how long the save took
    near: NearTimes | None = None  # results of the near saves before this save


@dataclass(frozen=True)
class Failure:
    ckpt_id: str | None
    step: int | None
    age_sec: float | None
    error: str


@dataclass(frozen=True)
class NewestNear:
    name: str
    step: int | None
    time: str
    age_sec: float | None  # None if its time cannot be read
    rows: int  # rows in the near save
    n_bytes: int
    base: str | None  # the checkpoint that it is based on
    shards: int
    shards_here: int  # shards whose files are all on this host


@dataclass(frozen=True)
class Loss:
    """The training that a failure would lose: seconds, and about how many steps, since the checkpoint to restore."""

    sec: float | None
    steps: int | None


@dataclass(frozen=True)
class NearNow:
    newest: NewestNear | None  # the newest valid near save
    n_saves: int  # number of valid near saves
    with_processes: Loss  # what is lost if the run's processes die now
    with_host: Loss  # what is lost if the host dies, which leaves only the copies on other hosts
    is_overdue: bool  # whether the next checkpoint is overdue: the run may have ended, and then loses nothing


@dataclass(frozen=True)
class Status:
    url: str  # the output dir
    time: datetime  # time of the poll
    why_empty: str  # why there is no checkpoint; "" if there is one
    last: LastSave | None  # the newest checkpoint
    pause: Pause | None  # how long training stood still for saves
    pauses: Sequence[float | None]  # for each of the last saves, oldest first; None if unknown
    sizes: Sequence[float | None]  # bytes of each of the last saves
    every_sec: float | None  # the usual seconds from one save to the next
    overdue_sec: float | None  # age of the newest checkpoint at which the next save counts as missed
    failed: Sequence[Failure]  # saves that failed since the last successful save
    attempts: Sequence[Intent]  # uncommitted saves of the current writer: still running, or their writer died
    writer: Claim | None  # the process that may save here
    n_checkpoints: int
    n_bytes: int  # bytes of all checkpoints
    problems: Sequence[str]  # what is wrong with other directories, one line each
    near: NearNow | None = None  # what near saves of this host would restore; None if near saves are ignored
    ended: str | None = None  # time when training ended normally; None if it did not, or if a save began later

    @property
    def saves_per_hour(self) -> float | None:
        return None if self.every_sec is None else 3600 / self.every_sec

    @property
    def is_overdue(self) -> bool:
        age_sec = None if self.last is None or self.ended is not None else self.last.age_sec
        return age_sec is not None and self.overdue_sec is not None and age_sec > self.overdue_sec

    @property
    def key(self) -> object:
        """A key of the printed facts. A status with the key of the previous status is not printed again."""
        return (
            self.why_empty,
            self.last and (self.last.ckpt_id, self.last.time, self.last.n_links),
            self.is_overdue,
            self.ended,
            [(each.ckpt_id, each.error) for each in self.failed],
            self.attempts,
            self.writer,
            self.problems,
        )

    def to_dict(self) -> dict[str, Any]:
        writer = None
        if self.writer is not None:
            writer = {"epoch": self.writer.epoch, "host": self.writer.host, "pid": self.writer.pid}
            writer |= {"time": self.writer.time, "purpose": self.writer.purpose or None}
        near = {} if self.near is None else {"near": asdict(self.near)}
        return {
            "output_dir": self.url,
            "time": self.time.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "step": None if self.last is None else self.last.step,
            "last_save": None if self.last is None else asdict(self.last),
            "pause": None if self.pause is None else asdict(self.pause),
            "pauses_sec": list(self.pauses),
            "save_bytes": list(self.sizes),
            "saves_per_hour": self.saves_per_hour,
            "ended": self.ended,
            "overdue": self.is_overdue,
            "overdue_sec": self.overdue_sec,
            "failed": [asdict(each) for each in self.failed],
            "under_way": [{"directory": each.directory, "step": each.step} for each in self.attempts],
            "writer": writer,
            "checkpoints": self.n_checkpoints,
            "bytes": self.n_bytes,
            "problems": list(self.problems),
            "why_empty": self.why_empty or None,
            **near,
        }


def status_of(
    url: str,
    now: datetime,
    listing: Listing,
    history: History,
    *,
    writer: Claim | None,
    intents: Sequence[Intent],
    why_empty: str,
    overdue_sec: float | None = None,
    near_saves: Sequence[NearHere] | None = None,
) -> Status:
    """Return the status of a run, from the files that one poll of its output dir has read.

    ``overdue_sec`` is the age of the newest checkpoint at which the next save counts as missed, None for the usual.
    ``near_saves`` are the valid near saves of this host, newest first; None if near saves are ignored.
    """
    current = listing.current
    newest = current[-1] if current else None
    last = None if newest is None else _last(newest, history, now)
    failed = [Failure(each.ckpt_id, each.step, _age(each.time, now), each.error or "") for each in history.failed]
    problems = [f"{directory} is {state_of(error)}: {error}" for directory, error in listing.damaged.items()]
    problems += [f"{directory} is unreadable: {error}" for directory, error in listing.unreadable.items()]
    problems += [f"{directory} is fenced: {reason}" for directory, reason in listing.fenced.items()]
    return Status(
        url=url,
        time=now,
        why_empty="" if current else why_empty or "no checkpoint is committed yet",
        last=last,
        pause=history.pause,
        pauses=[line.blocked_sec for line in history.last],
        sizes=[line.n_bytes for line in history.last],
        every_sec=history.every_sec,
        overdue_sec=history.overdue_sec if overdue_sec is None else overdue_sec,
        failed=failed,
        attempts=_attempts(intents, writer, last, failed),
        writer=writer,
        n_checkpoints=len(current),
        n_bytes=sum(checkpoint.manifest.n_bytes for checkpoint in listing.committed),
        problems=problems,
        near=None if near_saves is None else near_now(near_saves, newest, history, now),
        ended=history.ended,
    )


def _last(checkpoint: Checkpoint, history: History, now: datetime) -> LastSave:
    record = checkpoint.manifest
    line = next((line for line in reversed(history.saves) if line.ckpt_id == record.ckpt_id), None)
    return LastSave(
        ckpt_id=record.ckpt_id,
        step=record.step,
        kind=record.kind,
        time=record.time,
        age_sec=_age(record.time, now),
        rows=record.rows,
        n_bytes=record.n_bytes,
        n_links=len(checkpoint.links),
        total_sec=None if line is None else line.total_sec,
        near=None if line is None else line.near,
    )


def _attempts(
    intents: Iterable[Intent], writer: Claim | None, last: LastSave | None, failed: Iterable[Failure]
) -> list[Intent]:
    """Return the current writer's saves that may be running: not failed, and not older than the newest checkpoint."""
    ended = set[str]()
    for each in failed:
        with suppress(ValueError):  # not the name of a checkpoint
            ended.add(layout.encode_id(each.ckpt_id or ""))
    since = None if last is None else last.step
    return [
        each
        for each in intents
        if writer is not None and each.epoch == writer.epoch and each.directory not in ended
        if since is None or each.step is None or each.step >= since
    ]


def _age(time: str | None, now: datetime) -> float | None:
    """Return the seconds since a time from another machine's clock, which may be ahead."""
    moment = time_of(time)
    return None if moment is None else max(0.0, (now - moment).total_seconds())


def near_now(saves: Sequence[NearHere], newest: Checkpoint | None, history: History, now: datetime) -> NearNow:
    pace = steps_per_sec([each.save for each in saves], history)
    elsewhere = [each for each in saves if each.is_elsewhere]
    losses = []
    for outlives in (saves, elsewhere):
        left = [*([] if newest is None else [newest]), *(each.save for each in outlives[:1])]
        sec = min((age for each in left if (age := _age(each.manifest.time, now)) is not None), default=None)
        losses.append(Loss(sec, None if sec is None or pace is None else round(sec * pace)))
    with_processes, with_host = losses
    limit, age = history.overdue_sec, with_processes.sec
    is_overdue = limit is not None and age is not None and age > limit
    return NearNow(_newest(saves[0], now) if saves else None, len(saves), with_processes, with_host, is_overdue)


def _newest(near: NearHere, now: datetime) -> NewestNear:
    record = near.save.manifest
    return NewestNear(
        name=record.save_id,
        step=record.step,
        time=record.time,
        age_sec=_age(record.time, now),
        rows=sum(table.own_rows for table in record.tables),
        n_bytes=record.n_bytes,
        base=None if record.parent is None else record.parent.ckpt_id,
        shards=near.n_shards,
        shards_here=near.n_here,
    )


def steps_per_sec(saves: Sequence[Checkpoint], history: History) -> float | None:
    """Return the pace of training, from steps and times of the last saves; None until known."""
    made: list[tuple[str | None, int | None]] = [(each.manifest.time, each.manifest.step) for each in saves]
    made += [(line.time, line.step) for line in history.last]
    known = sorted((time, step) for text, step in made if step is not None and (time := time_of(text)) is not None)
    paces = [
        (later_step - step) / seconds
        for (time, step), (later, later_step) in pairwise(known)
        if (seconds := (later - time).total_seconds()) > 0 and later_step > step
    ]
    return median(paces) if paces else None
