"""Opens a checkpoint and its parents, for all readers. Imports torch only for states."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from recckpt.dense.tensors import DenseTensors
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import Slice
from recckpt.format.catalog import Catalog, Part
from recckpt.format.manifest import FileEntry
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import OpenFiles
from recckpt.sparse.files.catalogs import IdSet, count_errors, meets, met_shards, read_catalog, shards_with
from recckpt.storage import Storage
from recckpt.types import SlotSpec

if TYPE_CHECKING:
    from recckpt.sparse.files.chain_table import AlignedRows, ChainTable, RowIndex
    from recckpt.sparse.files.part_reader import LinkBatches
    from recckpt.sparse.files.pieces import Int64s
    from recckpt.sparse.files.table_reader import TableReader

Buckets = Mapping[str, Sequence[tuple[int, int]]]  # table -> ranges [begin, end)


class OpenLink:
    """One checkpoint of a chain, without its parents, and its files. Reads catalogs and indexes tables on first use."""

    def __init__(self, checkpoint: Checkpoint, files: OpenFiles, catalogs: Sequence[Catalog] | None = None) -> None:
        self.checkpoint, self.files = checkpoint, files
        self.directory, self.manifest = checkpoint.directory, checkpoint.manifest
        self.indexes: dict[str, RowIndex] = {}  # by table
        self._by_shard = dict(enumerate(catalogs or ()))
        self._lock = threading.Lock()

    @classmethod
    def of(cls, storage: Storage, checkpoint: Checkpoint, n_links: int = 1) -> OpenLink:
        """Return one of ``n_links`` links that are read together; each file is opened when it is read."""
        return cls(checkpoint, files_of(storage, checkpoint, n_links))

    @cached_property
    def catalogs(self) -> Sequence[Catalog]:
        return self.catalogs_of(range(len(self.manifest.shards)))

    def catalogs_of(self, numbers: Collection[int]) -> list[Catalog]:
        """Return the catalogs of some shards, each read once.

        Raises CorruptCheckpointError if a catalog is damaged or differs from the manifest, or if, once all are read,
        the sum of their rows or deletes differs from the manifest.
        """
        new = [number for number in numbers if number not in self._by_shard]
        for number in new:
            self._by_shard[number] = read_catalog(self.checkpoint, self.files, number)
        if (new or not self._by_shard) and len(self._by_shard) == len(self.manifest.shards):
            for error in count_errors(self.directory, self.manifest, self._by_shard.values()):
                raise error
        return [self._by_shard[number] for number in numbers]

    def reader(self, table: str, slots: Sequence[str], ids: IdSet | None = None) -> TableReader:
        """Return the reader of a table in this link; with ``ids``, only of shards that may have some of the ids.

        Raises CorruptCheckpointError if a catalog is damaged, or if the table is missing although newer links need
        it.
        """
        from recckpt.sparse.files.table_reader import TableReader

        entry = self.manifest.table(table)
        if entry is None:
            path, expected = layout.join(self.directory, layout.MANIFEST), "the table, whose rows newer links change"
            raise CorruptCheckpointError(path, f"table {table!r}", found="no such table", expected=expected)
        catalogs = self.catalogs if ids is None else self.catalogs_of(shards_with(self.manifest, entry, ids))
        return TableReader(self.files, self.directory, catalogs, entry, slots)

    def index(self, table: TableReader) -> RowIndex:
        """Return where the rows of a table of this link lie. Thread-safe."""
        from recckpt.sparse.files.chain_table import RowIndex

        with self._lock:
            name = table.entry.name
            if name not in self.indexes:
                self.indexes[name] = RowIndex(table)
            return self.indexes[name]

    def open_parts(self, tables: Collection[str], slices: Collection[Slice | None]) -> Mapping[int, Sequence[Part]]:
        """Open the files that may have rows or deletes of these tables in these slices.

        Reads only the catalogs of shards that overlap with the slices. Returns all parts of these shards, by shard,
        because ranks that share batches must see the same parts.
        """
        self.files.keep_open(file.name for file in self.catalog_files(slices))
        catalogs = self.catalogs_of(met_shards(self.manifest, slices))
        parts = [part for catalog in catalogs for part in catalog.parts if meets(part, slices)]
        self.files.keep_open(part.file for part in parts if not {*part.tables}.isdisjoint(tables))
        return {catalog.shard: catalog.parts for catalog in catalogs}

    def catalog_files(self, slices: Collection[Slice | None]) -> list[FileEntry]:
        names = {self.manifest.shards[number].catalog for number in met_shards(self.manifest, slices)}
        return [file for file in self.manifest.files if file.name in names]


def files_of(storage: Storage, checkpoint: Checkpoint, n_links: int = 1) -> OpenFiles:
    """Return the files of one of ``n_links`` checkpoints that are read together; none is open yet."""
    sizes = {file.name: file.n_bytes for file in checkpoint.manifest.files}
    return OpenFiles(checkpoint.near_dir or storage, checkpoint.directory, sizes, (), n_links)


class OpenChain:
    """The links of a checkpoint, and its other files. Every byte read through this object is checked.

    A file that is not kept open is opened when it is read, and may be gone by then. If the storage supports memory
    maps, files that are kept open stay readable after their writer removes them.

    Attributes:
        links: the links from which rows are read, newest first.
        files: the checkpoint's own files other than rows.
    """

    def __init__(self, storage: Storage, checkpoint: Checkpoint, links: Sequence[OpenLink], files: OpenFiles) -> None:
        self.storage, self.checkpoint = storage, checkpoint
        self.directory, self.manifest = checkpoint.directory, checkpoint.manifest
        self.links, self.files = links, files
        self._is_open = False

    @classmethod
    def of(cls, storage: Storage, checkpoint: Checkpoint, before: OpenChain | None = None) -> OpenChain:
        """Return a chain that shares open links with ``before``; files of other links are opened when they are read."""
        known = {(link.directory, link.manifest.save_id): link for link in (before.links if before is not None else ())}
        n_links = len(checkpoint.links)
        links = [
            known.get((link.directory, link.manifest.save_id)) or OpenLink.of(storage, link, n_links)
            for link in checkpoint.links
        ]
        return cls(storage, checkpoint, links, files_of(storage, checkpoint, n_links))

    @classmethod
    def open(cls, storage: Storage, checkpoint: Checkpoint, before: OpenChain | None = None) -> OpenChain:
        """Open all files, sharing open links with ``before``; index the tables that ``before`` has indexed.

        Raises CheckpointRemovedError, or CorruptCheckpointError if a file is missing or an indexed table is damaged.
        """
        chain = cls.of(storage, checkpoint, before).open_all()
        links = before.links if before is not None else ()
        for table in sorted({table for link in links for table in list(link.indexes)}):  # threads add to indexes
            if chain.manifest.table(table) is not None:
                list(chain._indexes(table))
        return chain

    def open_all(self) -> OpenChain:
        """Open all files that are not open yet; return this chain."""
        if not self._is_open:
            for link in self.links:
                rows = (file.name for file in link.manifest.files if layout.has_rows(file.name))
                link.files.keep_open(rows)
            self.files.keep_open(file.name for file in self.manifest.files if not layout.has_rows(file.name))
            self._is_open = True
        return self

    def close(self) -> None:
        """Close all files; a memory map lives until its last view is released."""
        for files in (self.files, *(link.files for link in self.links)):
            files.close()

    def twin(self) -> OpenChain:
        """Return a second chain on the same open files; closing one chain leaves the other open."""
        links = [OpenLink(link.checkpoint, link.files.twin()) for link in self.links]
        return OpenChain(self.storage, self.checkpoint, links, self.files.twin())

    def newest(self, count: int) -> OpenChain:
        return OpenChain(self.storage, self.checkpoint, self.links[:count], self.files)

    def table(self, name: str, slots: Sequence[str], ids: Int64s | None = None) -> ChainTable:
        """Return the reader of a table. Rows are merged from the newest link down to a link with the whole table.

        With ``ids`` (sorted, unique), only shards that may have some of the ids are opened. Raises
        CorruptCheckpointError if a catalog is damaged, or if a link lacks the table or has it with other slots.
        """
        from recckpt.sparse.files.chain_table import ChainTable
        from recckpt.sparse.files.merged_rows import down_to_whole

        sought = None if ids is None else IdSet(ids)
        return ChainTable(down_to_whole(link.reader(name, slots, sought) for link in self.links))

    def table_with(self, name: str, columns: Collection[str] | None, ids: Int64s | None = None) -> ChainTable:
        """Like :meth:`table`, with the slots in ``columns`` or all slots; KeyError if a slot does not exist.

        Raises TypeError if ``columns`` is a single name.
        """
        from recckpt.sparse.files.table_reader import asked_slots

        slots = asked_slots(name, self.manifest.named_table(name).slots, columns)
        return self.table(name, [slot.name for slot in slots], ids)

    def find(self, table: str, ids: Int64s, slot: SlotSpec, default: Any) -> AlignedRows:
        """Return a slot of the rows of ``ids``, in this order. Reads a link only for ids that no newer link has.

        Raises ValueError if ``default`` is neither a value nor a row of the slot, CorruptCheckpointError if a link has
        an id twice.
        """
        from recckpt.sparse.files.chain_table import aligned_rows

        return aligned_rows(self._indexes(table), table, ids, slot, default)

    def _indexes(self, table: str) -> Iterator[RowIndex]:
        """Yield the index of a table in each link, newest first; each index is made when the caller asks for it."""
        for link, reader in zip(self.links, self.table(table, []).links, strict=False):
            yield link.index(reader)

    def batches(
        self, slices: Collection[Slice | None], known: str = "", unknown: Collection[str] = ()
    ) -> tuple[Sequence[LinkBatches], Collection[str]]:
        """Open the files with rows or deletes of these slices; return the batches that a load reads, newest link first.

        ``known`` is the save id of the newest link whose rows the model already has, except in ``unknown`` tables; ""
        for none. Also returns the tables that continue from the known link.
        """
        from recckpt.sparse.files.part_reader import LinkBatches

        tables = {table.name for table in self.manifest.tables}
        opened, updates = list[LinkBatches](), set[str]()
        for link in self.links:
            if link.manifest.name == known:
                updates, tables = tables.difference(unknown), tables.intersection(unknown)
            if not tables:
                break
            opened.append(LinkBatches(link.files, link.directory, tables, link.open_parts(tables, slices)))
            tables = {name for name in tables if not link.manifest.named_table(name).is_whole}
        return opened, updates

    @cached_property
    def tensors(self) -> DenseTensors:
        return DenseTensors(self.files, self.directory, self.manifest)

    def state(self, name: str, *, is_mapped: bool = True) -> dict[str, Any]:
        """Return the dict in a ``.pt`` file, checked; empty without such a file. Imports torch.

        With ``is_mapped=False`` the file is read, not mapped, because a bad disk under a memory map kills the
        process.
        """
        from recckpt.dense.loader import load_state

        entry = self.manifest.file(name)
        return load_state(self.files, self.directory, entry, is_mapped=is_mapped) if entry else {}

    @contextmanager
    def mapped(self, buckets: Buckets) -> Iterator[OpenChain]:
        """Yield this chain with only those files kept open that have rows or deletes in these buckets.

        Each file is mapped once, if the storage supports memory maps, and closed at the end of the ``with`` block.
        """
        n_links = len(self.links)
        files = [files_of(self.storage, link.checkpoint, n_links) for link in self.links]
        links = [OpenLink(link.checkpoint, own, link.catalogs) for link, own in zip(self.links, files, strict=True)]
        chain = OpenChain(self.storage, self.checkpoint, links, self.files)
        try:
            for link in links:
                names = []
                for part in (part for catalog in link.catalogs for part in catalog.parts):
                    spans = ((batch.buckets, own) for batch in part.batches for own in buckets.get(batch.table, ()))
                    if any(begin < span[1] and span[0] < end for span, (begin, end) in spans):
                        names.append(part.file)
                link.files.keep_open(names)
            yield chain
        finally:
            for link in links:
                link.files.close()
