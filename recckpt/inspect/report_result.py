"""The health of a run, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from recckpt.inspect.save_times import SaveTimes
from recckpt.inspect.spread import Bars, Spread
from recckpt.inspect.status import NearNow

Level = Literal["problem", "warning"]

EXPLODING = 100  # times the median of the norms


@dataclass(frozen=True)
class SaveCost:
    pause_sec: float | None  # how long training stands still for it
    total_sec: float | None  # from the call until it counts
    n_bytes: float | None  # of its files


@dataclass(frozen=True)
class NearHealth:
    due: int  # how many were due
    made: int  # how many were acknowledged
    failed: int  # how many have failed
    skipped: Mapping[str, int]  # why -> how many were not begun
    every_steps: float | None  # mean steps from one due save to the next; None if unknown
    near: SaveCost  # what one costs
    delta: SaveCost | None  # what a delta costs; None without deltas
    hosts: int | None  # how many hosts wrote the newest one
    copies: int | None  # how many other hosts have each host's files
    process_steps: int | None  # most steps lost if processes die, about; None if unknown
    host_steps: int | None  # the same if a host dies


@dataclass(frozen=True)
class Finding:
    level: Level  # ``"problem"`` if state is lost or wrong, ``"warning"`` if it may become so, or costs
    what: str  # what it is
    remedy: str  # what to do


@dataclass(frozen=True)
class CheckpointSize:
    ckpt_id: str
    directory: str  # where it lies in the output dir
    step: int | None  # global step; None if the saver counts none
    kind: str  # ``"full"`` or ``"delta"``
    time: str  # when it was committed, in UTC, as ISO 8601
    rows: int  # of all tables
    n_bytes: int  # of its own files
    links: tuple[str, ...]  # ids of the checkpoints that a restore reads, itself first
    chain_bytes: int  # bytes that a restore reads: its own files, and the bases' files with rows
    full_bytes: int  # size of the full checkpoint at the end of the chain
    ephemeral: bool  # whether it is removed once a newer one is committed
    pinned: bool  # whether rotation leaves it alone
    tables: Mapping[str, int]  # name -> rows


@dataclass(frozen=True)
class LargeRow:
    id: int
    norm: float  # Euclidean norm of its embedding


@dataclass(frozen=True)
class Distribution:
    spread: Spread  # least, most and quantiles
    bars: Bars | None  # the same to draw


@dataclass(frozen=True)
class ChainCost:
    base: str  # id of the full checkpoint
    newest: str  # id of the newest that stands on it, or its own
    n_deltas: int  # how many deltas are kept, in all
    kept_bytes: int  # size of all of them
    base_bytes: int  # size of the full one
    read_bytes: int  # bytes that a restore of the newest reads
    n_links: int  # how many checkpoints it reads from


@dataclass(frozen=True)
class TableHealth:
    name: str
    rows: int  # by the manifest
    row_bytes: int  # of one row, its id and all slots
    rows_read: int = 0  # undamaged rows
    damage: tuple[str, ...] = ()  # what is damaged; the figures leave it out
    # Euclidean norms of the embeddings; None for integers, or without rows
    norms: Distribution | None = None
    counts: Distribution | None = None  # how often rows were looked up, if the table tracks it
    # steps since the last look-up, if the table tracks it and the run counts steps
    ages_steps: Distribution | None = None
    ages_days: Distribution | None = None  # days since the last look-up, if the table tracks it
    # slot -> number of rows with NaN or infinite values; slots without any are left out
    not_finite: Mapping[str, int] | None = None
    not_finite_ids: tuple[int, ...] = ()  # ids of a few of these rows
    dead: int | None = None  # rows whose embedding is all zeros
    exploding: int | None = None  # rows whose norm is over 100 times the median; None without norms
    untrained: int | None = None  # rows whose optimizer slots are all zeros; None without such slots
    busy: int | None = None  # rows with 80 % of the look-ups, if counts are tracked
    largest: tuple[LargeRow, ...] = ()  # rows with the largest norms, largest first
    is_live: bool = False  # whether it is a live table, whose number of rows is fixed from the start


@dataclass(frozen=True)
class IntervalAdvice:
    failures_per_day: float  # how often the run fails, as given
    pause_sec: float  # median pause of training for a save
    total_sec: float  # median from the begin of a save until it is committed
    # from the begin of one save to the next so that least time is lost; at least ``total_sec``
    best_sec: float
    best_share: float  # the share of time that saves and failures then take
    every_sec: float | None  # the usual seconds from one save to the next; None if unknown
    every_share: float | None  # the share of time that saves and failures take at that interval


@dataclass(frozen=True)
class UnusableDirectory:
    directory: str  # its name in the output dir
    # ``"damaged"``; ``"newer"`` or ``"older"`` than this recckpt reads; ``"unreadable"``; ``"fenced"``: committed too
    # late; or ``"unfinished"``
    what: str
    reason: str  # what is wrong with it
    is_dead: bool  # whether no process can still be writing it, so that ``recckpt repair --clean`` may remove it


@dataclass(frozen=True, repr=False)
class RunHealth:
    url: str  # the output dir
    findings: tuple[Finding, ...]  # what is unhealthy, problems first
    checkpoints: tuple[CheckpointSize, ...]  # those that can be used, oldest first
    leftovers: tuple[UnusableDirectory, ...]  # damaged checkpoints, and what saves left that did not end
    saves: tuple[SaveTimes, ...]  # the last ones, oldest first, those that failed too
    newest: str | None  # id of the checkpoint whose rows were read; None without checkpoints
    damage: tuple[str, ...]  # damage of its files without rows
    tables: tuple[TableHealth, ...]  # its tables; without figures if rows were not read
    deep: bool  # whether its files were read, not only listed
    lacks: tuple[str, ...] = ()  # what trained the model without being saved, as far as its writer knew
    # what each chain costs, oldest first; a full checkpoint without deltas is a chain of one
    chains: tuple[ChainCost, ...] = ()
    # how often to save; None without a rate of failures, or if the timeline lacks the saves' times
    advice: IntervalAdvice | None = None
    near: NearHealth | None = None  # how near saves went; None without near saves
    # what near saves of this host would restore now; None if they are not looked at
    near_now: NearNow | None = None
    ended: str | None = None  # when training ended well; None if it did not, or a save was begun since

    @property
    def is_healthy(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)

    def table(self, name: str) -> TableHealth:
        return {table.name: table for table in self.tables}[name]

    def to_dict(self) -> Mapping[str, Any]:
        return {"healthy": self.is_healthy, **asdict(self)}
