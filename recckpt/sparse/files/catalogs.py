"""Reads catalogs, compares them with the manifest, and selects those that may have rows of ids (no torch here)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from recckpt.errors import CorruptCheckpointError
from recckpt.format import catalog as catalogs
from recckpt.format import layout
from recckpt.format.buckets import Slice, bucket_of, distinct
from recckpt.format.catalog import Catalog, Part
from recckpt.format.codec import IdRange
from recckpt.format.manifest import Manifest, ShardEntry
from recckpt.format.tables import TableEntry
from recckpt.output_dir.checkpoint_dir import read_checked
from recckpt.output_dir.listing import Checkpoint
from recckpt.storage.base import Files


class IdSet:
    """Distinct sorted ids, which can be tested against the buckets and id ranges of batches and shards."""

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self.ids = ids
        self._of_ids = bucket_of(ids)
        self._buckets = distinct(self._of_ids)

    def meets(self, buckets: tuple[int, int], ids: IdRange | None) -> bool:
        """Say whether an id lies in buckets [begin, end) and in the id range ``ids``; None stands for all ids."""
        at = np.searchsorted(self._buckets, buckets[0])
        if at == len(self._buckets) or self._buckets[at] >= buckets[1]:
            return False
        if ids is None:
            return True
        first, last = np.searchsorted(self.ids, ids[0]), np.searchsorted(self.ids, ids[1], side="right")
        within = self._of_ids[first:last]
        if len(within) in (0, len(self.ids)):
            return bool(len(within))
        return bool(((buckets[0] <= within) & (within < buckets[1])).any())


def met_shards(manifest: Manifest, slices: Collection[Slice | None]) -> list[int]:
    is_all = any(own is None or own.is_everything for own in slices)
    shards = enumerate(manifest.shards)
    return [n for n, shard in shards if is_all or any(own.meets(*shard.buckets) for own in slices if own)]


def shards_with(manifest: Manifest, table: TableEntry, ids: IdSet) -> list[int]:
    has_deletes = table.delta is not None and table.delta.deletes > 0  # a manifest has no id ranges of deletes
    met = []
    for number, shard in enumerate(manifest.shards):
        ranges = None if has_deletes else shard.ids
        if ranges is None or table.name in ranges:
            span = None if ranges is None else ranges[table.name]
            met += [number] if ids.meets(shard.buckets, span) else []
    return met


def read_catalog(checkpoint: Checkpoint, storage: Files, number: int) -> Catalog:
    """Return the catalog of a shard. Raises CorruptCheckpointError if it is damaged or differs from the manifest."""
    manifest, directory = checkpoint.manifest, checkpoint.directory
    shard = manifest.shards[number]
    entry = manifest.file(shard.catalog)
    assert entry is not None  # decoding the manifest has checked that each shard's catalog is listed
    data = read_checked(storage, directory, entry, catalogs.MAX_BYTES)
    catalog = catalogs.decode(data, layout.join(directory, shard.catalog), manifest, number)
    for error in shard_errors(directory, catalog, shard):
        raise error
    return catalog


def shard_errors(directory: str, catalog: Catalog, shard: ShardEntry) -> Iterator[CorruptCheckpointError]:
    path = layout.join(directory, shard.catalog)
    if catalog.buckets != shard.buckets:
        buckets, expected = f"batches of buckets {list(catalog.buckets)}", f"{list(shard.buckets)}, by the manifest"
        yield CorruptCheckpointError(path, "", found=buckets, expected=expected)
    if shard.ids is None:
        return
    for table in sorted({*catalog.ids, *shard.ids}):
        own, recorded = catalog.ids.get(table), shard.ids.get(table)
        if own != recorded:
            of_catalog, of_manifest = (f"ids from {ids[0]} to {ids[1]}" if ids else "no ids" for ids in (own, recorded))
            found, expected = f"rows of {of_catalog}", f"{of_manifest}, by the manifest"
            yield CorruptCheckpointError(path, f"table {table!r}", found=found, expected=expected)


def count_errors(directory: str, manifest: Manifest, catalogs: Iterable[Catalog]) -> Iterator[CorruptCheckpointError]:
    rows: Counter[str] = Counter()
    deletes: Counter[str] = Counter()
    for catalog in catalogs:
        rows.update(catalog.counts("rows"))
        deletes.update(catalog.counts("deletes"))
    path = layout.join(directory, layout.MANIFEST)
    for table in manifest.tables:
        counts = [("rows", table.own_rows, rows)]
        if table.delta is not None:
            counts = [("upserts", table.own_rows, rows), ("deletes", table.delta.deletes, deletes)]
        for what, recorded, counted in counts:
            if recorded != counted[table.name]:
                found, expected = f"{recorded} {what}", f"{counted[table.name]}, as in the catalogs"
                yield CorruptCheckpointError(path, f"table {table.name!r}", found=found, expected=expected)


def count_error(directory: str, table: str, recorded: int, counted: int) -> CorruptCheckpointError:
    path, where = layout.join(directory, layout.MANIFEST), f"table {table!r}"
    return CorruptCheckpointError(path, where, found=f"{recorded} rows", expected=f"{counted}, as in its chain")


def meets(part: Part, slices: Collection[Slice | None]) -> bool:
    """Say whether a part may have rows of any of the slices; None stands for the slice of all ids."""
    buckets = [batch.buckets for batch in part.batches]
    return any(own is None or own.is_everything or any(own.meets(*span) for span in buckets) for own in slices)
