"""The course of a save: what was saved, the time of each phase, the error; and its line in the timeline."""

from __future__ import annotations

import json
import logging
import math
import time as clock
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from recckpt.errors import NOTHING_COMMITTED, RankLostError, RecckptError, SaveFailedError, WriterFencedError
from recckpt.format.codec import time_now
from recckpt.format.manifest import NOT_FINITE, Manifest
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.index_file import ENDED, append_timeline
from recckpt.parallel.ranks import Ranks
from recckpt.storage import Storage
from recckpt.storage.retry import is_transient
from recckpt.text import one_line

_LEFT_OUT = frozenset({"path", "words", "outcome"})  # not in the timeline, a file beside the checkpoints
_ERROR_LENGTH = 1000  # characters of an error in a line
log = logging.getLogger("recckpt")
_END_SEC = 5.0  # short, because nothing depends on the line that a run has ended
_MOST = 100  # kept lines; the oldest are dropped


@dataclass(frozen=True)
class OutcomeWords:
    """The sentences on the outcome of a save for its error messages.

    Attributes:
        failed: a rank failed.
        lost: a rank was lost before there was anything to commit.
        is_open: a rank was lost, and this rank cannot know whether rank 0 has committed.
        is_committed: a rank was lost, and this rank, rank 0, has committed.
    """

    failed: str = NOTHING_COMMITTED
    lost: str = "nothing was committed and older checkpoints are untouched: restart the job"
    is_open: str = "it is committed only if all ranks had written: the restarted job will find out"
    is_committed: str = "the checkpoint is committed nevertheless: restart the job, which continues from it"


@dataclass
class SaveInfo:
    """The course of one save so far.

    Attributes:
        ckpt_id: name of the checkpoint.
        global step, None if the caller counts no steps.
        ephemeral: whether the checkpoint is kept only while it is the newest.
        background: whether training continued during the save.
        kind: ``"full"``; ``"delta"``: the changes since another checkpoint; or ``"near"`` for a near save.
        why_full: if the saver writes deltas, why this save is not a delta.
        n_links: number of checkpoints in the chain that a restore reads; 1 for a full save.
        stage_sec: time to take the state, while training waits.
        write_sec: time to write all files of the slowest shard.
        agree_sec: time spent waiting for the other ranks.
        commit_sec: time to make the checkpoint visible and durable.
        rotate_sec: time for the index file and rotation.
        n_bytes: bytes of all files.
        n_rows: rows of all tables, including unchanged rows that were not written.
        n_upserts: number of rows written.
        n_deletes: number of ids written as deleted.
        n_left_out: rows of the tables that ``Choose(where=...)`` leaves out.
        largest_errors: slot that ``store`` saves in a narrower dtype -> largest rounding error of a value.
        n_evicted: rows evicted since the tables were made, on all ranks.
        kept_rows: rows copied aside, on all ranks, because training changed them during the save.
        slowest_shard: rank whose shard took longest to write.
        max_stage_sec: ``stage_sec`` of the slowest rank.
        max_rank_bytes: bytes of the rank that wrote the most.
        path: path or URL of the checkpoint; empty until it is committed.
        metrics: the numbers in ``state``, once the save is committed.
        words: the sentences on the outcome for error messages.
        outcome: the sentence that is true if a rank is lost now; None before this save writes.
        error: why the save failed; None if it has not. A save can fail after its commit; then ``path`` is set.
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
    words: OutcomeWords = field(default=OutcomeWords(), repr=False)
    outcome: str | None = field(default=None, repr=False)
    _begin: float = field(default_factory=clock.perf_counter, repr=False)
    _blocked_sec: float | None = field(default=None, repr=False)
    _others_blocked_sec: float = field(default=0.0, repr=False)  # until every rank had written

    def failure(self, rank: int, cause: str) -> SaveFailedError:
        """Internal: return the error of this save if a rank failed."""
        return SaveFailedError(self.ckpt_id, rank, cause, step=self.step, outcome=self.words.failed)

    def raising(self, ranks: Ranks, before: Callable[[], RecckptError | None] = lambda: None) -> Ranks:
        """Internal: return the ranks, set up to raise errors of this save if a rank fails or is lost.

        If a rank is lost and ``before`` returns the error of an earlier save, that error is raised instead.
        """

        def lost(error: RankLostError) -> RecckptError:
            earlier = before()
            if earlier is not None:
                return earlier
            known = "the rank is lost" if len(error.ranks) == 1 else f"ranks {list(error.ranks)} lost"
            cause, outcome = f"{known}: {error.cause}", self.outcome or self.words.lost
            return SaveFailedError(self.ckpt_id, error.rank, cause, step=self.step, outcome=outcome)

        return ranks.raising(self.failure, lost)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Internal: add the duration of the ``with`` block to a phase, such as ``stage``."""
        begin = clock.perf_counter()
        try:
            yield
        finally:
            name = f"{phase}_sec"
            setattr(self, name, getattr(self, name) + clock.perf_counter() - begin)

    def note_unblocked(self) -> None:
        """Internal: note that the caller of ``save`` continues now; only the first call has an effect."""
        self._blocked_sec = self.blocked_sec

    @property
    def blocked_sec(self) -> float:
        """How long the caller of ``save`` waited, including for the previous save."""
        return self.seconds if self._blocked_sec is None else self._blocked_sec

    @property
    def max_blocked_sec(self) -> float:
        """``blocked_sec`` of the slowest rank, once all ranks have written; in a blocking save, of this rank."""
        return max(self.blocked_sec, self._others_blocked_sec)

    def note(self, **values: Any) -> None:
        """Internal: set fields by name."""
        assert values.keys() <= vars(self).keys(), values
        vars(self).update(values)

    def note_failure(self, error: Exception) -> None:
        """Internal: note why and when the save failed. A committed save keeps the time of its commit."""
        self.error, self.time = error, self.time or time_now()

    def note_committed(self, manifest: Manifest) -> None:
        """Internal: note time, metrics and rounding errors from the manifest."""
        self.time = manifest.time
        self.largest_errors = {
            f"{table.name}@{narrowed.slot}": narrowed.error
            for table in manifest.tables
            for narrowed in (table.reduced.narrowed if table.reduced else ())
        }
        numbers = {name: v for name, v in manifest.state.items() if isinstance(v, int | float) or v in NOT_FINITE}
        self.metrics = {name: float(value) for name, value in numbers.items()}

    @property
    def seconds(self) -> float:
        """Seconds since the save was requested."""
        return clock.perf_counter() - self._begin

    @property
    def error_text(self) -> str | None:
        """Why the save failed, in one line; None if it has not."""
        error = self.error
        return None if error is None else one_line(f"{type(error).__name__}: {error}")[:_ERROR_LENGTH]

    def to_json(self, more: Mapping[str, Any] = {}) -> str:
        """Internal: return one line for the timeline, with the fields of ``more``; only failed saves have ``error``."""
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
        values["metrics"] = {name: v if math.isfinite(v) else str(v) for name, v in self.metrics.items()}
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
        return json.dumps(rounded | dict(more), allow_nan=False) + "\n"


class Timeline:
    """The lines of one saver's timeline, one per save. A line that cannot be written is kept for the next write.

    Only one thread at a time may add lines, except by :meth:`keep`, for example for a failed near save.
    """

    def __init__(self) -> None:
        self._more = list[Callable[[int | None], Mapping[str, Any]]]()
        self._waiting: list[str] = []
        self._changing = Lock()

    def bring_along(self, more: Callable[[int | None], Mapping[str, Any]]) -> None:
        """Add the fields that ``more`` returns for a step to the line of each checkpoint."""
        self._more.append(more)

    def add(self, storage: Storage, info: SaveInfo) -> None:
        """Write the line of a committed save.

        Raises:
            OSError: the storage failed; the line is written with the next one.
        """
        self.keep(info, {name: value for more in self._more for name, value in more(info.step).items()})
        self._write(storage)

    def keep(self, info: SaveInfo, more: Mapping[str, Any] = {}) -> None:
        """Keep a line, to be written with the next line."""
        with self._changing:
            self._waiting = [*self._waiting, info.to_json(more)][-_MOST:]

    def add_failure(self, storage: Storage, fence: Fence, info: SaveInfo) -> None:
        """Write the line of a failed save, if this process holds the output dir; raises nothing.

        After a network error the line is only kept, because writing it could delay the error by minutes.
        """
        if isinstance(info.error, WriterFencedError):
            return
        self.keep(info)
        if info.error is None or not is_transient(info.error):
            self._write_if_owned(storage, fence)

    def add_end(self, storage: Storage, fence: Fence, step: int) -> None:
        """Write a line that training ended successfully at this step, if this process holds the output dir."""
        with self._changing:
            line = {"ckpt_id": None, "kind": ENDED, "step": step, "time": time_now()}
            self._waiting.append(json.dumps(line) + "\n")
        with storage.giving_up_after(_END_SEC):
            self._write_if_owned(storage, fence, logging.WARNING)

    def _write_if_owned(self, storage: Storage, fence: Fence, level: int = logging.DEBUG) -> None:
        if not fence.epoch:
            return
        try:
            fence.check()
            self._write(storage)
        except (RecckptError, OSError) as error:
            log.log(level, "%s: the timeline lacks its last lines: %s", storage.url, error)

    def _write(self, storage: Storage) -> None:
        written = self._waiting
        append_timeline(storage, written)
        with self._changing:
            self._waiting = [line for line in self._waiting if line not in written]
