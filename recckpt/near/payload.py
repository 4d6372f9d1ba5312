"""The ids in a near save: what has changed since the checkpoint that it stands on (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.link import OpenLink
from recckpt.format.catalog import PartKind
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.arrow_format import ids_in
from recckpt.sparse.files.table_reader import TableReader

Int64s = npt.NDArray[np.int64]


class Payload:
    """What a near save holds of tables, of all shards; files are opened when they are read.

    Errors of all methods: CorruptCheckpointError where a file is damaged, CheckpointRemovedError where it is gone.
    """

    def __init__(self, save: Checkpoint) -> None:
        assert save.near_dir is not None
        self._manifest, self._link = save.manifest, OpenLink.of(save.near_dir, save)

    def is_whole(self, table: str) -> bool:
        """Say whether it holds all rows of a table, since it was not known which have changed."""
        entry = self._manifest.table(table)
        return entry is None or entry.is_whole

    def changed(self, table: str) -> Int64s:
        """Return the ids of the rows that it holds."""
        return _ids(self._link.reader(table, ()), "rows")

    def deleted(self, table: str) -> Int64s:
        """Return the ids that it names as deleted, those included that have a row in another shard."""
        return _ids(self._link.reader(table, ()), "deletes")


def _ids(reader: TableReader, kind: PartKind) -> Int64s:
    batches = (batch for catalog in reader.catalogs for _, _, batch in reader.batches(catalog, kind, None))
    ids: Iterable[Int64s] = map(ids_in, batches)
    return np.concatenate([np.empty(0, np.int64), *ids])
