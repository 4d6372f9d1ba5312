"""What the hooks of adapters hold of a door: nothing that outlives it, is copied with a model, or pickled with it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from recckpt.types import Door


class WeakDoor:
    """A door for hooks, which modules and optimizers keep: once the door itself is dropped, it does nothing.

    A copy of it, as in a deep copy of a model, or one that was pickled, does nothing either.
    """

    def __init__(self, door: Door | None = None) -> None:
        self._door = None if door is None else weakref.ref(door)

    def announce(self, rows: Tensor) -> None:
        """As :meth:`recckpt.types.Door.announce`."""
        if (door := self._open) is not None:
            door.announce(rows)

    def announce_all(self) -> None:
        """As :meth:`recckpt.types.Door.announce_all`."""
        if (door := self._open) is not None:
            door.announce_all()

    def replaced(self) -> None:
        """As :meth:`recckpt.types.Door.replaced`."""
        if (door := self._open) is not None:
            door.replaced()

    def failed(self, error: Exception) -> None:
        """As :meth:`recckpt.types.Door.failed`."""
        if (door := self._open) is not None:
            door.failed(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakDoor:
        return WeakDoor()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakDoor, ()

    @property
    def _open(self) -> Door | None:
        return None if self._door is None else self._door()


class AnnounceAll:
    """A hook of whatever arguments which says that any row is about to change."""

    def __init__(self, door: WeakDoor) -> None:
        self._door = door

    def __call__(self, *args: Any) -> None:
        """Say it."""
        self._door.announce_all()
