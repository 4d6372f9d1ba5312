"""Counts the outcomes of a saver's near saves: in total, since the last line of the timeline, and as metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Literal

from recckpt.output_dir.listing import Listing
from recckpt.save.save_info import SaveInfo
from recckpt.telemetry import measure

WhySkipped = Literal["under_way", "too_much_changed", "stopped"]


@dataclass(frozen=True)
class NearCounts:
    made: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class _SinceLine:
    made: int = 0
    failed: int = 0
    skipped: Mapping[WhySkipped, int] = field(default_factory=dict)
    steps: tuple[int, ...] = ()  # first and last step at which a near save was due
    gap_steps: int | None = None  # largest gap in steps between completed saves, near saves and checkpoints
    hosts: int | None = None  # of the newest completed near save
    copies: int | None = None
    blocked_sec: float = 0.0
    total_sec: float = 0.0
    n_bytes: int = 0
    error: str | None = None  # text of the newest failure

    def due(self, step: int | None) -> _SinceLine:
        steps = sorted({*self.steps, *([] if step is None else [step])})
        return replace(self, steps=tuple(steps[:1] + steps[1:][-1:]))


class NearTally:
    """Counts the near saves of one saver. Thread-safe: threads of training, near saves and checkpoints use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.counts, self._since = NearCounts(), _SinceLine()
        self._counted_step: int | None = None  # step of the newest completed save

    def go_on(self, step: int) -> None:
        with self._lock:
            self._counted_step = step

    def note_made(self, info: SaveInfo, hosts: int, copies: int) -> None:
        with self._lock:
            self.counts = replace(self.counts, made=self.counts.made + 1)
            before = self._since.due(info.step)
            self._since = replace(
                before,
                made=before.made + 1,
                hosts=hosts,
                copies=copies,
                blocked_sec=before.blocked_sec + info.max_blocked_sec,
                total_sec=before.total_sec + info.seconds,
                n_bytes=before.n_bytes + info.n_bytes,
            )
            self._note_counted(info.step)

    def note_failed(self, info: SaveInfo) -> None:
        with self._lock:
            self.counts = replace(self.counts, failed=self.counts.failed + 1)
            before = self._since.due(info.step)
            self._since = replace(before, failed=before.failed + 1, error=info.error_text)

    def note_skipped(self, step: int | None, why: WhySkipped) -> None:
        with self._lock:
            self.counts = replace(self.counts, skipped=self.counts.skipped + 1)
            before = self._since.due(step)
            skipped = {**before.skipped, why: before.skipped.get(why, 0) + 1}
            self._since = replace(before, skipped=skipped)

    def take(self, step: int | None) -> dict[str, Any]:
        """Return {"near": counts} for a checkpoint's line, or {} if no near save was due; then restart the counts."""
        with self._lock:
            self._note_counted(step)
            since, self._since = self._since, _SinceLine()
        if not since.steps:
            return {}
        values = vars(since) | {"blocked_sec": round(since.blocked_sec, 6), "total_sec": round(since.total_sec, 6)}
        return {"near": {name: value for name, value in values.items() if value is not None}}

    def _note_counted(self, step: int | None) -> None:
        if step is None:
            return
        before = self._counted_step
        if before is not None and step <= before:  # a near save may complete before an older checkpoint
            return
        if before is not None:
            self._since = replace(self._since, gap_steps=max(self._since.gap_steps or 0, step - before))
        self._counted_step = step


class NearMetrics:
    """Records metrics of one saver's near saves, on rank 0. Thread-safe. ``run`` names the job."""

    def __init__(self, run: str) -> None:
        self._run, self._newest_step = run, 0  # step of the newest near save of this process

    def due(self, info: SaveInfo, listing: Listing) -> None:
        """Record how many steps a crash would lose now. Called when a near save is due, whether or not it begins."""
        step = info.step or 0
        durable = listing.committed[-1].manifest.step or 0 if listing.committed else 0
        lags = {"lag": step - durable, "near.lag": step - max(durable, self._newest_step)}
        none = {"near.saves": 0, "near.failures": 0}  # creates the counters, so that Prometheus sees them increase
        measure(self._run, {name: max(0, lag) for name, lag in lags.items()} | none)

    def made(self, info: SaveInfo) -> None:
        self._newest_step = info.step or 0
        seconds = {"near.pause": info.blocked_sec, "near.duration": info.seconds, "near.last_save.time": time.time()}
        measure(self._run, {"near.saves": 1, "near.bytes": info.n_bytes, **seconds})

    def failed(self) -> None:
        measure(self._run, {"near.failures": 1})
