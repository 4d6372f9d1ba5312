"""A chain by its name, which is all that travels to a worker, and opened there (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
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
from recckpt.storage import open_storage


@dataclass(frozen=True)
class ChainName:
    """Where the links of a chain are, newest first, and the checksums of their manifests."""

    url: str  # of the output dir
    links: tuple[tuple[str, int], ...]


class OpenChain:
    """The links of a chain, whose catalogs have been read."""

    def __init__(self, name: ChainName) -> None:
        self._links = [_open_link(name.url, directory, xxh3) for directory, xxh3 in name.links]

    @property
    def newest(self) -> Manifest:
        """The manifest of the checkpoint."""
        return self._links[0].manifest

    def links_of(self, table: str) -> Sequence[TableReader]:
        """Return what the links hold of a table of the newest, down to one that holds all of it."""
        entries = ((link, entry) for link in self._links if (entry := link.manifest.table(table)) is not None)
        return down_to_whole(
            TableReader(link.files, link.directory, link.catalogs, entry, [slot.name for slot in entry.slots])
            for link, entry in entries
        )


@lru_cache(maxsize=1)
def opened(name: ChainName) -> OpenChain:
    """Return a chain; a process reads its catalogs once, for all the parts that it writes.

    Raises:
        CheckpointRemovedError: a link was removed meanwhile.
        CorruptCheckpointError: a link has another manifest than the chain was named with, or a catalog is damaged.
    """
    return OpenChain(name)


@dataclass(frozen=True)
class _Link:
    files: HeldFiles
    directory: str
    manifest: Manifest
    catalogs: Sequence[Catalog]


def _open_link(url: str, directory: str, xxh3: int) -> _Link:
    storage = open_storage(url)
    manifest = read_manifest(storage, directory)
    if manifest is None:
        raise CheckpointRemovedError(layout.join(url, directory))
    if manifest.xxh3 != xxh3:
        path, found = layout.join(directory, layout.MANIFEST), f"the checksum {manifest.xxh3:016x}"
        raise CorruptCheckpointError(path, "", found=found, expected=f"{xxh3:016x}, as when the chain was found")
    files = HeldFiles(storage, directory, {file.name: file.n_bytes for file in manifest.files}, first=())
    return _Link(files, directory, manifest, read_catalogs(Checkpoint(directory, manifest), files))
