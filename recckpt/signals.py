"""Signals that ask a process to save before it ends: noted when they come, answered between two steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

_GO_ON = frozenset(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


class SignalWatch:
    """Notes signals instead of following them, until it is released. For the main thread alone.

    Args:
        signals: which ones; none leaves all as they are.

    Raises:
        ValueError: one of them is no signal that can be caught, or this is not the main thread.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self._noted: int | None = None
        self._before: dict[int, Any] = {}
        try:
            for number in signals:
                self._before[number] = signal.signal(number, self._note)
        except (OSError, TypeError, ValueError) as error:
            self.release()
            raise ValueError(
                f"save_on_signal={tuple(signals)!r}: {error}; name signals that can be caught, in the main thread"
            ) from error

    @property
    def is_watching(self) -> bool:
        """Whether there is a signal to wait for."""
        return bool(self._before)

    def take(self) -> int | None:
        """Return the signal that came since the last call, the last of several."""
        noted, self._noted = self._noted, None
        return noted

    def follow(self, number: int) -> None:
        """Do what a signal asks for: SIGUSR1 and SIGUSR2 only to save, the others what they did before the watch."""
        if number in _GO_ON:
            return
        self.release()
        os.kill(os.getpid(), number)

    def release(self) -> None:
        """Give all signals back what they did before."""
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
