"""Where near saves go, as a user gives it to a saver."""

from __future__ import annotations

import os
from dataclasses import dataclass

from recckpt.policies.when import When, as_when
from recckpt.types import byte_count, positive_number


@dataclass(frozen=True)
class Near:
    """Near saves: what has changed since the newest checkpoint, on the host itself, every few steps; docs/near.md.

    They make a restore after the death of processes newer, and never take the place of a checkpoint.

    Args:
        path: a directory of this host, such as one below ``/dev/shm``. Ranks that see the same one are on one host.
        interval: when a manager makes them, between its checkpoints; steps or a policy of :mod:`recckpt.policies.when`.
            Where there is no checkpoint yet to count from, one is made in their place. None makes none: those that are
            there are restored.
        max_bytes: how much near saves of one output dir may take there, such as ``"16GiB"``: three times as much as the
            largest; None for as much as there is. One that does not fit is not made, and a warning says so.
        timeout_sec: how long ranks wait for each other in a near save.
        copies: how many other hosts get a copy of what a host writes, so that a near save outlives it; None for one
            where the ranks are on several hosts. With too few hosts there are fewer, and a warning says so once.

    Raises:
        ValueError: an argument is invalid.
    """

    path: str | os.PathLike[str]
    interval: int | When | None = None
    max_bytes: int | str | None = None
    timeout_sec: float = 60.0
    copies: int | None = None

    def __post_init__(self) -> None:
        path = self.path
        if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "://" in str(path) or "\0" in str(path):
            raise ValueError(f"Near: path must be a directory of this host, found {path!r}")
        _ = self.when
        if self.max_bytes is not None:
            byte_count("Near: max_bytes", self.max_bytes)
        positive_number("Near: timeout_sec", self.timeout_sec)
        if self.copies is not None and (type(self.copies) is not int or self.copies < 0):
            raise ValueError(f"Near: copies must be an int of at least 0, or None, found {self.copies!r}")

    @property
    def when(self) -> When | None:
        """``interval`` as a policy."""
        return None if self.interval is None else as_when(self.interval, "Near: interval")

    @property
    def most_bytes(self) -> int | None:
        """``max_bytes`` as a number."""
        return None if self.max_bytes is None else byte_count("Near: max_bytes", self.max_bytes)


def check_near(near: object, *, has_deltas: bool) -> None:
    """Refuse what is no place for near saves, and a saver without deltas.

    Raises:
        TypeError: it is neither None nor a :class:`Near`.
        ValueError: the saver writes no deltas, so that it has no marks of what changed.
    """
    if near is None:
        return
    if not isinstance(near, Near):
        raise TypeError(f"near must be a recckpt.Near, or None, found {near!r:.100}")
    if not has_deltas:
        raise ValueError("near= is for savers that write deltas, found deltas=False: give deltas=True, or omit near=")
