"""The links of a delta as far as they can still be found (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS
from recckpt.format.links import Link, Parent
from recckpt.format.manifest import Manifest
from recckpt.format.tables import TableEntry
from recckpt.inspect.salvage_link import Lost
from recckpt.output_dir.checkpoint_dir import read_manifest
from recckpt.output_dir.listing import look_around
from recckpt.storage import Storage


@dataclass(frozen=True)
class FoundLink:
    """A link whose manifest is whole."""

    directory: str
    manifest: Manifest
    entry: TableEntry  # of the table in it


def links_of(storage: Storage, directory: str, manifest: Manifest, table: str) -> Iterator[FoundLink | Lost]:
    """Yield what a table is read from, newest link first, down to one that holds all of it; Lost for what is not there.

    Below a link that is lost the others are where the manifest says they were.
    """
    entry = manifest.named_table(table)
    yield FoundLink(directory, manifest, entry)
    above, slots = manifest, entry.slots
    for hint in manifest.chain:
        if entry.is_whole:
            return
        place, record, problem = _find(storage, hint, above.parent)
        found = None if record is None else record.table(table)
        if record is None or found is None or found.slots != slots:
            path = layout.join(place, layout.MANIFEST)
            yield Lost(path, (0, N_BUCKETS), None, problem or f"has no table {table!r} with these slots")
            above = manifest if record is None else record
            continue
        entry, above = found, record
        yield FoundLink(place, record, entry)


def _find(storage: Storage, hint: Link, parent: Parent | None) -> tuple[str, Manifest | None, str]:
    """Return where a link is, its manifest, and what is wrong where that is not found."""
    problem = "no such file"
    try:
        record = read_manifest(storage, hint.directory)
        if record is not None and _is_meant(record, hint, parent):
            return hint.directory, record, ""
        problem = "a manifest of another save" if record else problem
    except (CorruptCheckpointError, FormatVersionError, OSError) as error:
        problem = f"unreadable ({getattr(error, 'found', error)})"
    listing = look_around(storage)
    for other in (*listing.committed, *listing.lost):
        if _is_meant(other.manifest, hint, parent):
            return other.directory, other.manifest, ""
    return hint.directory, None, problem


def _is_meant(record: Manifest, hint: Link, parent: Parent | None) -> bool:
    """Say whether this is the link, or a form of it; its checksum is known from the link above where that is there."""
    checksum = parent.manifest if parent is not None and parent.save_id == hint.save_id else None
    return record.origin == hint.save_id and checksum in (None, record.origin_xxh3)
