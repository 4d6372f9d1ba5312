"""The last saves, from ``timeline.jsonl``, which people may have edited: a field that is wrong becomes None."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from recckpt.output_dir.timeline import read_timeline
from recckpt.storage import NOT_READABLE, Storage

NEAR = "near"  # the kind of a near save that has failed, which fails no checkpoint


@dataclass(frozen=True)
class NearTimes:
    """What became of the near saves between a checkpoint and the one before; what the line does not say is None or 0.

    Attributes:
        made: those that were acknowledged.
        failed: those that have failed.
        skipped: why -> those that were not begun.
        steps: the first and the last step at which one was due.
        gap_steps: the most from what counts, one of them or a checkpoint, to the next that does.
        hosts: how many hosts wrote the newest that was made.
        copies: how many other hosts have the files of each.
        blocked_sec: how long training stood still for all that were made.
        total_sec: from the step of each until it was acknowledged, for all of them.
        n_bytes: of their files, without copies.
        error: why the newest of those that failed did.
    """

    made: int
    failed: int
    skipped: Mapping[str, int]
    steps: tuple[int, int] | None
    gap_steps: int | None
    hosts: int | None
    copies: int | None
    blocked_sec: float | None
    total_sec: float | None
    n_bytes: float | None
    error: str | None = None

    @property
    def n_due(self) -> int:
        """How many were due."""
        return self.made + self.failed + sum(self.skipped.values())


@dataclass(frozen=True)
class SaveTimes:
    """A save by its line in ``timeline.jsonl``; what the line does not say, or says as no number, is None.

    Attributes:
        ckpt_id: the checkpoint.
        step: global step.
        kind: ``"full"`` or ``"delta"``.
        time: when it was committed, or failed.
        blocked_sec: how long training stood still, on the rank that waited longest.
        write_sec: writing all files of the slowest shard.
        commit_sec: making it visible and durable.
        total_sec: from the call to the end.
        n_bytes: of all files.
        n_rows: of all tables.
        error: why it failed; None where it has not.
        near: what became of the near saves before it; None where there were none.
    """

    ckpt_id: str | None
    step: int | None
    kind: str | None
    time: str | None
    blocked_sec: float | None
    write_sec: float | None
    commit_sec: float | None
    total_sec: float | None
    n_bytes: float | None
    n_rows: float | None
    error: str | None
    near: NearTimes | None = None


def saves_of(storage: Storage) -> list[SaveTimes]:
    """Return the saves, oldest first; [] without a timeline."""
    try:
        lines = read_timeline(storage)
    except NOT_READABLE:  # a directory in its place
        return []
    return [save_times(line) for line in lines if "ckpt_id" in line and line.get("kind") != NEAR]


def seconds_to_write(saves: Iterable[SaveTimes], n_bytes: int, n_checkpoints: int) -> float | None:
    """Return how long so many bytes in so many checkpoints take at the pace of saves; None where no line says it."""
    lines = [save for save in saves if save.n_bytes and save.write_sec and save.error is None]
    if not lines:
        return None
    rate = sum(save.n_bytes or 0 for save in lines) / sum(save.write_sec or 0 for save in lines)
    return n_bytes / rate + n_checkpoints * median(save.commit_sec or 0.0 for save in lines)


def save_times(line: Mapping[str, Any]) -> SaveTimes:
    """Return what a line says of its save."""
    step, longest, error = line.get("step"), _number(line.get("max_blocked_sec")), line.get("error")
    return SaveTimes(
        ckpt_id=_text(line.get("ckpt_id")),
        step=step if type(step) is int and abs(step) < 1 << 53 else None,
        kind=_text(line.get("kind")),
        time=_text(line.get("time")),
        blocked_sec=_number(line.get("blocked_sec")) if longest is None else longest,
        write_sec=_number(line.get("write_sec")),
        commit_sec=_number(line.get("commit_sec")),
        total_sec=_number(line.get("total_sec")),
        n_bytes=_number(line.get("n_bytes")),
        n_rows=_number(line.get("n_rows")),
        error=None if error is None else str(error),
        near=_near_times(line.get("near")),
    )


def _near_times(values: object) -> NearTimes | None:
    if not isinstance(values, Mapping):
        return None
    skipped, steps = values.get("skipped"), values.get("steps")
    whole = [step for step in steps if _count(step) is not None] if isinstance(steps, list) else []
    return NearTimes(
        made=_count(values.get("made")) or 0,
        failed=_count(values.get("failed")) or 0,
        skipped={why: _count(n) or 0 for why, n in skipped.items()} if isinstance(skipped, Mapping) else {},
        steps=(min(whole), max(whole)) if whole else None,
        gap_steps=_count(values.get("gap_steps")),
        hosts=_count(values.get("hosts")),
        copies=_count(values.get("copies")),
        blocked_sec=_number(values.get("blocked_sec")),
        total_sec=_number(values.get("total_sec")),
        n_bytes=_number(values.get("n_bytes")),
        error=_text(values.get("error")),
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _number(value: object) -> float | None:
    """Return a number that can be drawn, None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and 0 <= number < 1e18 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
