"""Rows of a live table that are saved as two tables: those that belong to an id, and the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from recckpt.live.hooks import WeakDoor
from recckpt.types import Door, LiveTable


class SharedRows:
    """A live table whose changes are announced to several doors; itself a door, for as long as a table has it.

    Args:
        live: the table.
    """

    def __init__(self, live: LiveTable) -> None:
        self.live = live
        self._doors: list[WeakDoor] = []
        self._detach: Callable[[], object] | None = None

    def attach(self, door: Door) -> Callable[[], object]:
        """Announce changes to one more door; return what ends that."""
        own = WeakDoor(door)
        self._doors.append(own)
        if self._detach is None:
            self._detach = self.live.attach(self)
        return partial(self._end, own)

    def announce(self, rows: Tensor) -> None:
        """As :meth:`recckpt.types.Door.announce`."""
        for door in self._doors:
            door.announce(rows)

    def announce_all(self) -> None:
        """As :meth:`recckpt.types.Door.announce_all`."""
        for door in self._doors:
            door.announce_all()

    def replaced(self) -> None:
        """As :meth:`recckpt.types.Door.replaced`."""
        for door in self._doors:
            door.replaced()

    def failed(self, error: Exception) -> None:
        """As :meth:`recckpt.types.Door.failed`; the first table fails the next save, which is one of all."""
        for number, door in enumerate(self._doors):
            if number:
                door.replaced()
            else:
                door.failed(error)

    def _end(self, door: WeakDoor) -> None:
        self._doors = [other for other in self._doors if other is not door]
        if not self._doors and self._detach is not None:
            self._detach()
            self._detach = None
