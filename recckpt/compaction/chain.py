"""A chain by its name, which is all that travels to a worker, and opened there (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CheckpointRemovedError, CorruptCheckpointError
from recckpt.format import layout
from recckpt.output_dir.checkpoint_dir import read_manifest
from recckpt.output_dir.listing import Checkpoint
from recckpt.storage import Storage, open_storage


@dataclass(frozen=True)
class ChainName:
    """Where the links of a chain are, newest first, and the checksums of their manifests."""

    url: str  # of the output dir
    links: tuple[tuple[str, int], ...]


@lru_cache(maxsize=1)
def opened(name: ChainName) -> OpenChain:
    """Return a chain; a process reads its catalogs once, for all the parts that it writes.

    Raises:
        CheckpointRemovedError: a link was removed meanwhile.
        CorruptCheckpointError: a link has another manifest than the chain was named with, or a catalog is damaged.
    """
    storage = open_storage(name.url)
    newest, *below = (_named(storage, directory, xxh3) for directory, xxh3 in name.links)
    chain = OpenChain.of(storage, Checkpoint(newest.directory, newest.manifest, tuple(below)))
    for link in chain.links:
        _ = link.catalogs
    return chain


def _named(storage: Storage, directory: str, xxh3: int) -> Checkpoint:
    manifest = read_manifest(storage, directory)
    if manifest is None:
        raise CheckpointRemovedError(storage.url_of(directory))
    if manifest.xxh3 != xxh3:
        path, found = layout.join(directory, layout.MANIFEST), f"the checksum {manifest.xxh3:016x}"
        raise CorruptCheckpointError(path, "", found=found, expected=f"{xxh3:016x}, as when the chain was found")
    return Checkpoint(directory, manifest)
