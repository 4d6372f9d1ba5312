"""A form is read once more before what it replaces goes: its compactor read what it wrote from the page cache."""

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
    """Remove checkpoints, as :meth:`Fence.remove`, but what a damaged form stands for; that form goes in its place.

    A form is read whole, once: with it goes, or stays, the delta that it is a form of.
    """
    gone = {victim.directory for victim in going}
    forms = [c for c in fence.listing.committed if c.manifest.form_of and c.directory not in gone]
    deltas = [victim for victim in going if victim.manifest.kind == "delta"]
    for form in (form for form in forms if any(_is_of(form, delta) for delta in deltas)):  # those that stay
        problem = next(problems(storage, form, concurrency), None)
        if problem is None:
            continue
        log.error(
            "%s/%s is damaged and removed; what it was to replace stays: %s", storage.url, form.directory, problem
        )
        fence.remove([form], concurrency)
        fence.look_again()  # deltas on it are read through the delta by now
        kept = {link.directory for c in fence.listing.committed if _is_of(form, c) for link in c.links}
        going = [victim for victim in going if victim.directory not in kept]
    rotation.sync_forms(storage, fence.listing, going)
    return fence.remove(going, concurrency)


def _is_of(form: Checkpoint, delta: Checkpoint) -> bool:
    return form.manifest.form_of is not None and form.manifest.form_of.save_id == delta.manifest.save_id


def problems(storage: Storage, checkpoint: Checkpoint, concurrency: int) -> Iterator[CorruptCheckpointError]:
    """Yield what is wrong with any byte of a checkpoint; an OSError of the storage passes through."""
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
