"""Decides whether a manager saves now, also while another save runs; and computes the best interval of saves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from recckpt.policies.when import Moment, When

Backpressure = Literal["wait", "skip", "latest"]
Kind = Literal["regular", "ephemeral"]
Agreed = Callable[[Callable[[], bool]], bool]  # calls the function on all ranks and returns one answer for all


@dataclass(frozen=True)
class SaveCounts:
    """How many saves of a manager had each outcome.

    Attributes:
        begun: saves that began.
        deltas: begun saves that were deltas.
        failed: saves that failed.
        waited: saves that waited for the previous save.
        skipped: saves that were due but omitted, because another was running.
        dropped: saves that were postponed, then dropped or replaced by a later save.
        near: near saves that completed.
        near_failed: near saves that failed, also for lack of space.
        near_skipped: near saves that were due but omitted, because another was running or too many rows had changed.
    """

    begun: int = 0
    deltas: int = 0
    failed: int = 0
    waited: int = 0
    skipped: int = 0
    dropped: int = 0
    near: int = 0
    near_failed: int = 0
    near_skipped: int = 0


class Trigger:
    """Decides when saves of one kind are due; does no I/O."""

    def __init__(self, when: When, start: Moment) -> None:
        self._when, self.last = when, start

    def restart(self, now: Moment) -> None:
        self.last = now

    def see(self, now: Moment) -> None:
        """Count from this event time if it is the first known one, or earlier than the last."""
        self.last = self._seen(now)

    def is_due(self, now: Moment, agreed: Agreed) -> bool:
        """Return whether a save is due, the same on all ranks; changes nothing."""
        ask = partial(self._when.due, now, self._seen(now))
        return ask() if self._when.same_on_all_ranks else agreed(ask)

    def _seen(self, now: Moment) -> Moment:
        last, here = self.last.event_time, now.event_time
        is_new = here is not None and (last is None or here < last)
        return replace(self.last, event_time=here) if is_new else self.last


class Schedule:
    """Decides whether to save now; does no I/O.

    Attributes:
        pending: the kind of the postponed save; None if no save is postponed.
    """

    def __init__(self, regular: When, ephemeral: When | None, backpressure: Backpressure, start: Moment) -> None:
        self._backpressure = backpressure
        self._triggers: dict[Kind, Trigger] = {"regular": Trigger(regular, start)}
        if ephemeral is not None:
            self._triggers["ephemeral"] = Trigger(ephemeral, start)
        self.pending: Kind | None = None
        self.counts = SaveCounts()

    def count(self, **more: int) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in more.items()})

    def start(self, now: Moment) -> None:
        for trigger in self._triggers.values():
            trigger.restart(now)
        self.pending = None

    def see(self, now: Moment) -> None:
        """Count from this event time if it is the first known one, or earlier than the last."""
        for trigger in self._triggers.values():
            trigger.see(now)

    def due(self, now: Moment, agreed: Agreed) -> Kind | None:
        """Return the kind of save that is due; ``agreed`` is for policies on which ranks may differ."""
        self.see(now)
        for kind, trigger in self._triggers.items():  # if both are due, the regular one is made
            if trigger.is_due(now, agreed):
                is_saved = now.step == self._triggers["regular"].last.step  # at the end of a window or an epoch
                return "regular" if is_saved else kind  # an ephemeral save would replace the regular one of this step
        return None

    def would_save(self, now: Moment, agreed: Agreed) -> bool:
        """Return whether a save of either kind is due; changes nothing."""
        return any(trigger.is_due(now, agreed) for trigger in self._triggers.values())

    def admit(self, due: Kind | None, is_running: Callable[[], bool]) -> Kind | None:
        """Return the kind of save to make now, given the due and the postponed save; None for no save.

        Args:
            due: the kind of save that is due.
            is_running: whether another save is running; the same on all ranks.
        """
        if due is None and self.pending is None:
            return None
        self.count(dropped=due is not None and self.pending is not None)
        kind: Kind = "regular" if "regular" in (due, self.pending) else "ephemeral"
        if not is_running():
            self.pending = None
            return kind
        if self._backpressure == "latest":
            self.pending = kind
        elif self._backpressure == "skip":
            self.count(skipped=1)
        else:
            self.count(waited=1)
            return kind
        return None

    def forget(self) -> bool:
        had_pending, self.pending = self.pending is not None, None
        self.count(dropped=had_pending)
        return had_pending

    def begun(self, kind: Kind, now: Moment) -> None:
        """Record that a save began: its interval restarts (for a regular save both), and no save is postponed now."""
        self.count(begun=1)
        self.missed(kind, now)

    def missed(self, kind: Kind, now: Moment) -> None:
        """Restart the interval after a save that could not begin, so that it is not retried at each step."""
        self.pending = None
        for made in self._triggers if kind == "regular" else [kind]:
            self._triggers[made].restart(now)


def best_interval(pause_sec: float, failure_sec: float) -> float:
    """Return the seconds between the begins of two saves that lose the least time, by Daly's formula.

    Failures come at random, at a steady rate. Sources: J. W. Young, "A first order approximation to the optimum
    checkpoint interval", Communications of the ACM 17(9), 1974; J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006,
    https://doi.org/10.1016/j.future.2004.11.016.

    Args:
        pause_sec: how long a save stops training; above 0.
        failure_sec: mean time between failures; above 0.
    """
    if pause_sec >= 2 * failure_sec:
        return failure_sec + pause_sec
    ratio = pause_sec / (2 * failure_sec)
    return math.sqrt(2 * pause_sec * failure_sec) * (1 + math.sqrt(ratio) / 3 + ratio / 9)


def lost_share(every_sec: float, pause_sec: float, total_sec: float, failure_sec: float) -> float:
    """Return the share of time lost to saves and failures, to first order; at most 1.

    Args:
        every_sec: seconds between the begins of two saves; above 0.
        pause_sec: how long a save stops training.
        total_sec: seconds from the begin of a save to its commit; a failure also loses the training of this time.
        failure_sec: mean time between failures; above 0.
    """
    return min(1.0, pause_sec / every_sec + (every_sec / 2 + total_sec) / failure_sec)
