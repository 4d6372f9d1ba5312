"""The ids in a near save: what has changed since its parent. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.chain import OpenLink, files_of
from recckpt.format.buckets import Slice
from recckpt.format.catalog import Catalog, PartKind
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.catalogs import met_shards
from recckpt.sparse.files.pieces import ids_of
from recckpt.sparse.files.table_reader import TableReader

Int64s = npt.NDArray[np.int64]


class Payload:
    """The ids of tables in a near save, in the shards that may have ids of slices; files are opened when they are read.

    ``slices`` are the ids that are asked for, None for all; a host may lack the files of other shards. All methods
    raise CorruptCheckpointError if a file is damaged, CheckpointRemovedError if it is gone.
    """

    def __init__(self, save: Checkpoint, slices: Collection[Slice | None]) -> None:
        assert save.near_dir is not None
        self._save, self._slices, self._files = save, slices, files_of(save.near_dir, save)

    def is_whole(self, table: str) -> bool:
        """Say whether it holds all rows of a table, since it was unknown which have changed."""
        entry = self._save.manifest.table(table)
        return entry is None or entry.is_whole

    def changed(self, table: str) -> Int64s:
        return self._ids(table, "rows")

    def deleted(self, table: str) -> Int64s:
        """Return the ids that it names as deleted, including those that have a row in another shard."""
        return self._ids(table, "deletes")

    @cached_property
    def _catalogs(self) -> Sequence[Catalog]:
        return OpenLink(self._save, self._files).catalogs_of(met_shards(self._save.manifest, self._slices))

    def _ids(self, table: str, kind: PartKind) -> Int64s:
        entry = self._save.manifest.named_table(table)
        reader = TableReader(self._files, self._save.directory, self._catalogs, entry, ())
        pieces = (piece for catalog in self._catalogs for _, _, piece in reader.batches(catalog, kind, None))
        return ids_of(pieces)
