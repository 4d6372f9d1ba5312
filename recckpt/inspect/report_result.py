"""Data classes for the health of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from recckpt.inspect.save_times import SaveTimes
from recckpt.inspect.spread import Bars, Spread
from recckpt.inspect.status import NearNow

Level = Literal["problem", "warning"]

EXPLODING = 100  # multiple of the median norm


@dataclass(frozen=True)
class SaveCost:
    pause_sec: float | None  # how long training pauses for the save
    total_sec: float | None  # from the call until the save is committed
    n_bytes: float | None  # bytes of the files


@dataclass(frozen=True)
class NearHealth:
    due: int  # number of near saves due
    made: int  # number acknowledged
    failed: int  # number failed
    skipped: Mapping[str, int]  # reason -> number skipped
    every_steps: float | None  # mean steps between due saves; None if unknown
    near: SaveCost  # cost of one near save
    delta: SaveCost | None  # cost of a delta; None without deltas
    hosts: int | None  # number of hosts that wrote the newest near save
    copies: int | None  # number of other hosts with a copy of each host's files
    process_steps: int | None  # about the most steps lost if processes die; None if unknown
    host_steps: int | None  # about the most steps lost if a host dies; None if unknown


@dataclass(frozen=True)
class Finding:
    level: Level  # ``"problem"`` if state is lost or wrong, ``"warning"`` if it may become so, or costs time or space
    what: str  # what was found
    remedy: str  # what to do


@dataclass(frozen=True)
class CheckpointSize:
    ckpt_id: str
    directory: str  # directory in the output dir
    step: int | None  # global step; None if the saver does not count steps
    kind: str  # ``"full"`` or ``"delta"``
    time: str  # time of the commit, in UTC, as ISO 8601
    rows: int  # rows of all tables
    n_bytes: int  # bytes of the checkpoint's own files
    links: tuple[str, ...]  # ids of the checkpoints that a restore reads, beginning with this one
    chain_bytes: int  # bytes that a restore reads: its own files, and the bases' files with rows
    full_bytes: int  # size of the chain's full checkpoint
    ephemeral: bool  # whether it is removed once a newer one is committed
    pinned: bool  # whether a pin protects it from rotation
    tables: Mapping[str, int]  # name -> rows


@dataclass(frozen=True)
class LargeRow:
    id: int
    norm: float  # Euclidean norm of the embedding


@dataclass(frozen=True)
class Distribution:
    spread: Spread  # least, most and quantiles
    bars: Bars | None  # histogram of the same values


@dataclass(frozen=True)
class ChainCost:
    base: str  # id of the full checkpoint
    newest: str  # id of the newest checkpoint based on it, or of the full checkpoint
    n_deltas: int  # number of deltas kept
    kept_bytes: int  # size of the full checkpoint and all deltas
    base_bytes: int  # size of the full checkpoint
    read_bytes: int  # bytes that a restore of the newest reads
    n_links: int  # number of checkpoints that this restore reads


@dataclass(frozen=True)
class TableHealth:
    name: str
    rows: int  # number of rows in the manifest
    row_bytes: int  # bytes of one row: id and all slots
    rows_read: int = 0  # undamaged rows
    damage: tuple[str, ...] = ()  # descriptions of damage, which all statistics leave out
    # Euclidean norms of the embeddings; None for integers, or for a table without rows
    norms: Distribution | None = None
    counts: Distribution | None = None  # number of look-ups per row, if the table tracks it
    # steps since the last look-up, if the table tracks it and the run counts steps
    ages_steps: Distribution | None = None
    ages_days: Distribution | None = None  # days since the last look-up, if the table tracks it
    # slot -> number of rows with NaN or infinite values; slots without any are left out
    not_finite: Mapping[str, int] | None = None
    not_finite_ids: tuple[int, ...] = ()  # ids of a few of these rows
    dead: int | None = None  # rows whose embedding is all zeros
    exploding: int | None = None  # rows whose norm is over 100 times the median; None without norms
    untrained: int | None = None  # rows whose optimizer slots are all zeros; None without such slots
    busy: int | None = None  # number of rows that get 80 % of the look-ups, if counts are tracked
    largest: tuple[LargeRow, ...] = ()  # rows with the largest norms, largest first
    is_live: bool = False  # whether the table is a live table, with a fixed number of rows


@dataclass(frozen=True)
class IntervalAdvice:
    failures_per_day: float  # how often the run fails, from the caller
    pause_sec: float  # median pause of training for a save
    total_sec: float  # median from the start of a save to its commit
    # interval between the starts of two saves that loses the least time; at least ``total_sec``
    best_sec: float
    best_share: float  # the share of time lost to saves and failures at that interval
    every_sec: float | None  # the usual seconds from one save to the next; None if unknown
    every_share: float | None  # the share of time lost to saves and failures at that usual interval


@dataclass(frozen=True)
class UnusableDirectory:
    directory: str  # name in the output dir
    # ``"damaged"``; ``"newer"`` or ``"older"`` than this recckpt reads; ``"unreadable"``; ``"fenced"``: committed too
    # late; or ``"unfinished"``
    what: str
    reason: str  # what is wrong with it
    is_dead: bool  # whether no process can still write to it, so that ``recckpt repair --clean`` may remove it


@dataclass(frozen=True, repr=False)
class RunHealth:
    url: str  # the output dir
    findings: tuple[Finding, ...]  # problems first, then warnings
    checkpoints: tuple[CheckpointSize, ...]  # usable checkpoints, oldest first
    leftovers: tuple[UnusableDirectory, ...]  # damaged checkpoints, and remains of unfinished saves
    saves: tuple[SaveTimes, ...]  # the last saves, including failed ones, oldest first
    newest: str | None  # id of the checkpoint whose rows were read; None without checkpoints
    damage: tuple[str, ...]  # damage in files of the newest checkpoint that have no rows
    tables: tuple[TableHealth, ...]  # tables of the newest checkpoint; without statistics if rows were not read
    deep: bool  # whether files were read, not only listed
    lacks: tuple[str, ...] = ()  # names of what trained but was not saved, as far as the writer knew
    # cost of each chain, oldest first; a full checkpoint without deltas is a chain of one
    chains: tuple[ChainCost, ...] = ()
    # how often to save; None without a rate of failures, or if the timeline has no times of saves
    advice: IntervalAdvice | None = None
    near: NearHealth | None = None  # results of near saves; None without near saves
    # what near saves of this host would restore now; None if near saves were not looked at
    near_now: NearNow | None = None
    ended: str | None = None  # time when training ended normally; None if it did not, or if a save began later

    @property
    def is_healthy(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)

    def table(self, name: str) -> TableHealth:
        return {table.name: table for table in self.tables}[name]

    def to_dict(self) -> Mapping[str, Any]:
        return {"healthy": self.is_healthy, **asdict(self)}
