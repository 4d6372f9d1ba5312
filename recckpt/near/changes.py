"""Marks of changed rows in near saves: making a near save does not change the marks, restoring one sets them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.chain import OpenLink
from recckpt.errors import RecckptError
from recckpt.format.catalog import PartKind
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.policies.deltas import MAX_DELTAS, Deltas
from recckpt.save.deltas import Changes
from recckpt.sparse.files.catalogs import met_shards
from recckpt.sparse.files.pieces import ids_of
from recckpt.sparse.files.table_reader import TableReader
from recckpt.sparse.table.store import is_stored
from recckpt.storage import Storage
from recckpt.types import SavableTable

log = logging.getLogger("recckpt")
_ANY = 1e18  # a limit that no chain reaches, in multiples of a full checkpoint's bytes


class PeekedChanges(Changes):
    """The changes for a near save: marks and base are read but not changed (rule *keeps_marks*).

    The length of the chain does not matter, because a near save is not a link. As with deltas, there is no near save if
    too many rows have changed.
    """

    def __init__(self, changes: Changes) -> None:
        super().__init__(Deltas(full_every=MAX_DELTAS, max_chain_bytes=_ANY, max_dirty=changes.policy.max_dirty))
        self.base = None if changes.base is None else replace(changes.base, is_candidate=False)
        self.freeze = partial(changes.tracker.freeze, keeps_marks=True)

    def is_in_doubt(self, storage: Storage, fence: Fence) -> bool:
        """Return False, because rank 0 has already confirmed the base."""
        return False


def count_from(changes: Changes, restored: Checkpoint, tables: Iterable[SavableTable]) -> None:
    """Count changes since a restored checkpoint; after a near save, count from its parent, with its rows marked."""
    if restored.near_dir is None:
        changes.on_whole_restore(restored, tables)
    elif changes.resume_from(restored.below[0].manifest):
        mark(changes, restored, tables)


def mark(changes: Changes, save: Checkpoint, tables: Iterable[SavableTable]) -> None:
    """Mark the rows and deletes of a near save as changed in these tables (rule *payload_is_marks*)."""
    assert save.near_dir is not None
    base, stored = save.below[0].manifest.name, [table for table in tables if is_stored(table)]
    slices, link = {table.name: getattr(table, "slice", None) for table in stored}, OpenLink.of(save.near_dir, save)

    def payload(table: str, kind: PartKind) -> npt.NDArray[np.int64]:
        """Return the ids of rows or deletes in shards that overlap the tables' slices; other shards may be missing."""
        catalogs = link.catalogs_of(met_shards(save.manifest, set(slices.values())))
        reader = TableReader(link.files, save.directory, catalogs, save.manifest.named_table(table), ())
        return ids_of(piece for catalog in catalogs for _, _, piece in reader.batches(catalog, kind, None))

    try:
        for table in stored:
            entry, own = save.manifest.table(table.name), slices[table.name]
            if entry is None or entry.is_whole:  # the near save did not know which rows had changed
                changes.tracker.forget(table)
                continue
            deleted = payload(table.name, "deletes")  # includes ids that have a row in another shard
            deleted = deleted if own is None else deleted[own.owns(deleted)]
            changes.tracker.resume(table, base, payload(table.name, "rows"), deleted)
    except (RecckptError, OSError) as error:  # the restore itself is complete, so only warn
        log.warning("the next save is full: reading %s once more failed: %s", save.manifest.save_id, error)
        changes.drop_base()
