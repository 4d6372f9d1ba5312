"""A checkpoint whose rows were loaded into tables, and what is to be read of a newer one, if they are still its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from recckpt.format.names import ID, Name, slot_name
from recckpt.load.live_state import LiveState
from recckpt.load.source import LocatedCheckpoint
from recckpt.sparse.table.table import HashTable
from recckpt.sparse.table.tracker import Tracker


class Taken:
    """What was loaded last of a run that goes on. Not thread-safe.

    Args:
        names: the names of the model that are loaded from it.
        source: what was loaded just now.
        live: what it was loaded into.
    """

    def __init__(self, names: Collection[Name], source: LocatedCheckpoint, live: LiveState) -> None:
        self._names, self._tracker = names, Tracker()
        self.take(source, live)

    def take(self, source: LocatedCheckpoint, live: LiveState) -> None:
        """Note that a checkpoint was loaded just now."""
        self.manifest = source.checkpoint.manifest
        for table in self._tables(live) or ():
            self._tracker.begin(table, self.manifest.origin)

    def is_in(self, live: LiveState) -> bool:
        """Say whether there are such tables, and their rows are still as they were loaded; never wrongly so."""
        tables = self._tables(live)
        return bool(tables) and all(self._tracker.is_unchanged(table, self.manifest.origin) for table in tables or ())

    def since(self, newer: LocatedCheckpoint, live: LiveState) -> LocatedCheckpoint:
        """Return what to read of a newer checkpoint: its new links, if the tables are still as they were loaded."""
        origin = self.manifest.origin
        stands_on_it = any(link.manifest.origin == origin for link in newer.checkpoint.links)
        return replace(newer, loaded_save_id=origin) if stands_on_it and self.is_in(live) else newer

    def _tables(self, live: LiveState) -> list[HashTable] | None:
        """Return the tables that are filled, None where one could not go on from what was loaded into it."""
        names, tables = set(self._names), []
        for name in sorted({name.table for name in names if name.is_slot}):
            table = live.tables[name]
            slots = {name for name in live.inventory if name.table == table.name}
            if not isinstance(table, HashTable) or (slot_name(table.name, ID) in names and not slots <= names):
                return None  # to load it all again also gives other slots their first values
            tables.append(table)
        return tables
