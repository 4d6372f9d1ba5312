"""A chain by its name, which is all that travels to a worker, and opened there (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.catalog import Catalog
from recckpt.format.manifest import Manifest
from recckpt.output_dir.checkpoint_dir import read_manifest
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import HeldFiles
from recckpt.sparse.files.catalogs import read_catalogs
from recckpt.sparse.files.link_cursors import down_to_whole
from recckpt.sparse.files.table_reader import TableReader
from recckpt.storage import Storage, open_storage

Buckets = Mapping[str, Sequence[tuple[int, int]]]  # table -> ranges [begin, end)


@dataclass(frozen=True)
class ChainName:
    """Where the links of a chain are, newest first, and the checksums of their manifests."""

    url: str  # of the output dir
    links: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class _ChainLink:
    """One checkpoint of a chain; nothing of it is open but its catalogs, which have been read."""

    storage: Storage
    directory: str
    manifest: Manifest
    catalogs: Sequence[Catalog]

    def files(self, buckets: Buckets) -> HeldFiles:
        """Return its files, open those that have rows or deletes in these buckets."""
        parts = (part for catalog in self.catalogs for part in catalog.parts)
        met = [
            part.file
            for part in parts
            if any(
                begin < batch.buckets[1] and batch.buckets[0] < end
                for batch in part.batches
                for begin, end in buckets.get(batch.table, ())
            )
        ]
        return _held(self.storage, self.directory, self.manifest, met)


class OpenChain:
    """The links of a chain, whose catalogs have been read."""

    def __init__(self, name: ChainName) -> None:
        self._links = [_open_link(name.url, directory, xxh3) for directory, xxh3 in name.links]

    @property
    def newest(self) -> Manifest:
        """The manifest of the checkpoint."""
        return self._links[0].manifest

    @contextmanager
    def reading(self, buckets: Buckets) -> Iterator[dict[str, Sequence[TableReader]]]:
        """Give the links of each of these tables, newest first, down to one that holds all of it.

        Files that have something in these buckets are mapped once, where the storage has maps: they stay whole though a
        writer removes them meanwhile.
        """
        files: list[HeldFiles] = []
        try:
            for link in self._links:
                files.append(link.files(buckets))
            yield {table: self._readers(table, files) for table in buckets}
        finally:
            for held in files:
                held.close()

    def _readers(self, table: str, files: Sequence[HeldFiles]) -> Sequence[TableReader]:
        entries = ((link, link.manifest.table(table), held) for link, held in zip(self._links, files, strict=True))
        return down_to_whole(
            TableReader(held, link.directory, link.catalogs, entry, [slot.name for slot in entry.slots])
            for link, entry, held in entries
            if entry is not None
        )


@lru_cache(maxsize=1)
def opened(name: ChainName) -> OpenChain:
    """Return a chain; a process reads its catalogs once, for all the parts that it writes.

    Raises:
        CheckpointRemovedError: a link was removed meanwhile.
        CorruptCheckpointError: a link has another manifest than the chain was named with, or a catalog is damaged.
    """
    return OpenChain(name)


def _open_link(url: str, directory: str, xxh3: int) -> _ChainLink:
    storage = open_storage(url)
    manifest = read_manifest(storage, directory)
    if manifest is None:
        raise CheckpointRemovedError(layout.join(url, directory))
    if manifest.xxh3 != xxh3:
        path, found = layout.join(directory, layout.MANIFEST), f"the checksum {manifest.xxh3:016x}"
        raise CorruptCheckpointError(path, "", found=found, expected=f"{xxh3:016x}, as when the chain was found")
    files = _held(storage, directory, manifest, ())
    return _ChainLink(storage, directory, manifest, read_catalogs(Checkpoint(directory, manifest), files))


def _held(storage: Storage, directory: str, manifest: Manifest, first: Iterable[str]) -> HeldFiles:
    return HeldFiles(storage, directory, {file.name: file.n_bytes for file in manifest.files}, first)
