"""Signals that ask a process to save before it ends: noted when they come, answered between two steps."""

from __future__ import annotations

import signal
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

_GO_ON = frozenset(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def goes_on(number: int) -> bool:
    """Say whether a process goes on after a signal: SIGUSR1 and SIGUSR2 only ask for a save."""
    return number in _GO_ON


def most_urgent(numbers: Iterable[int | None]) -> int | None:
    """Return the signal to answer, of those that came: the first that ends the process, else the first."""
    return min((number for number in numbers if number is not None), key=goes_on, default=None)


class SignalWatch:
    """Notes signals instead of following them, until it is released or forgotten. For the main thread alone.

    Args:
        signals: which ones; none leaves all as they are.

    Raises:
        ValueError: one of them is no signal that can be caught, or this is not the main thread.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        noted: deque[int] = deque()
        before: dict[int, Any] = {}

        def note(number: int, frame: FrameType | None) -> None:  # refers to no watch, so that a watch may be forgotten
            noted.append(number)

        self._noted, self._before = noted, before
        self._give_back = weakref.finalize(self, _give_back, before, note)
        self._give_back.atexit = False
        try:
            for number in dict.fromkeys(signals):
                before[number] = signal.signal(number, note)
        except (OSError, TypeError, ValueError) as error:
            self._give_back()
            raise ValueError(
                f"save_on_signal={signals!r}: {error}; name signals that can be caught, in the main thread"
            ) from error

    @property
    def is_watching(self) -> bool:
        """Whether there is a signal to wait for."""
        return bool(self._before)

    def take(self) -> int | None:
        """Return the signal to answer, of those that came since the last call."""
        came = []
        while self._noted:  # one by one: another may come meanwhile
            came.append(self._noted.popleft())
        return most_urgent(came)

    def follow(self, number: int) -> None:
        """Do what a signal asks for: SIGUSR1 and SIGUSR2 only to save, the others what they did before the watch."""
        if not goes_on(number):
            self._give_back()
            signal.raise_signal(number)

    def release(self) -> None:
        """Give all signals back what they did before, and follow one that came and has not been answered."""
        self._give_back()
        number = self.take()
        if number is not None:
            self.follow(number)


def _give_back(before: dict[int, Any], note: Any) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is note:
            with suppress(ValueError):  # a watch that was forgotten may be collected on any thread
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    before.clear()
