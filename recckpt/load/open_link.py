"""The links of a checkpoint with open files, and which tables are read from which of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from recckpt.format.buckets import Slice
from recckpt.format.catalog import Part
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import HeldFiles
from recckpt.sparse.files.catalogs import met_shards, parts_by_shard
from recckpt.storage import Storage


@dataclass
class OpenLink:
    """One checkpoint of a chain, whose files are open until they are closed.

    Attributes:
        checkpoint: what it is.
        files: its files, those open that are held.
        parts: by shard, the parts that may have rows or deletes that are wanted.
        tables: the tables whose rows are read from it.
        n_bytes: of catalogs that were read.
    """

    checkpoint: Checkpoint
    files: HeldFiles
    parts: list[list[Part]] = field(default_factory=list)
    tables: Collection[str] = ()
    n_bytes: int = 0

    @classmethod
    def of(cls, storage: Storage, checkpoint: Checkpoint, n_links: int) -> OpenLink:
        """Return one of so many links, of which no file is open yet."""
        sizes = {file.name: file.n_bytes for file in checkpoint.manifest.files}
        return cls(checkpoint, HeldFiles(storage, checkpoint.directory, sizes, (), n_links))

    @property
    def directory(self) -> str:
        """Where it lies."""
        return self.checkpoint.directory

    def hold_rows(self, tables: Collection[str], slices: Collection[Slice | None]) -> None:
        """Open the files that may have rows or deletes of tables, and of slices of their ids."""
        manifest, self.tables = self.checkpoint.manifest, tables
        catalogs = {manifest.shards[number].catalog for number in met_shards(manifest, slices)}
        self.files.hold(sorted(catalogs))
        self.n_bytes += sum(file.n_bytes for file in manifest.files if file.name in catalogs)
        by_shard = parts_by_shard(self.checkpoint, self.files, slices)
        self.parts = [[part for part in parts if not {*part.tables}.isdisjoint(tables)] for parts in by_shard]
        self.files.hold(part.file for parts in self.parts for part in parts)


def links_with_rows(checkpoint: Checkpoint) -> Iterator[tuple[Checkpoint, Collection[str]]]:
    """Yield the links of a checkpoint, newest first, each with the tables of which some rows are read from it.

    What is older than a link that has all rows of a table does not count.
    """
    tables = {table.name for table in checkpoint.manifest.tables}
    for link in checkpoint.links:
        yield link, tables
        tables = {name for name in tables if not link.manifest.named_table(name).is_whole}
        if not tables:
            return
