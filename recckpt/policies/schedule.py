"""Decides whether a manager saves after a step, and what it does while a save is under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from recckpt.policies.when import Moment, When

Backpressure = Literal["wait", "skip", "latest"]
Kind = Literal["regular", "ephemeral"]


@dataclass
class SaveCounts:
    """What became of the saves of a manager.

    Attributes:
        begun: saves that began.
        deltas: those of them that were deltas.
        failed: saves that failed.
        waited: saves that waited for the one before.
        skipped: saves that were due but omitted, because one was under way.
        dropped: saves that were put off, and replaced by a later one.
    """

    begun: int = 0
    deltas: int = 0
    failed: int = 0
    waited: int = 0
    skipped: int = 0
    dropped: int = 0


class Schedule:
    """Decides whether to save after a step; touches no disk.

    Args:
        regular: when checkpoints are due that the keep policy chooses among.
        ephemeral: when those are due of which only the newest stays; None for never.
        clock: seconds; only differences count.
        backpressure: what to do when a save is due while one is under way.

    Raises:
        ValueError: ``backpressure`` is not one of the three.
    """

    def __init__(
        self, regular: When, ephemeral: When | None, clock: Callable[[], float], backpressure: Backpressure
    ) -> None:
        if backpressure not in get_args(Backpressure):
            raise ValueError(f"backpressure must be one of {get_args(Backpressure)}, found {backpressure!r}")
        self._backpressure = backpressure
        self._whens: dict[Kind, When] = {"regular": regular}
        if ephemeral is not None:
            self._whens["ephemeral"] = ephemeral
        self._clock = clock
        self._last: dict[Kind, Moment] = {}
        self._pending: Kind | None = None
        self.counts = SaveCounts()
        self.start(0, None)

    def start(self, step: int, event_time: float | None) -> None:
        """Begin to count from here, as after a restore."""
        self._last = dict.fromkeys(self._whens, Moment(step, self._clock(), event_time))
        self._pending = None

    def due(
        self,
        step: int,
        event_time: float | None,
        metrics: Mapping[str, float],
        agreed: Callable[[Callable[[], bool]], bool],
    ) -> Kind | None:
        """Return the kind of save that is due.

        Args:
            step: steps so far.
            event_time: the latest so far.
            metrics: what the caller measured.
            agreed: asks all ranks and returns one answer, for policies on which they may differ.
        """
        now = Moment(step, self._clock(), event_time, metrics)
        for kind, last in self._last.items():
            if last.event_time is None and event_time is not None:
                self._last[kind] = replace(last, event_time=event_time)
        for kind, when in self._whens.items():  # where both are due, the regular one is made
            ask = partial(when.due, now, self._last[kind])
            if ask() if when.same_on_all_ranks else agreed(ask):
                return kind
        return None

    def admit(self, due: Kind | None, is_running: Callable[[], bool]) -> Kind | None:
        """Return what to save now, of what is due and what was put off.

        Args:
            due: the kind that is due at this step.
            is_running: whether a save is under way, the same on all ranks.
        """
        if due is None and self._pending is None:
            return None
        self.counts.dropped += due is not None and self._pending is not None
        wanted: Kind = "regular" if "regular" in (due, self._pending) else "ephemeral"
        if not is_running():
            self._pending = None
            return wanted
        if self._backpressure == "latest":
            self._pending = wanted
        elif self._backpressure == "skip":
            self.counts.skipped += 1
        else:
            self.counts.waited += 1
            return wanted
        return None

    @property
    def pending(self) -> Kind | None:
        """The kind of save that was put off."""
        return self._pending

    def forget(self) -> bool:
        """Drop a save that was put off, and say whether there was one."""
        had_pending, self._pending = self._pending is not None, None
        self.counts.dropped += had_pending
        return had_pending

    def begun(self, kind: Kind, step: int, event_time: float | None) -> None:
        """Take note of a save; a regular one counts for the ephemeral ones too, and either for what was put off."""
        self.counts.begun += 1
        self._pending = None
        now = Moment(step, self._clock(), event_time)
        self._last |= dict.fromkeys(self._whens if kind == "regular" else [kind], now)
