"""The catalogs of a checkpoint, read and held against its manifest (no torch here)."""

from __future__ import annotations

from recckpt import layout
from recckpt.checked import read_checked
from recckpt.errors import CorruptCheckpointError
from recckpt.listing import Checkpoint
from recckpt.sparse import catalog as catalogs
from recckpt.sparse.catalog import Part
from recckpt.storage.held import Files


def read_parts(checkpoint: Checkpoint, storage: Files) -> list[Part]:
    """Return the parts of all shards of a checkpoint.

    Raises:
        CorruptCheckpointError: a catalog is damaged, or the rows of all are not those of the manifest.
    """
    manifest = checkpoint.manifest
    parts: list[Part] = []
    rows = dict.fromkeys((table.name for table in manifest.tables), 0)
    for number, shard in enumerate(manifest.shards):
        entry = manifest.file(shard.catalog)
        assert entry is not None  # the manifest was checked for that
        path = layout.join(checkpoint.directory, shard.catalog)
        catalog = catalogs.decode(
            read_checked(storage, checkpoint.directory, entry, catalogs.MAX_BYTES), path, manifest, number
        )
        parts += catalog.parts
        for name, count in catalog.rows.items():
            rows[name] += count
    for table in manifest.tables:
        if rows[table.name] != table.rows:
            path, where = layout.join(checkpoint.directory, layout.MANIFEST), f"table {table.name!r}"
            found = f"{table.rows} rows"
            raise CorruptCheckpointError(path, where, found=found, expected=f"{rows[table.name]}, as in the catalogs")
    return parts
