"""How ranks reach each other: groups that are made when they are first used."""

from __future__ import annotations

import threading
from collections.abc import Callable

from recckpt.parallel.process_group import Group


class Connection:
    """Two ways for ranks to reach each other, made when first used: for the caller and for a thread. Thread-safe.

    Args:
        connect: makes the group of the caller. Collective where there are several ranks.
    """

    def __init__(self, connect: Callable[[], Group]) -> None:
        self._connect, self._lock = connect, threading.Lock()
        self._groups: tuple[Group, Group] | None = None

    @property
    def groups(self) -> tuple[Group, Group]:
        """The group of the caller, and one for a thread, which must not meet what the caller does meanwhile."""
        with self._lock:
            if self._groups is None:
                front = self._connect()
                self._groups = front, front.twin()
            return self._groups

    @property
    def is_lost(self) -> bool:
        """Whether a rank is known to be missing."""
        return self._groups is not None and self._groups[0].is_lost

    @property
    def is_over(self) -> bool:
        """Whether it belongs to a process group that has been destroyed."""
        return self._groups is not None and self._groups[0].is_over
