"""How often a run would best save, by what its saves have taken and how often it fails (no torch here)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from recckpt.inspect.report.result import IntervalAdvice
from recckpt.inspect.save_times import SaveTimes
from recckpt.inspect.watch.history import History
from recckpt.policies.intervals import best_interval, lost_share
from recckpt.text import duration

_DAY_SEC = 86400.0


def advice_of(saves: Sequence[SaveTimes], failures_per_day: float) -> IntervalAdvice | None:
    """Return how often to save; None where the saves do not say how long they take.

    Args:
        saves: the last ones, oldest first, those that failed too.
        failures_per_day: how often the run fails; above 0.
    """
    history = History.of_committed(saves)
    pauses = [save.blocked_sec for save in history.last if save.blocked_sec is not None]
    totals = [save.total_sec for save in history.last if save.total_sec is not None]
    if not pauses or not totals or not statistics.median(pauses):
        return None
    pause_sec, total_sec = statistics.median(pauses), statistics.median(totals)
    failure_sec = _DAY_SEC / failures_per_day
    best_sec, every_sec = max(best_interval(pause_sec, failure_sec), total_sec), history.every_sec
    return IntervalAdvice(
        failures_per_day=failures_per_day,
        pause_sec=pause_sec,
        total_sec=total_sec,
        best_sec=best_sec,
        best_share=lost_share(best_sec, pause_sec, total_sec, failure_sec),
        every_sec=every_sec,
        every_share=None if every_sec is None else lost_share(every_sec, pause_sec, total_sec, failure_sec),
    )


def words_of(advice: IntervalAdvice) -> str:
    """Return it in one line."""
    failures = "one failure" if advice.failures_per_day == 1 else f"{advice.failures_per_day:g} failures"
    best = f"saving every {duration(advice.best_sec)} would cost {_percent(advice.best_share)} of the time"
    usual = ""
    if advice.every_sec is not None and advice.every_share is not None:
        usual = f"; you save every {duration(advice.every_sec)}, which costs {_percent(advice.every_share)}"
    measured = f"a save holds training up for {duration(advice.pause_sec)} and takes {duration(advice.total_sec)}"
    return f"at {failures} a day, {best}{usual} ({measured})"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
