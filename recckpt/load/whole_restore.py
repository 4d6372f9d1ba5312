"""Whether a load has made the tables of a model exactly those of one checkpoint of its own output dir."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recckpt.format.manifest import Manifest
from recckpt.load.conf import Entry
from recckpt.load.names import ID, Pattern
from recckpt.load.report import Planned
from recckpt.load.source import Source
from recckpt.sparse.files.row_filter import RowFilter
from recckpt.types import HashTable


def whole_restore(
    tables: Mapping[str, HashTable], items: Sequence[Planned], sources: Sequence[Source]
) -> Source | None:
    """Return the source all of which was loaded, unconverted and by its own names, None where there is none.

    Args:
        tables: those of the model.
        items: what came from where.
        sources: by their numbers.
    """
    numbers = {item.offer for item in items if item.offer is not None}
    if len(numbers) != 1 or any(item.conversion for item in items):
        return None
    source = sources[numbers.pop()]
    taken = {(item.name.text, item.source) for item in items if item.offer is not None and item.name.is_slot}
    saved = {(name, name) for name in _slots(source.checkpoint.manifest)}
    names = {table.name for table in source.checkpoint.manifest.tables}
    return source if _takes_all(source.entry) and taken == saved and names == tables.keys() else None


def _takes_all(entry: Entry) -> bool:
    is_everything = entry.load == (Pattern("*"),) and not entry.exclude and entry.only is None
    return entry.is_own and is_everything and entry.hashtable_clear and entry.where == RowFilter()


def _slots(manifest: Manifest) -> set[str]:
    return {f"{table.name}@{slot}" for table in manifest.tables for slot in (ID, *(spec.name for spec in table.slots))}
