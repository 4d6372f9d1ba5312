"""Save policies: pure objects that decide whether a save is due, by steps, windows, epochs, time or a predicate."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeGuard, runtime_checkable

from recckpt.types import positive_int, positive_number

Ends = Literal["step", "window", "epoch"]


@dataclass(frozen=True)
class Moment:
    """The progress of training at one time.

    Attributes:
        step: number of steps so far.
        seconds: time on the clock of the manager; only differences have a meaning.
        event_time: the latest time of an event in the data so far, in seconds since 1970 UTC; None if unknown.
        metrics: metrics that the caller passed at this step.
        windows: number of windows so far.
        epochs: number of epochs so far.
        ends: what has just ended: a step, a window or an epoch; a window or epoch ends after its last step.
    """

    step: int
    seconds: float
    event_time: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    windows: int = 0
    epochs: int = 0
    ends: Ends = "step"


@runtime_checkable
class When(Protocol):
    """Decides when a save is due; a class of your own must have these two members."""

    @property
    def same_on_all_ranks(self) -> bool:
        """Whether the answer depends on counts alone, so that all ranks have the same answer without communication."""

    def due(self, now: Moment, last: Moment) -> bool:
        """Return whether to save; pure.

        Args:
            now: the moment after a step, a window or an epoch.
            last: the moment of the last save, or of the start if this run has not saved yet.
        """


class _WhenOperators(When, Protocol):
    """Base class for the operator ``|``."""

    def __or__(self, other: When) -> AnyOf:
        return AnyOf(self, other)

    def __ror__(self, other: When) -> AnyOf:
        return AnyOf(other, self)


@dataclass(frozen=True)
class _Counted(_WhenOperators):
    n: int
    same_on_all_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive_int(f"{type(self).__name__}: n", self.n)


@dataclass(frozen=True)
class _Timed(_WhenOperators):
    seconds: float
    same_on_all_ranks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive_number(f"{type(self).__name__}: seconds", self.seconds)


@dataclass(frozen=True)
class EverySteps(_Counted):
    """Saves at every step that is a multiple of ``n``.

    Raises:
        ValueError: ``n`` is not an int of at least 1.
    """

    def due(self, now: Moment, last: Moment) -> bool:
        return now.ends == "step" and now.step % self.n == 0


@dataclass(frozen=True)
class AtSteps(_WhenOperators):
    """Saves at the given steps; the first step is 1.

    Raises:
        ValueError: ``steps`` is empty, or has an element that is not an int of at least 1.
    """

    steps: Sequence[int]
    same_on_all_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        try:
            steps = {positive_int("AtSteps: each of the steps", step) for step in self.steps}
        except TypeError:
            steps = set()
        if not steps:
            raise ValueError(f"AtSteps: steps must be one int or more, found {self.steps!r}")
        object.__setattr__(self, "steps", tuple(sorted(steps)))

    def due(self, now: Moment, last: Moment) -> bool:
        place = bisect_left(self.steps, now.step)
        return now.ends == "step" and now.step in self.steps[place : place + 1]


@dataclass(frozen=True)
class EveryWindows(_Counted):
    """Saves at the end of each n-th window; ``CheckpointManager.window`` counts windows.

    Raises:
        ValueError: ``n`` is not an int of at least 1.
    """

    def due(self, now: Moment, last: Moment) -> bool:
        return now.ends == "window" and now.windows % self.n == 0


@dataclass(frozen=True)
class EveryEpochs(_Counted):
    """Saves at the end of each n-th epoch; ``CheckpointManager.epoch`` counts epochs.

    Raises:
        ValueError: ``n`` is not an int of at least 1.
    """

    def due(self, now: Moment, last: Moment) -> bool:
        return now.ends == "epoch" and now.epochs % self.n == 0


@dataclass(frozen=True)
class EverySeconds(_Timed):
    """Saves once ``seconds`` have passed since the last save of any kind, or since the start.

    Raises:
        ValueError: ``seconds`` is not a finite number above 0.
    """

    def due(self, now: Moment, last: Moment) -> bool:
        return now.seconds - last.seconds >= self.seconds


@dataclass(frozen=True)
class EveryEventTime(_Timed):
    """Saves when the event time has passed a multiple of ``seconds`` since the last save: 3600 is every full hour, UTC.

    If the event time passes several multiples between two steps, one save is due. No save is due while the event time
    now or at the last save is unknown.

    Raises:
        ValueError: ``seconds`` is not a finite number above 0.
    """

    def due(self, now: Moment, last: Moment) -> bool:
        if now.event_time is None or last.event_time is None:
            return False
        return now.event_time // self.seconds > last.event_time // self.seconds


@dataclass(frozen=True)
class WhenTrue(_WhenOperators):
    """Saves whenever the predicate returns True; every rank calls it after each step, window and epoch.

    Raises:
        ValueError: ``predicate`` cannot be called.
    """

    predicate: Callable[[Moment], bool]
    same_on_all_ranks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise ValueError(f"WhenTrue: predicate must be a callable Moment -> bool, found {self.predicate!r}")

    def due(self, now: Moment, last: Moment) -> bool:
        return bool(self.predicate(now))


@dataclass(frozen=True, init=False, repr=False)
class AnyOf(_WhenOperators):
    """Saves when any of the policies is due; the same as ``a | b``.

    Raises:
        ValueError: there is no policy, or an argument is not a :class:`When`.
    """

    whens: tuple[When, ...]

    def __init__(self, *whens: When) -> None:
        if not whens or not all(map(_is_when, whens)):
            raise ValueError(f"AnyOf: expected one When or more, such as EverySteps(100), found {whens!r}")
        flat = [part for when in whens for part in (when.whens if isinstance(when, AnyOf) else (when,))]
        object.__setattr__(self, "whens", tuple(flat))

    @property
    def same_on_all_ranks(self) -> bool:
        return all(when.same_on_all_ranks for when in self.whens)

    def due(self, now: Moment, last: Moment) -> bool:
        return any(when.due(now, last) for when in self.whens)

    def __repr__(self) -> str:
        return f"AnyOf({', '.join(map(repr, self.whens))})"


def as_when(save_interval: int | When, name: str = "save_interval") -> When:
    """Return the policy for a number of steps, or a policy as it is; ValueError for anything else."""
    if _is_when(save_interval):
        return save_interval
    if type(save_interval) is int and save_interval >= 1:
        return EverySteps(save_interval)
    raise ValueError(
        f"{name} must be an int of at least 1, found {save_interval!r}; or an object with due() and "
        "same_on_all_ranks, such as recckpt.policies.when.EverySeconds(600)"
    )


def check_ephemeral(ephemeral: When, regular: When) -> None:
    """Raise ValueError if ephemeral checkpoints are not more frequent than regular ones: the regular replace them."""
    regulars = regular.whens if isinstance(regular, AnyOf) else (regular,)
    if any(_period(other) <= _period(ephemeral) for other in regulars if type(other) is type(ephemeral)):
        raise ValueError(
            f"ephemeral must be below save_interval, found {ephemeral!r} and {regular!r}: a regular checkpoint "
            "replaces earlier ephemeral ones, so these must be more frequent; omit ephemeral, or make it smaller"
        )


def _period(when: When) -> float:
    """Return the interval of a policy; NaN if the interval is unknown, because comparisons with NaN are False."""
    if isinstance(when, _Counted):
        return when.n
    return when.seconds if isinstance(when, _Timed) else math.nan


def _is_when(value: Any) -> TypeGuard[When]:
    return isinstance(value, When) and not isinstance(value, type)
