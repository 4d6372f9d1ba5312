"""Reads a compacted checkpoint from disk before a superseded one is removed: checks so far read cached pages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from recckpt.checkpoint.chain import OpenLink
from recckpt.dense.tensors import check_file, read_index
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.output_dir import rotation
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.verifier import check_part
from recckpt.storage import Storage

log = logging.getLogger("recckpt")


def remove_checked(storage: Storage, fence: Fence, going: Sequence[Checkpoint], concurrency: int) -> list[str]:
    """Remove checkpoints as :meth:`Fence.remove` does; but if a superseding one is damaged, remove that one instead.

    Each compacted checkpoint is read completely, once, before the delta that it supersedes is removed.
    """
    gone = {victim.directory for victim in going}
    staying = [c for c in fence.listing.committed if c.manifest.is_compacted and c.directory not in gone]
    for compacted in (c for c in staying if any(_supersedes(c, victim) for victim in going)):
        problem = next(problems(storage, compacted, concurrency), None)
        if problem is None:
            continue
        at = compacted.directory
        log.error("%s/%s is damaged and removed; the superseded checkpoint stays: %s", storage.url, at, problem)
        fence.remove([compacted], concurrency)
        fence.look_again()  # deltas based on it are now read through the delta
        kept = {link.directory for c in fence.listing.committed if _supersedes(compacted, c) for link in c.links}
        going = [victim for victim in going if victim.directory not in kept]
    rotation.sync_superseders(storage, fence.listing, going)
    return fence.remove(going, concurrency)


def _supersedes(one: Checkpoint, other: Checkpoint) -> bool:
    return one.manifest.supersedes is not None and one.manifest.supersedes.save_id == other.manifest.save_id


def problems(storage: Storage, checkpoint: Checkpoint, concurrency: int) -> Iterator[CorruptCheckpointError]:
    """Read all bytes of a checkpoint, and yield an error per problem; an OSError of the storage is raised."""
    try:
        link = OpenLink.of(storage, checkpoint)
        parts = [part for catalog in link.catalogs for part in catalog.parts]
    except CorruptCheckpointError as error:
        yield error
        return
    threads = storage.threads(concurrency)
    manifest, directory = checkpoint.manifest, checkpoint.directory
    checks = run_all(lambda part: check_part(link.files, directory, manifest.tables, part), parts, threads)
    yield from (error for check in checks for error in check.errors)
    for file in (file for file in manifest.files if not layout.is_part(file.name)):
        yield from check_file(link.files, directory, file, index=None, advance=lambda n_bytes: None)
    for shard in range(len(manifest.shards)):
        try:
            read_index(link.files, directory, manifest, shard)
        except CorruptCheckpointError as error:
            yield error
