"""One checkpoint committed again at its place without some ids: a full one as a full one, a delta as a delta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recckpt.checkpoint.copied_files import copy_others
from recckpt.checkpoint.link import OpenLink
from recckpt.errors import CommitNotDurableError, CorruptCheckpointError, WriterFencedError
from recckpt.forgetting.held_ids import Held, rows_in_chain
from recckpt.forgetting.revised_part import OmittedRows, copy_part, revise_part
from recckpt.format import layout
from recckpt.format.catalog import Catalog, Part
from recckpt.format.catalog import encode as encode_catalog
from recckpt.format.links import Link, Parent, RevisionOf
from recckpt.format.manifest import FileEntry, Manifest, ShardEntry
from recckpt.format.tables import TableEntry
from recckpt.output_dir import rotation
from recckpt.output_dir.checkpoint_dir import Intent
from recckpt.output_dir.commit import begin, commit
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.new_checkpoint import Target
from recckpt.parallel.threads import run_all
from recckpt.storage import Storage
from recckpt.storage.transfers import VISIBLE


@dataclass(frozen=True)
class Revising:
    """A checkpoint that is to be committed again.

    Attributes:
        checkpoint: it, with what it stands on.
        held: what each of its links holds of the ids, newest first.
        below: of a delta, what its revision stands on, newest link first: the revision of its parent, where that has
            one; () of a full checkpoint.
        erasure: what is left out.
        request: because of which.
    """

    checkpoint: Checkpoint
    held: Sequence[Held]
    below: Sequence[Checkpoint]
    erasure: OmittedRows
    request: str

    def n_rows(self, table: str) -> int:
        """Return how many of the ids have a row of a table in the checkpoint."""
        return rows_in_chain(list(zip(self.checkpoint.links, self.held, strict=True)), table)


def revise(storage: Storage, fence: Fence, revising: Revising, threads: int) -> Checkpoint:
    """Write and commit the revision, as the owner of the output dir.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged; nothing is committed.
        OSError: the storage failed; nothing is committed.
        CommitNotDurableError: committed, perhaps, but not known to be durable.
        WriterFencedError: another writer has taken the output dir over.
    """
    of = revising.checkpoint.manifest
    intent, seq = begin(storage, fence, of.ckpt_id, step=of.step, overwrite=True, base=None)
    to = Target(storage, intent.directory, intent.save_id)
    try:
        shards, files = _write(storage, revising, to, storage.threads(threads))
        record = _record(revising, intent, seq, shards, files)
        commit(storage, fence, intent.directory, record, VISIBLE)
    except (WriterFencedError, CommitNotDurableError):
        raise  # the directory is the new owner's to judge, or holds a checkpoint
    except BaseException:
        rotation.abandon(storage, intent.directory)
        raise
    return next(c for c in fence.listing.committed if c.directory == intent.directory)


def _write(
    storage: Storage, revising: Revising, to: Target, threads: int
) -> tuple[tuple[ShardEntry, ...], tuple[FileEntry, ...]]:
    """Write all files, and return the catalogs and all entries."""
    link = OpenLink.of(storage, revising.checkpoint)
    files = copy_others(storage, revising.checkpoint, to, lambda n_bytes: None, threads)
    shards = []
    for catalog in link.catalogs:
        parts = run_all(lambda part: _part(link, part, to, revising), catalog.parts, threads)
        written = Catalog(to.save_id, catalog.shard, catalog.shards, tuple(part for part in parts if part))
        entry = to.write(layout.catalog(catalog.shard, catalog.shards), encode_catalog(written))
        files += [entry, *(FileEntry(part.file, part.n_bytes) for part in written.parts)]
        shards.append(ShardEntry(entry.name, written.buckets))
    return tuple(shards), tuple(sorted(files, key=lambda file: file.name))


def _part(link: OpenLink, part: Part, to: Target, revising: Revising) -> Part | None:
    if part.file in revising.held[0].parts:
        return revise_part(link, part, to, revising.erasure)
    return copy_part(link, part, to)


def _record(
    revising: Revising,
    intent: Intent,
    seq: int,
    shards: tuple[ShardEntry, ...],
    files: tuple[FileEntry, ...],
) -> Manifest:
    of, below = revising.checkpoint.manifest, revising.below
    number = 1 + (of.revision_of.number if of.revision_of else 0)
    parent, n_rows = None, revising.n_rows(revising.erasure.tables[0])
    if below:
        base = below[0]
        parent = Parent(base.ckpt_id, base.manifest.origin, base.directory, base.manifest.origin_xxh3)
    return replace(
        of,
        save_id=intent.save_id,
        epoch=intent.epoch,
        seq=seq,
        shards=shards,
        tables=tuple(_entry(table, revising) for table in of.tables),
        files=files,
        parent=parent,
        chain=tuple(Link(link.ckpt_id, link.manifest.origin, link.directory) for link in below),
        form_of=None,
        revision_of=RevisionOf(of.save_id, revising.checkpoint.directory, *of.place, number, revising.request, n_rows),
    )


def _entry(table: TableEntry, revising: Revising) -> TableEntry:
    """Return the entry of a table with the counts of the revision."""
    if table.name not in revising.erasure.tables:
        return table
    held, delta = revising.held[0].tables[table.name], table.delta
    if delta is not None:
        n_rows = int(held.rows.sum())
        delta = replace(delta, upserts=delta.upserts - n_rows, deletes=delta.deletes - held.n_deletes)
    n_left = table.rows - revising.n_rows(table.name)
    if n_left < 0:
        path, found = layout.join(revising.checkpoint.directory, layout.MANIFEST), f"{table.rows} rows"
        raise CorruptCheckpointError(path, f"table {table.name!r}", found=found, expected="those of its chain at least")
    return replace(table, rows=n_left, delta=delta)
