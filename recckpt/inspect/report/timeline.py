"""The last saves, by the lines of ``timeline.jsonl``, which anybody may have touched (no torch here)."""

from __future__ import annotations

import math
from typing import Any

from recckpt.inspect.report.result import SaveTimes
from recckpt.output_dir.timeline import read_timeline
from recckpt.storage import NOT_READABLE, Storage


def saves_of(storage: Storage) -> list[SaveTimes]:
    """Return the saves, oldest first; [] without a timeline."""
    try:
        lines = read_timeline(storage)
    except NOT_READABLE:  # a directory in its place
        return []
    return [_save(line) for line in lines if "ckpt_id" in line]


def _save(line: dict[str, Any]) -> SaveTimes:
    step, longest = line.get("step"), _number(line.get("max_blocked_sec"))
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
        error=_text(line.get("error")),
    )


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
