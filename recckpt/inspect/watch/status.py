"""What is known of a run at one moment; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from recckpt.format import layout
from recckpt.format.moments import time_of
from recckpt.inspect.save_times import NearTimes, SaveTimes
from recckpt.inspect.watch.history import History, Pause
from recckpt.inspect.watch.near import NearNow, near_now
from recckpt.near.here import NearHere
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.claims import Claim
from recckpt.output_dir.listing import Checkpoint, Listing


@dataclass(frozen=True)
class LastSave:
    """The newest checkpoint that is committed."""

    ckpt_id: str
    step: int | None
    kind: str
    time: str
    age_sec: float | None  # None where its time cannot be read
    rows: int
    n_bytes: int
    n_links: int  # of the chain that a restore reads
    total_sec: float | None  # how long the save took
    near: NearTimes | None = None  # what became of the near saves before it


@dataclass(frozen=True)
class Failure:
    """A save that failed."""

    ckpt_id: str | None
    step: int | None
    age_sec: float | None
    error: str


@dataclass(frozen=True)
class UncommittedAttempt:
    """A save that has begun and is not committed: it is under way, or its writer died."""

    directory: str
    step: int | None


@dataclass(frozen=True)
class Status:
    """A run at one moment, as its output dir shows it.

    Attributes:
        url: the output dir.
        time: of the look.
        why_empty: why there is no checkpoint, "" where there is one.
        last: the newest checkpoint.
        pause: how long training stood still for saves.
        pauses: how long training stood still for each of the last saves, oldest first, None where it is not known.
        sizes: the bytes of each of them.
        every_sec: the usual seconds from one save to the next.
        overdue_sec: the age of the newest checkpoint from which on the next save is missed.
        failed: saves that failed since the last that did not.
        attempts: saves of the writer that owns the output dir which are not committed.
        writer: who saves here.
        n_checkpoints: how many there are.
        n_bytes: of all of them.
        problems: what is wrong with others, a line each.
        near: what near saves of this host would give back; None where they are not looked at.
    """

    url: str
    time: datetime
    why_empty: str
    last: LastSave | None
    pause: Pause | None
    pauses: Sequence[float | None]
    sizes: Sequence[float | None]
    every_sec: float | None
    overdue_sec: float | None
    failed: Sequence[Failure]
    attempts: Sequence[UncommittedAttempt]
    writer: Claim | None
    n_checkpoints: int
    n_bytes: int
    problems: Sequence[str]
    near: NearNow | None = None

    @property
    def saves_per_hour(self) -> float | None:
        """How many saves there usually are in an hour."""
        return None if self.every_sec is None else 3600 / self.every_sec

    @property
    def is_overdue(self) -> bool:
        """Whether the next save is missed."""
        age_sec = None if self.last is None else self.last.age_sec
        return age_sec is not None and self.overdue_sec is not None and age_sec > self.overdue_sec

    @property
    def key(self) -> object:
        """What has to differ for a look to be worth a line."""
        return (
            self.why_empty,
            self.last and (self.last.ckpt_id, self.last.time, self.last.n_links),
            self.is_overdue,
            [(each.ckpt_id, each.error) for each in self.failed],
            self.attempts,
            self.writer,
            self.problems,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        writer = None
        if self.writer is not None:
            writer = {"epoch": self.writer.epoch, "host": self.writer.host, "pid": self.writer.pid}
            writer |= {"time": self.writer.time, "purpose": self.writer.purpose or None}
            mirrors = {"mirror_of": self.writer.mirror_of, "continues": self.writer.continues}
            writer |= {key: None if mirror is None else mirror.url for key, mirror in mirrors.items()}
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
            "overdue": self.is_overdue,
            "overdue_sec": self.overdue_sec,
            "failed": [asdict(each) for each in self.failed],
            "under_way": [asdict(each) for each in self.attempts],
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
    """Return what is known of a run.

    Args:
        url: the output dir.
        now: when it was looked at.
        listing: its checkpoints.
        history: its timeline.
        writer: who owns it.
        intents: the attempts that are not committed.
        why_empty: what the storage says of an output dir without checkpoints.
        overdue_sec: the age of the newest checkpoint from which on the next save is missed; None to go by the usual.
        near_saves: those of this host that count, newest first; None where they are not looked at.
    """
    current = listing.current
    last = _last(current[-1], history, now) if current else None
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
        failed=[_failure(line, now) for line in history.failed],
        attempts=[
            UncommittedAttempt(each.directory, each.step) for each in intents if _may_run(each, writer, last, history)
        ],
        writer=writer,
        n_checkpoints=len(current),
        n_bytes=sum(checkpoint.manifest.n_bytes for checkpoint in listing.committed),
        problems=[
            *_problems("damaged", listing.damaged),
            *_problems("unreadable", listing.unreadable),
            *_problems("fenced", listing.fenced),
        ],
        near=None if near_saves is None else near_now(near_saves, current[-1] if current else None, history, now),
    )


def _last(checkpoint: Checkpoint, history: History, now: datetime) -> LastSave:
    record = checkpoint.manifest
    line = history.of(record.ckpt_id)
    return LastSave(
        ckpt_id=record.ckpt_id,
        step=record.step,
        kind=record.kind,
        time=record.time,
        age_sec=_age(time_of(record.time), now),
        rows=record.rows,
        n_bytes=record.n_bytes,
        n_links=len(checkpoint.links),
        total_sec=None if line is None else line.total_sec,
        near=None if line is None else line.near,
    )


def _may_run(intent: Intent, writer: Claim | None, last: LastSave | None, history: History) -> bool:
    """Say whether a save may be under way: the owner's, which has neither failed nor been left behind."""
    if writer is None or intent.epoch != writer.epoch or intent.directory in _directories(history.failed):
        return False
    return last is None or last.step is None or intent.step is None or intent.step >= last.step


def _directories(lines: Iterable[SaveTimes]) -> Iterator[str]:
    for line in lines:
        with suppress(ValueError):  # a name that no checkpoint has
            yield layout.encode_id(line.ckpt_id or "")


def _failure(line: SaveTimes, now: datetime) -> Failure:
    return Failure(line.ckpt_id, line.step, _age(time_of(line.time), now), line.error or "")


def _age(time: datetime | None, now: datetime) -> float | None:
    """Return the seconds since a moment by the clock of another machine, which may be ahead."""
    return None if time is None else max(0.0, (now - time).total_seconds())


def _problems(what: str, directories: Mapping[str, object]) -> list[str]:
    return [f"{directory} is {what}: {reason}" for directory, reason in directories.items()]
