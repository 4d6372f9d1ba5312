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
    """Mean cost of the last saves of a kind; None for unknown figures."""

    pause_sec: float | None  # how long training stands still for it
    total_sec: float | None  # from the call until it counts
    n_bytes: float | None  # of its files


@dataclass(frozen=True)
class NearHealth:
    due: int  # how many were due
    made: int  # how many were acknowledged
    failed: int  # how many have failed
    skipped: Mapping[str, int]  # why -> how many were not begun
    every_steps: float | None  # from one to the next that was due, on average; None where that is not known
    near: SaveCost  # what one costs
    delta: SaveCost | None  # what a delta costs; None where there are none
    hosts: int | None  # how many hosts wrote the newest
    copies: int | None  # how many other hosts have the files of each of them
    process_steps: int | None  # about how many steps are lost at most where processes die; None where that is not known
    host_steps: int | None  # the same where a host does


@dataclass(frozen=True)
class Finding:
    level: Level  # ``"problem"`` where state is lost or wrong, ``"warning"`` where it may become so, or costs
    what: str  # what it is
    remedy: str  # what to do


@dataclass(frozen=True)
class CheckpointSize:
    ckpt_id: str
    directory: str  # where it lies in the output dir
    step: int | None  # global step, None where the saver did not count
    kind: str  # ``"full"`` or ``"delta"``
    time: str  # when it was committed, in UTC, as ISO 8601
    rows: int  # of all tables
    n_bytes: int  # of its own files
    links: tuple[str, ...]  # ids of the checkpoints that a restore reads, itself first
    chain_bytes: int  # that such a restore reads: its own files, and those of the others that hold rows
    full_bytes: int  # of the full one of them
    ephemeral: bool  # whether it goes as soon as a newer one is committed
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
    """A full checkpoint and the deltas based on it."""

    base: str  # id of the full checkpoint
    newest: str  # id of the newest that stands on it, or its own
    n_deltas: int  # how many deltas are kept, in all
    kept_bytes: int  # of the files of all of them
    base_bytes: int  # of those of the full one
    read_bytes: int  # that a restore of the newest reads
    n_links: int  # how many checkpoints it reads from


@dataclass(frozen=True)
class TableHealth:
    name: str
    rows: int  # by the manifest
    row_bytes: int  # of one row, its id and all slots
    rows_read: int = 0  # those that are whole; all, unless there is damage
    damage: tuple[str, ...] = ()  # what is damaged, of which these figures are without; () where nothing is
    # Euclidean norms of the embeddings; None where they are integers, or there are no rows
    norms: Distribution | None = None
    counts: Distribution | None = None  # how often rows were looked up, where the table tracks it
    # steps since the last look-up, where the table tracks it and the run counts steps
    ages_steps: Distribution | None = None
    ages_days: Distribution | None = None  # days since the last look-up, where the table tracks it
    # slot -> rows in which a value is NaN or infinite; slots without any are left out
    not_finite: Mapping[str, int] | None = None
    not_finite_ids: tuple[int, ...] = ()  # ids of some of these rows
    dead: int | None = None  # rows whose embedding is all zeros
    exploding: int | None = None  # rows whose norm is over 100 times the median; None where there are no norms
    untrained: int | None = None  # rows of which all slots of the optimizer are zeros; None where the table has none
    busy: int | None = None  # rows that carry 80 % of the look-ups, where counts are tracked
    largest: tuple[LargeRow, ...] = ()  # rows with the largest norms, largest first
    is_live: bool = False  # whether it is a table of another library, which has places for so many rows from its start


@dataclass(frozen=True)
class IntervalAdvice:
    failures_per_day: float  # how often the run fails, as it was given
    pause_sec: float  # how long training stands still for a save; the median
    total_sec: float  # from the begin of a save until it is committed; the median
    # from the begin of one save to that of the next, so that least time is lost; not before one has ended
    best_sec: float
    best_share: float  # the share of the time that saves and failures take then
    every_sec: float | None  # the usual seconds from one save to the next; None where that is not known
    every_share: float | None  # the share of the time that saves and failures take with these


@dataclass(frozen=True)
class UnusableDirectory:
    directory: str  # its name in the output dir
    # ``"damaged"``, ``"newer"`` or ``"older"`` than this recckpt reads, ``"unreadable"``, ``"fenced"``: committed too
    # late, or ``"unfinished"``
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
    newest: str | None  # id of the checkpoint whose rows were read; None where there is none
    damage: tuple[str, ...]  # what is wrong with its files that hold no rows; () where nothing is
    tables: tuple[TableHealth, ...]  # its tables; without figures of their rows where these were not read
    deep: bool  # whether its files were read, and not only looked for
    lacks: tuple[str, ...] = ()  # what trained the model and left no state in it, by what its writer knew
    # what each chain costs, oldest first; full checkpoints on which nothing stands are chains of one
    chains: tuple[ChainCost, ...] = ()
    # how often to save; None without a rate of failures, and where the saves do not say what they take
    advice: IntervalAdvice | None = None
    near: NearHealth | None = None  # what became of near saves; None where there were none
    # what near saves of this host would give back now; None where they are not looked at
    near_now: NearNow | None = None
    ended: str | None = None  # when training ended well, if it has, and no save was begun since

    @property
    def is_healthy(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)

    def table(self, name: str) -> TableHealth:
        return {table.name: table for table in self.tables}[name]

    def to_dict(self) -> Mapping[str, Any]:
        return {"healthy": self.is_healthy, **asdict(self)}
