"""Checkpoints of a bank that go on while a run uses what it took of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.load.conf import Entry
from recckpt.load.live_state import LiveState
from recckpt.load.open_source import OpenSource
from recckpt.load.plan import resolve
from recckpt.load.problems import Problems
from recckpt.load.source import LocatedCheckpoint, locate_source
from recckpt.load.taken import Taken


class Followed:
    """A dynamic entry of a bank: the names that it gives, and the checkpoint that they were taken from.

    Args:
        entry: with the names that it wins.
        source: what was loaded just now.
        live: what it was loaded into.
    """

    def __init__(self, entry: Entry, source: LocatedCheckpoint, live: LiveState) -> None:
        self._entry, self._taken = entry, Taken(entry.only or frozenset(), source, live)

    def take(self, source: LocatedCheckpoint, live: LiveState) -> None:
        """Note that a checkpoint was loaded just now."""
        self._taken.take(source, live)

    def newer(self) -> LocatedCheckpoint | None:
        """Return the checkpoint that is there now, None where it is no newer than the one taken."""
        try:
            newest = locate_source(self._entry)
        except (CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError, OSError):
            return None  # a run that is being written or rotated; it is looked at again
        taken, there = self._taken.manifest, newest.checkpoint.manifest
        return newest if there.save_id != taken.save_id and there.place > taken.place else None

    def since_taken(self, newer: LocatedCheckpoint, live: LiveState) -> LocatedCheckpoint:
        """Return what to read of a newer checkpoint: its new links, if the tables are still as they were loaded."""
        return self._taken.since(newer, live)


def followed(live: LiveState, bank: Sequence[OpenSource]) -> list[Followed]:
    """Return the dynamic entries of a bank with the names that they win against the other entries."""
    if not any(source.at.entry.is_dynamic for source in bank):
        return []
    items = resolve(live.inventory, [source.offer(live.inventory) for source in bank], Problems())
    return [
        Followed(replace(source.at.entry, only=frozenset(i.name for i in items if i.offer == number)), source.at, live)
        for number, source in enumerate(bank)
        if source.at.entry.is_dynamic
    ]
