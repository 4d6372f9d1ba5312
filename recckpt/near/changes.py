"""The marks of a saver and near saves: making one leaves them as they are, restoring one sets them anew."""

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
_ANY = 1e18  # times the bytes of a full checkpoint


class PeekedChanges(Changes):
    """What changes, for a near save: marks and base are read, and stay (rule *keeps_marks*).

    The length of the chain does not matter, since a near save is not a link. If too much has changed, it is not worth
    its bytes.
    """

    def __init__(self, changes: Changes) -> None:
        super().__init__(Deltas(full_every=MAX_DELTAS, max_chain_bytes=_ANY, max_dirty=changes.policy.max_dirty))
        self.base = None if changes.base is None else replace(changes.base, is_candidate=False)
        self.freeze = partial(changes.tracker.freeze, keeps_marks=True)

    def is_in_doubt(self, storage: Storage, fence: Fence) -> bool:
        """Say no: rank 0 has checked before."""
        return False


def count_from(changes: Changes, restored: Checkpoint, tables: Iterable[SavableTable]) -> None:
    """Count changes from a restored checkpoint; after a near save, from its parent, with its rows as changed."""
    if restored.near_dir is None:
        changes.on_whole_restore(restored, tables)
    elif changes.resume_from(restored.below[0].manifest):
        mark(changes, restored, tables)


def mark(changes: Changes, save: Checkpoint, tables: Iterable[SavableTable]) -> None:
    """Mark in tables what a near save holds of them (rule *payload_is_marks*)."""
    assert save.near_dir is not None
    base, stored = save.below[0].manifest.name, [table for table in tables if is_stored(table)]
    slices, link = {table.name: getattr(table, "slice", None) for table in stored}, OpenLink.of(save.near_dir, save)

    def payload(table: str, kind: PartKind) -> npt.NDArray[np.int64]:
        """Return the ids of rows or deletes in shards that may have ids of the tables: a host may lack the others."""
        catalogs = link.catalogs_of(met_shards(save.manifest, set(slices.values())))
        reader = TableReader(link.files, save.directory, catalogs, save.manifest.named_table(table), ())
        return ids_of(piece for catalog in catalogs for _, _, piece in reader.batches(catalog, kind, None))

    try:
        for table in stored:
            entry, own = save.manifest.table(table.name), slices[table.name]
            if entry is None or entry.is_whole:  # it was unknown which rows had changed
                changes.tracker.forget(table)
                continue
            deleted = payload(table.name, "deletes")  # also ids that have a row in another shard
            deleted = deleted if own is None else deleted[own.owns(deleted)]
            changes.tracker.resume(table, base, payload(table.name, "rows"), deleted)
    except (RecckptError, OSError) as error:  # all is restored by now
        log.warning("the next save is full: %s cannot be read once more: %s", save.manifest.save_id, error)
        changes.drop_base()
