"""How a save went: what it was, where its time went, and why it failed."""

from __future__ import annotations

import json
import time as clock
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from recckpt.errors import NOTHING_COMMITTED, RankLostError, RecckptError, SaveFailedError
from recckpt.format.manifest import Manifest
from recckpt.format.moments import time_now
from recckpt.parallel.ranks import Ranks
from recckpt.text import one_line

_LEFT_OUT = frozenset({"path", "metrics", "outcome"})  # in the file, which lies beside the checkpoints
_ERROR_LENGTH = 1000  # characters of an error that a line keeps


@dataclass(frozen=True)
class OutcomeWords:
    """What the error of a save says of its outcome.

    Attributes:
        failed: where a rank failed.
        lost: where a rank is missing before there was anything to commit.
        is_open: where one is missing, and this rank cannot know whether rank 0 has committed.
        is_committed: where one is missing, and rank 0, which this is, has committed.
    """

    failed: str
    lost: str
    is_open: str
    is_committed: str


_OF_CHECKPOINTS = OutcomeWords(
    failed=NOTHING_COMMITTED,
    lost="nothing was committed and older checkpoints are untouched: restart the job",
    is_open="it is committed only if all ranks had written, which the restarted job will find",
    is_committed="the checkpoint is committed all the same: restart the job, which goes on from it",
)
_OF_NEAR_SAVES = OutcomeWords(
    failed="no near save was made; training goes on",
    lost="no near save was made",
    is_open="it was made only if all hosts had sealed it, which a restarted job will find",
    is_committed="the near save was made all the same",
)


@dataclass
class CommitState:
    """What is known of a save when a rank turns out to be missing.

    Attributes:
        words: for what is known.
        is_open: rank 0 may have all that it needs to commit, and this is another rank.
        is_committed: rank 0 has.
    """

    words: OutcomeWords = _OF_CHECKPOINTS
    is_open: bool = False
    is_committed: bool = False

    @classmethod
    def of_near_save(cls) -> CommitState:
        """Return that of a near save, which commits nothing and never ends training."""
        return cls(_OF_NEAR_SAVES)

    def note_open(self, rank: int) -> None:
        """Note that a rank begins to write: what becomes of the save then, other ranks than 0 may not learn."""
        self.is_open = rank != 0

    def note_committed(self) -> None:
        """Note that rank 0, which this is, has committed."""
        self.is_committed = True

    def __str__(self) -> str:
        if self.is_committed:
            return self.words.is_committed
        return self.words.is_open if self.is_open else self.words.lost


@dataclass(frozen=True)
class RankTimes:
    """Times and bytes of a rank's part of a save; ``blocked_sec`` of a blocking one ends when it has written."""

    stage_sec: float
    blocked_sec: float
    write_sec: float
    n_bytes: int


@dataclass(frozen=True)
class SaveTotals:
    """What all ranks together wrote in a save, and the longest times; most have the names that SaveInfo has."""

    n_bytes: int
    n_rows: int
    n_upserts: int
    n_deletes: int
    n_left_out: int
    n_evicted: int
    kept_rows: int
    write_sec: float
    slowest_shard: int
    max_stage_sec: float
    max_rank_bytes: int
    max_blocked_sec: float  # up to where each rank had written, of a blocking save


@dataclass
class SaveInfo:
    """One save, as it went so far.

    Attributes:
        ckpt_id: the checkpoint.
        step: global step, None where the caller counts none.
        ephemeral: whether only the newest of its kind stays.
        background: whether training went on meanwhile.
        kind: ``"full"``, ``"delta"``: what has changed since another checkpoint, or ``"near"`` of a near save.
        why_full: where the saver writes deltas, why this is not one.
        n_links: of the chain that a restore reads: 1 of a full checkpoint.
        stage_sec: taking the state; training stands still.
        write_sec: writing all files of the slowest shard.
        agree_sec: waiting for the other ranks.
        commit_sec: making the checkpoint visible and durable.
        rotate_sec: index file and rotation.
        n_bytes: of all files.
        n_rows: of all tables, whether they were written or had not changed.
        n_upserts: rows that were written.
        n_deletes: ids that were written as deleted.
        n_left_out: rows of the tables that ``save_where`` leaves out.
        largest_errors: slots that ``store`` makes narrower -> by how much a value of the checkpoint is off at most.
        n_evicted: rows that policies of the tables have evicted since the tables were made, on all ranks.
        kept_rows: rows that were copied aside, on all ranks, because training changed them meanwhile.
        slowest_shard: the shard that wrote longest, the number of its rank.
        max_stage_sec: ``stage_sec`` of the slowest rank.
        max_rank_bytes: what the rank that wrote most has written.
        path: where the checkpoint lies, a path or URL; empty until it is committed.
        metrics: the numbers of its ``state``, once it is committed.
        outcome: what is known of it where a rank turns out to be missing.
        error: why it failed, None where it has not. A save may be committed and fail all the same: it has a path then.
    """

    ckpt_id: str
    step: int | None = None
    ephemeral: bool = False
    background: bool = False
    kind: str = "full"
    why_full: str | None = None
    n_links: int = 1
    stage_sec: float = 0.0
    write_sec: float = 0.0
    agree_sec: float = 0.0
    commit_sec: float = 0.0
    rotate_sec: float = 0.0
    n_bytes: int = 0
    n_rows: int = 0
    n_upserts: int = 0
    n_deletes: int = 0
    n_left_out: int = 0
    n_evicted: int = 0
    kept_rows: int = 0
    slowest_shard: int = 0
    max_stage_sec: float = 0.0
    max_rank_bytes: int = 0
    time: str = ""
    path: str = ""
    largest_errors: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None
    outcome: CommitState = field(default_factory=CommitState, repr=False)
    _begin: float = field(default_factory=clock.perf_counter, repr=False)
    _blocked_sec: float | None = field(default=None, repr=False)
    _others_blocked_sec: float = field(default=0.0, repr=False)

    def failure(self, rank: int, cause: str) -> SaveFailedError:
        """Return the error of this save where a rank failed."""
        return SaveFailedError(self.ckpt_id, rank, cause, step=self.step, outcome=self.outcome.words.failed)

    def raising(self, ranks: Ranks, before: Callable[[], RecckptError | None] = lambda: None) -> Ranks:
        """Return the ranks, of which one that fails or is missing is the failure of this save.

        Where one is missing, the error of ``before`` goes first: that of an earlier save.
        """

        def lost(error: RankLostError) -> RecckptError:
            earlier = before()
            if earlier is not None:
                return earlier
            known = "the rank is lost" if len(error.ranks) == 1 else f"ranks {list(error.ranks)} lost"
            cause, outcome = f"{known}: {error.cause}", str(self.outcome)
            return SaveFailedError(self.ckpt_id, error.rank, cause, step=self.step, outcome=outcome)

        return ranks.raising(self.failure, lost)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the seconds of a block to a phase, such as ``stage``."""
        begin = clock.perf_counter()
        try:
            yield
        finally:
            name = f"{phase}_sec"
            setattr(self, name, getattr(self, name) + clock.perf_counter() - begin)

    def note_unblocked(self) -> None:
        """Note that the caller of ``save`` goes on now; the first time counts."""
        self._blocked_sec = self.blocked_sec

    @property
    def blocked_sec(self) -> float:
        """How long the caller of ``save`` waited for it, a save before it included."""
        return self.seconds if self._blocked_sec is None else self._blocked_sec

    @property
    def max_blocked_sec(self) -> float:
        """``blocked_sec`` of the rank that waited longest, known once all have written; of a blocking save its own."""
        return max(self.blocked_sec, self._others_blocked_sec)

    def note_step(self, step: int | None) -> None:
        """Note the global step, as the manager of the run counts it."""
        self.step = step

    def note_links(self, n_links: int) -> None:
        """Note how many links a restore will read: fewer where a compacted form was adopted."""
        self.n_links = n_links

    def note_failure(self, error: Exception) -> None:
        """Note why and when it has failed; one that is committed keeps the time of its commit."""
        self.error, self.time = error, self.time or time_now()

    def note_path(self, path: str) -> None:
        """Note where the checkpoint lies, though its save fails; "" where it may not be there."""
        self.path = path

    def note_waiting(self, commit_sec: float, agree_sec: float) -> None:
        """Note how long rank 0 took to commit, and how long this rank waited besides."""
        self.commit_sec, self.agree_sec = commit_sec, max(0.0, agree_sec)

    def note_kind(self, kind: str, why_full: str | None, n_links: int) -> None:
        """Note whether it is full or a delta, and how many links a restore will read."""
        self.kind, self.why_full, self.n_links = kind, why_full, n_links

    def note_written(self, totals: SaveTotals) -> None:
        """Note what all ranks have written."""
        self.n_rows, self.n_upserts, self.n_deletes = totals.n_rows, totals.n_upserts, totals.n_deletes
        self.n_left_out, self.n_evicted, self.kept_rows = totals.n_left_out, totals.n_evicted, totals.kept_rows
        self.write_sec, self.slowest_shard = totals.write_sec, totals.slowest_shard
        self.max_stage_sec, self.max_rank_bytes = totals.max_stage_sec, totals.max_rank_bytes
        self._others_blocked_sec = totals.max_blocked_sec

    def note_acknowledged(self, totals: SaveTotals) -> None:
        """Note what all ranks have written of a near save, which counts now."""
        self.note_written(totals)
        self.n_bytes = totals.n_bytes

    def note_committed(self, manifest: Manifest, totals: SaveTotals, path: str) -> None:
        """Note what all ranks have written, where the checkpoint lies, and what its manifest says of it."""
        self.note_written(totals)
        self.time, self.n_bytes, self.path = manifest.time, totals.n_bytes, path
        self.largest_errors = {
            f"{table.name}@{narrowed.slot}": narrowed.error
            for table in manifest.tables
            for narrowed in (table.reduced.narrowed if table.reduced else ())
        }
        self.metrics = {name: float(v) for name, v in manifest.state.items() if isinstance(v, int | float)}

    @property
    def seconds(self) -> float:
        """Seconds since the save was asked for."""
        return clock.perf_counter() - self._begin

    @property
    def error_text(self) -> str | None:
        """Why it failed, in one line; None where it has not."""
        error = self.error
        return None if error is None else one_line(f"{type(error).__name__}: {error}")[:_ERROR_LENGTH]

    def to_json(self, more: Mapping[str, Any] = {}) -> str:
        """Return one line for the timeline, with more fields; ``error`` is in those of saves that failed."""
        values = {
            name: value for name, value in vars(self).items() if not name.startswith("_") and name not in _LEFT_OUT
        }
        seconds = self.seconds
        values |= {"blocked_sec": min(self.blocked_sec, seconds), "total_sec": seconds}
        values["max_blocked_sec"] = max(values["blocked_sec"], self._others_blocked_sec)
        values["gb_per_sec"] = self.n_bytes / 1e9 / max(seconds, 1e-9)
        del values["error"]
        if self.error_text is not None:
            values["error"] = self.error_text
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
        return json.dumps(rounded | dict(more), allow_nan=False) + "\n"
