"""One checkpoint of a chain, opened for reading by itself (no torch here)."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import Slice
from recckpt.format.catalog import Catalog, Part
from recckpt.format.manifest import FileEntry
from recckpt.format.tables import TableEntry
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import OpenFiles
from recckpt.sparse.files.catalogs import meets, met_shards, read_catalog, read_catalogs, shards_with
from recckpt.sparse.files.id_set import IdSet
from recckpt.storage import Storage

if TYPE_CHECKING:  # they import pyarrow, which takes its time, and who reads no rows does without
    from recckpt.sparse.files.row_index import RowIndex
    from recckpt.sparse.files.table_reader import TableReader


class OpenLink:
    """A checkpoint and its files; reads its catalogs, and indexes its tables, when they are first asked for.

    Args:
        checkpoint: it; what it stands on is not looked at.
        files: its files, as far as they are open already.
        catalogs: of all shards, where the caller has read them.
    """

    def __init__(self, checkpoint: Checkpoint, files: OpenFiles, catalogs: Sequence[Catalog] | None = None) -> None:
        self.checkpoint, self.files = checkpoint, files
        self.directory, self.manifest = checkpoint.directory, checkpoint.manifest
        self.indexes: dict[str, RowIndex] = {}  # by table
        self._catalogs = catalogs
        self._by_shard = dict(enumerate(catalogs or ()))
        self._lock = threading.Lock()

    @classmethod
    def of(cls, storage: Storage, checkpoint: Checkpoint, n_links: int = 1) -> OpenLink:
        """Return one of so many links, of which no file is open yet: each is opened when it is read."""
        return cls(checkpoint, files_of(storage, checkpoint, n_links))

    @cached_property
    def catalogs(self) -> Sequence[Catalog]:
        """The catalogs of all shards; CorruptCheckpointError where one is damaged."""
        return read_catalogs(self.checkpoint, self.files) if self._catalogs is None else self._catalogs

    def reader(self, table: str, slots: Sequence[str], ids: IdSet | None = None) -> TableReader:
        """Return the reader of what its own files hold of a table; with ids, only of shards that may have any of them.

        Raises:
            CorruptCheckpointError: a catalog is damaged, or it lacks the table, on which newer links stand.
        """
        from recckpt.sparse.files.table_reader import TableReader

        entry = self.manifest.table(table)
        if entry is None:
            path, expected = layout.join(self.directory, layout.MANIFEST), "the table, whose rows newer links change"
            raise CorruptCheckpointError(path, f"table {table!r}", found="no such table", expected=expected)
        catalogs = self.catalogs if ids is None else self._catalogs_with(entry, ids)
        return TableReader(self.files, self.directory, catalogs, entry, slots)

    def _catalogs_with(self, table: TableEntry, ids: IdSet) -> Sequence[Catalog]:
        """Return the catalogs of the shards that may have rows or deletes of ids; reads no others."""
        numbers = shards_with(self.manifest, table, ids)
        every = len(numbers) == len(self.manifest.shards)
        return self.catalogs if every else [self._catalog(number) for number in numbers]

    def _catalog(self, number: int) -> Catalog:
        catalog = self._by_shard.get(number)
        if catalog is None:
            catalog = self._by_shard[number] = read_catalog(self.checkpoint, self.files, number)
        return catalog

    def index(self, table: TableReader) -> RowIndex:
        """Return where the rows of a table of this link lie. Thread-safe."""
        from recckpt.sparse.files.row_index import RowIndex

        with self._lock:
            name = table.entry.name
            if name not in self.indexes:
                self.indexes[name] = RowIndex(table)
            return self.indexes[name]

    def open_rows(self) -> None:
        """Open all files with rows."""
        self.files.keep_open(file.name for file in self.manifest.files if layout.has_rows(file.name))

    def open_parts(self, tables: Collection[str], slices: Collection[Slice | None]) -> Mapping[int, Sequence[Part]]:
        """Open the files that may have rows or deletes of tables in some slices.

        Reads the catalogs of the shards that the slices meet, and no others.

        Returns:
            All parts of these shards, by number: ranks that share batches look at the same ones.
        """
        self.files.keep_open(file.name for file in self.catalog_files(slices))
        catalogs = read_catalogs(self.checkpoint, self.files, slices)
        parts = [part for catalog in catalogs for part in catalog.parts if meets(part, slices)]
        self.files.keep_open(part.file for part in parts if not {*part.tables}.isdisjoint(tables))
        return {catalog.shard: catalog.parts for catalog in catalogs}

    def catalog_files(self, slices: Collection[Slice | None]) -> list[FileEntry]:
        """Return the catalogs of the shards that may have rows of some slices."""
        names = {self.manifest.shards[number].catalog for number in met_shards(self.manifest, slices)}
        return [file for file in self.manifest.files if file.name in names]


def files_of(storage: Storage, checkpoint: Checkpoint, n_links: int = 1) -> OpenFiles:
    """Return the files of one of so many checkpoints that are read together; none is open yet."""
    sizes = {file.name: file.n_bytes for file in checkpoint.manifest.files}
    return OpenFiles(checkpoint.near_dir or storage, checkpoint.directory, sizes, (), n_links)
