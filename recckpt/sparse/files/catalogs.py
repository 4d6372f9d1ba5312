"""The catalogs of a checkpoint, read and held against its manifest (no torch here)."""

from __future__ import annotations

from collections.abc import Collection

from recckpt.errors import CorruptCheckpointError
from recckpt.format import catalog as catalogs
from recckpt.format import layout
from recckpt.format.buckets import Slice
from recckpt.format.catalog import Catalog, Part
from recckpt.format.manifest import Manifest
from recckpt.output_dir.checkpoint_dir import read_checked
from recckpt.output_dir.listing import Checkpoint
from recckpt.storage.base import Files


def met_shards(manifest: Manifest, slices: Collection[Slice | None]) -> list[int]:
    """Return the shards that may have rows of slices; None stands for all ids."""
    if _is_all(slices):
        return list(range(len(manifest.shards)))
    return [n for n, shard in enumerate(manifest.shards) if any(s.meets(*shard.buckets) for s in slices if s)]


def read_parts(checkpoint: Checkpoint, storage: Files, slices: Collection[Slice | None] = (None,)) -> list[Part]:
    """Return the parts of a checkpoint that may have rows of slices; arguments and errors of `read_catalogs`."""
    is_all = _is_all(slices)
    catalogs_read = read_catalogs(checkpoint, storage, slices)
    return [part for catalog in catalogs_read for part in catalog.parts if is_all or _meets(part, slices)]


def read_catalogs(checkpoint: Checkpoint, storage: Files, slices: Collection[Slice | None] = (None,)) -> list[Catalog]:
    """Return the catalogs of the shards that may have rows of slices, of which None stands for all ids.

    Raises:
        CorruptCheckpointError: a catalog is damaged, its buckets are not those of the manifest, or the rows of all
            are not.
    """
    manifest, is_all = checkpoint.manifest, _is_all(slices)
    found: list[Catalog] = []
    rows = dict.fromkeys((table.name for table in manifest.tables), 0)
    for number in met_shards(manifest, slices):
        shard = manifest.shards[number]
        entry = manifest.file(shard.catalog)
        assert entry is not None  # the manifest was checked for that
        path = layout.join(checkpoint.directory, shard.catalog)
        catalog = catalogs.decode(
            read_checked(storage, checkpoint.directory, entry, catalogs.MAX_BYTES), path, manifest, number
        )
        if catalog.buckets != shard.buckets:
            buckets, expected = f"batches of buckets {list(catalog.buckets)}", f"{list(shard.buckets)}, by the manifest"
            raise CorruptCheckpointError(path, "", found=buckets, expected=expected)
        found.append(catalog)
        for name, count in catalog.rows.items():
            rows[name] += count
    for table in manifest.tables if is_all else ():  # a rank that reads some of them cannot tell
        if rows[table.name] != table.rows:
            path, where = layout.join(checkpoint.directory, layout.MANIFEST), f"table {table.name!r}"
            expected = f"{rows[table.name]}, as in the catalogs"
            raise CorruptCheckpointError(path, where, found=f"{table.rows} rows", expected=expected)
    return found


def _is_all(slices: Collection[Slice | None]) -> bool:
    return any(own is None or own.is_everything for own in slices)


def _meets(part: Part, slices: Collection[Slice | None]) -> bool:
    return any(own.meets(*batch.buckets) for batch in part.batches for own in slices if own)
