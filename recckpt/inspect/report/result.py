"""How a run is, as data (no torch here)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from recckpt.inspect.report.near_health import NearHealth
from recckpt.inspect.save_times import SaveTimes
from recckpt.inspect.spread import Bars, Spread
from recckpt.inspect.watch.near import NearNow

Level = Literal["problem", "warning"]


@dataclass(frozen=True)
class Finding:
    """Something that is unhealthy.

    Attributes:
        level: ``"problem"`` where state is lost or wrong, ``"warning"`` where it may become so, or costs.
        what: what it is.
        remedy: what to do.
    """

    level: Level
    what: str
    remedy: str


@dataclass(frozen=True)
class CheckpointSize:
    """A committed checkpoint.

    Attributes:
        ckpt_id: its id.
        directory: where it lies in the output dir.
        step: global step, None where the saver did not count.
        kind: ``"full"`` or ``"delta"``.
        time: when it was committed, in UTC, as ISO 8601.
        rows: of all tables.
        n_bytes: of its own files.
        links: ids of the checkpoints that a restore reads, itself first.
        chain_bytes: that such a restore reads: its own files, and those of the others that hold rows.
        full_bytes: of the full one of them.
        ephemeral: whether it goes as soon as a newer one is committed.
        pinned: whether rotation leaves it alone.
        tables: name -> rows.
    """

    ckpt_id: str
    directory: str
    step: int | None
    kind: str
    time: str
    rows: int
    n_bytes: int
    links: tuple[str, ...]
    chain_bytes: int
    full_bytes: int
    ephemeral: bool
    pinned: bool
    tables: Mapping[str, int]


@dataclass(frozen=True)
class LargeRow:
    """A row among those of the largest embeddings.

    Attributes:
        id: its id.
        norm: Euclidean norm of its embedding.
    """

    id: int
    norm: float


@dataclass(frozen=True)
class Distribution:
    """How the numbers of a table's rows are spread: their norms, counts or ages.

    Attributes:
        spread: least, most and quantiles.
        bars: the same to draw.
    """

    spread: Spread
    bars: Bars | None


@dataclass(frozen=True)
class CountBin:
    """The rows of a table that were looked up about as often.

    Attributes:
        least: look-ups of each of these rows, at least.
        most: at most: twice as many less one; 0 of those that were never looked up.
        rows: how many there are.
        norms: how the norms of their embeddings are spread; None where there are none.
        untrained: those of which all slots of the optimizer are zeros; None where the table has none.
    """

    least: int
    most: int
    rows: int
    norms: Spread | None
    untrained: int | None


@dataclass(frozen=True)
class ChainCost:
    """A full checkpoint and the deltas that stand on it.

    Attributes:
        base: id of the full checkpoint.
        newest: id of the newest that stands on it, or its own.
        n_deltas: how many deltas are kept, in all.
        kept_bytes: of the files of all of them.
        base_bytes: of those of the full one.
        read_bytes: that a restore of the newest reads.
        n_links: how many checkpoints it reads from.
    """

    base: str
    newest: str
    n_deltas: int
    kept_bytes: int
    base_bytes: int
    read_bytes: int
    n_links: int


@dataclass(frozen=True)
class TableHealth:
    """The rows of a table in the newest checkpoint.

    Attributes:
        name: of the table.
        rows: by the manifest.
        row_bytes: of one row, its id and all slots.
        rows_read: those that are whole; all, unless there is damage.
        damage: what is damaged, of which these figures are without; () where nothing is.
        norms: Euclidean norms of the embeddings; None where they are integers, or there are no rows.
        counts: how often rows were looked up, where the table tracks it.
        ages_steps: steps since the last look-up, where the table tracks it and the run counts steps.
        ages_days: days since the last look-up, where the table tracks it.
        not_finite: slot -> rows in which a value is NaN or infinite; slots without any are left out.
        not_finite_ids: ids of some of these rows.
        dead: rows whose embedding is all zeros.
        exploding: rows whose norm is over 100 times the median; None where there are no norms.
        untrained: rows of which all slots of the optimizer are zeros; None where the table has none.
        busy: rows that carry 80 % of the look-ups, where counts are tracked.
        largest: rows with the largest norms, largest first.
        by_count: norms against look-ups, the fewest look-ups first; () where these are not tracked.
        is_live: whether it is a table of another library, which has places for so many rows from its start.
    """

    name: str
    rows: int
    row_bytes: int
    rows_read: int = 0
    damage: tuple[str, ...] = ()
    norms: Distribution | None = None
    counts: Distribution | None = None
    ages_steps: Distribution | None = None
    ages_days: Distribution | None = None
    not_finite: Mapping[str, int] | None = None
    not_finite_ids: tuple[int, ...] = ()
    dead: int | None = None
    exploding: int | None = None
    untrained: int | None = None
    busy: int | None = None
    largest: tuple[LargeRow, ...] = ()
    by_count: tuple[CountBin, ...] = ()
    is_live: bool = False


@dataclass(frozen=True)
class IntervalAdvice:
    """How often to save, by what the last saves have taken.

    Attributes:
        failures_per_day: how often the run fails, as it was given.
        pause_sec: how long training stands still for a save; the median.
        total_sec: from the begin of a save until it is committed; the median.
        best_sec: from the begin of one save to that of the next, so that least time is lost; not before one has ended.
        best_share: the share of the time that saves and failures take then.
        every_sec: the usual seconds from one save to the next; None where that is not known.
        every_share: the share of the time that saves and failures take with these.
    """

    failures_per_day: float
    pause_sec: float
    total_sec: float
    best_sec: float
    best_share: float
    every_sec: float | None
    every_share: float | None


@dataclass(frozen=True)
class UnusableDirectory:
    """A directory that is no checkpoint which counts.

    Attributes:
        directory: its name in the output dir.
        what: ``"damaged"``, ``"newer"`` than this recckpt reads, ``"unreadable"``, ``"fenced"``: committed too late, or
            ``"unfinished"``.
        reason: what is wrong with it.
        is_dead: whether no process can still be writing it, so that ``recckpt repair --clean`` may remove it.
    """

    directory: str
    what: str
    reason: str
    is_dead: bool


@dataclass(frozen=True, repr=False)
class RunHealth:
    """How a run is.

    Attributes:
        url: the output dir.
        findings: what is unhealthy, problems first.
        checkpoints: those that can be used, oldest first.
        leftovers: damaged checkpoints, and what saves left that did not end.
        saves: the last ones, oldest first, those that failed too.
        newest: id of the checkpoint whose rows were read; None where there is none.
        damage: what is wrong with its files that hold no rows; () where nothing is.
        tables: its tables; without figures of their rows where these were not read.
        deep: whether its files were read, and not only looked for.
        lacks: what trained the model and left no state in it, by what its writer knew.
        chains: what each chain costs, oldest first; full checkpoints on which nothing stands are chains of one.
        advice: how often to save; None without a rate of failures, and where the saves do not say what they take.
        near: what became of near saves; None where there were none.
        near_now: what near saves of this host would give back now; None where they are not looked at.
    """

    url: str
    findings: tuple[Finding, ...]
    checkpoints: tuple[CheckpointSize, ...]
    leftovers: tuple[UnusableDirectory, ...]
    saves: tuple[SaveTimes, ...]
    newest: str | None
    damage: tuple[str, ...]
    tables: tuple[TableHealth, ...]
    deep: bool
    lacks: tuple[str, ...] = ()
    chains: tuple[ChainCost, ...] = ()
    advice: IntervalAdvice | None = None
    near: NearHealth | None = None
    near_now: NearNow | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether there is no problem; there may be warnings."""
        return all(finding.level != "problem" for finding in self.findings)

    def table(self, name: str) -> TableHealth:
        """Return a table by its name; KeyError where the newest checkpoint has none of it."""
        return {table.name: table for table in self.tables}[name]

    def to_dict(self) -> Mapping[str, Any]:
        """Return all of it as dicts, lists, numbers and strings, as ``--json`` has it."""
        return {"healthy": self.is_healthy, **asdict(self)}
