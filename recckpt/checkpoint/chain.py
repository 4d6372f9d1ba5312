"""A checkpoint opened for reading, with all that it stands on: the one way in (no torch, but for states)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from recckpt.checkpoint.link import OpenLink, files_of
from recckpt.dense.tensors import DenseTensors
from recckpt.format import layout
from recckpt.format.buckets import Slice
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import OpenFiles
from recckpt.sparse.files.id_set import IdSet
from recckpt.storage import Storage
from recckpt.types import SlotSpec

if TYPE_CHECKING:  # they import pyarrow, which takes its time, and who reads no rows does without
    from recckpt.sparse.files.aligned_rows import AlignedRows
    from recckpt.sparse.files.chain_table import ChainTable
    from recckpt.sparse.files.link_batches import LinkBatches
    from recckpt.sparse.files.once import Int64s
    from recckpt.sparse.files.row_index import RowIndex

Buckets = Mapping[str, Sequence[tuple[int, int]]]  # table -> ranges [begin, end)


class OpenChain:
    """The links of a checkpoint and its other files. Every byte that it gives out was checked.

    A file that is not kept open is opened when it is read, and may be gone by then; those that are kept open stay whole
    though a writer removes the checkpoint, where the storage has maps.

    Attributes:
        storage: where it lies.
        checkpoint: what was opened.
        links: what its rows are read from, newest first.
        files: those of its own files that have no rows.
    """

    def __init__(self, storage: Storage, checkpoint: Checkpoint, links: Sequence[OpenLink], files: OpenFiles) -> None:
        self.storage, self.checkpoint = storage, checkpoint
        self.directory, self.manifest = checkpoint.directory, checkpoint.manifest
        self.links, self.files = links, files
        self._is_open = False

    @classmethod
    def of(cls, storage: Storage, checkpoint: Checkpoint, before: OpenChain | None = None) -> OpenChain:
        """Return a chain of which no file is open yet, but those of links that another chain has."""
        known = {_key(link.checkpoint): link for link in before.links} if before is not None else {}
        n_links = len(checkpoint.links)
        links = [known.get(_key(link)) or OpenLink.of(storage, link, n_links) for link in checkpoint.links]
        return cls(storage, checkpoint, links, files_of(storage, checkpoint, n_links))

    @classmethod
    def open(cls, storage: Storage, checkpoint: Checkpoint, before: OpenChain | None = None) -> OpenChain:
        """Open all files, but those of links that another chain has open; index the tables that it has indexed.

        Raises:
            CheckpointRemovedError: it is gone already.
            CorruptCheckpointError: a file is missing, or a table of which there is an index is damaged.
        """
        chain = cls.of(storage, checkpoint, before).open_all()
        links = before.links if before is not None else ()
        for table in sorted({table for link in links for table in list(link.indexes)}):  # other threads add to them
            if chain.manifest.table(table) is not None:
                list(chain._indexes(table))
        return chain

    def open_all(self) -> OpenChain:
        """Open all files that are not open yet, and return the chain."""
        if not self._is_open:
            for link in self.links:
                link.open_rows()
            self.files.keep_open(file.name for file in self.manifest.files if not layout.has_rows(file.name))
            self._is_open = True
        return self

    def close(self) -> None:
        """Close all files; a map ends with the last view of it."""
        for files in (self.files, *(link.files for link in self.links)):
            files.close()

    def twin(self) -> OpenChain:
        """Return a chain with the same files open, each of which is closed by itself."""
        links = [OpenLink(link.checkpoint, link.files.twin()) for link in self.links]
        return OpenChain(self.storage, self.checkpoint, links, self.files.twin())

    def newest(self, count: int) -> OpenChain:
        """Return a chain of its newest links alone: what they hold, and nothing of what they stand on."""
        return OpenChain(self.storage, self.checkpoint, self.links[:count], self.files)

    def table(self, name: str, slots: Sequence[str], ids: Int64s | None = None) -> ChainTable:
        """Return the reader of a table, whose rows are merged from the links down to one that holds all of it.

        Args:
            name: of the table.
            slots: to read.
            ids: sorted, each once: the only ones that are looked for, so that shards without them are not opened.

        Raises:
            CorruptCheckpointError: a catalog is damaged, or a link lacks the table or has it with other slots.
        """
        from recckpt.sparse.files.chain_table import ChainTable
        from recckpt.sparse.files.link_cursors import down_to_whole

        sought = None if ids is None else IdSet(ids)
        return ChainTable(down_to_whole(link.reader(name, slots, sought) for link in self.links))

    def find(self, table: str, ids: Int64s, slot: SlotSpec, default: Any) -> AlignedRows:
        """Return a slot of the rows of ids, in their order; reads a link only for ids that no newer one knows.

        Raises:
            ValueError: ``default`` is not a value or a row of the slot.
            CorruptCheckpointError: a file is damaged, or an id is twice in a link.
            CheckpointRemovedError: its writer removed it, and the storage has no maps.
        """
        from recckpt.sparse.files.aligned_rows import aligned_rows

        return aligned_rows(self._indexes(table), table, ids, slot, default)

    def _indexes(self, table: str) -> Iterator[RowIndex]:
        """Yield where the rows lie in each link of a table, newest first; makes an index when it is asked for."""
        for link, reader in zip(self.links, self.table(table, []).links, strict=False):
            yield link.index(reader)

    def batches(
        self, slices: Collection[Slice | None], known: str = "", unknown: Collection[str] = ()
    ) -> tuple[Sequence[LinkBatches], Collection[str]]:
        """Open the files that may have rows or deletes of some slices, and return what a load reads, newest link first.

        Args:
            slices: None for all ids.
            known: save id of the link from which on the model has the rows already; "" for none.
            unknown: tables of which it has none all the same.

        Returns:
            Of each link that has rows to be read, its batches; and the tables that go on from the known link.
        """
        from recckpt.sparse.files.link_batches import LinkBatches

        tables = {table.name for table in self.manifest.tables}
        opened, updates = list[LinkBatches](), set[str]()
        for link in self.links:
            if link.manifest.origin == known:
                updates, tables = tables.difference(unknown), tables.intersection(unknown)
            if not tables:
                break
            opened.append(LinkBatches(link.files, link.directory, tables, link.open_parts(tables, slices)))
            tables = {name for name in tables if not link.manifest.named_table(name).is_whole}
        return opened, updates

    @cached_property
    def tensors(self) -> DenseTensors:
        """The dense tensors."""
        return DenseTensors(self.files, self.directory, self.manifest)

    def state(self, name: str) -> dict[str, Any]:
        """Return the dict in a ``.pt`` file, checked; empty where the checkpoint has no such file. Imports torch."""
        from recckpt.dense.loader import load_state

        entry = self.manifest.file(name)
        return load_state(self.files, self.directory, entry) if entry else {}

    @contextmanager
    def mapped(self, buckets: Buckets) -> Iterator[OpenChain]:
        """Give the same chain with the files kept open that have rows or deletes in some buckets, and no others.

        They are mapped once, where the storage has maps, and closed at the end of the block.
        """
        n_links = len(self.links)
        files = [files_of(self.storage, link.checkpoint, n_links) for link in self.links]
        links = [OpenLink(link.checkpoint, own, link.catalogs) for link, own in zip(self.links, files, strict=True)]
        chain = OpenChain(self.storage, self.checkpoint, links, self.files)
        try:
            for link in links:
                link.files.keep_open(_files_in(link, buckets))
            yield chain
        finally:
            for link in links:
                link.files.close()


def _files_in(link: OpenLink, buckets: Buckets) -> Iterable[str]:
    """Yield the parts of a link that have something in some buckets."""
    for part in (part for catalog in link.catalogs for part in catalog.parts):
        spans = ((batch.buckets, within) for batch in part.batches for within in buckets.get(batch.table, ()))
        if any(begin < span[1] and span[0] < end for span, (begin, end) in spans):
            yield part.file


def _key(link: Checkpoint) -> tuple[str, str]:
    return link.directory, link.manifest.save_id
