"""Signals that ask a process to save before it ends: recorded on receipt, acted on between two steps."""

from __future__ import annotations

import os
import signal
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from recckpt.policies.options import OnSignal

_GO_ON = frozenset(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def goes_on(number: int) -> bool:
    """Return whether the process continues after this signal. SIGUSR1 and SIGUSR2 only ask for a save."""
    return number in _GO_ON


def most_urgent(numbers: Iterable[int | None]) -> int | None:
    """Return the signal to act on: the first one that ends the process, otherwise the first one."""
    return min((number for number in numbers if number is not None), key=goes_on, default=None)


class SignalWatch:
    """Records signals instead of delivering them, until released or garbage-collected. Only in the main thread.

    ValueError if a signal cannot be caught, or this is not the main thread.
    """

    def __init__(self, on_signal: OnSignal) -> None:
        note = _Note()  # has no reference to the watch, so that the watch can be collected
        self._note, self._has_ended = note, False
        self._give_back = weakref.finalize(self, note.give_back)
        self._give_back.atexit = False
        try:
            for number in on_signal.numbers:
                note.before[number] = signal.signal(number, note)
        except (OSError, TypeError, ValueError) as error:
            self._give_back()
            raise ValueError(
                f"save_on_signal={on_signal.signals!r}: {error}; name signals that can be caught, in the main thread"
            ) from error

    @property
    def is_watching(self) -> bool:
        return bool(self._note.before) and not self._note.is_over

    @property
    def is_ending(self) -> bool:
        """Whether a received signal, handled or not, will end the process, unless its previous handler prevents it."""
        return self._has_ended or not all(map(goes_on, tuple(self._note.noted)))

    def take(self) -> int | None:
        """Return the signal to act on, among the signals since the last call."""
        came = []
        while self._note.noted:  # one by one, because another may come meanwhile
            came.append(self._note.noted.popleft())
        self._has_ended = self._has_ended or not all(map(goes_on, came))
        return most_urgent(came)

    def follow(self, number: int) -> None:
        """Deliver a signal to its previous handler; do nothing for SIGUSR1 and SIGUSR2."""
        if not goes_on(number):
            self._give_back()
            signal.raise_signal(number)
            if os.getpid() == 1 and signal.getsignal(number) is signal.SIG_DFL:
                raise SystemExit(128 + number)  # by default no signal ends process 1, for example in a container

    def release(self, put_off: int | None = None) -> None:
        """Restore the previous signal handlers, then deliver any signal that was received but not yet acted on."""
        self._give_back()
        number = most_urgent((put_off, self.take()))
        if number is not None:
            self.follow(number)


class _Note:
    def __init__(self) -> None:
        self.noted: deque[int] = deque()
        self.before: dict[int, Any] = {}
        self.is_over = False
        self._pid = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.noted.append(number)
        else:  # a fork, such as a data loader's worker, does not act on signals
            self.give_back()
            signal.raise_signal(number)

    def give_back(self) -> None:
        """Restore the previous handlers, except if another handler has been set since."""
        self.is_over = True
        for number in self.before:
            present: Any = signal.getsignal(number)
            handler = self.before[number]
            while isinstance(handler, _Note) and handler.is_over:  # nothing reads the signals that this handler notes
                handler = handler.before[number]
            if present is self:
                with suppress(ValueError):  # a watch without references may be collected on any thread
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)
