"""One checkpoint committed again at its place without some ids: a full one as a full one, a delta as a delta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recckpt.checkpoint.attempt import Attempt
from recckpt.checkpoint.copied_files import Advance, copy_others
from recckpt.checkpoint.link import OpenLink
from recckpt.checkpoint.shard_writer import ShardRecord, with_shards
from recckpt.errors import CorruptCheckpointError
from recckpt.forgetting.ids_in_files import IdsInFiles, rows_in_chain
from recckpt.forgetting.revised_part import OmittedRows, copy_part, revise_part
from recckpt.format import layout
from recckpt.format.catalog import Part
from recckpt.format.links import Link, Parent, RevisionOf
from recckpt.format.manifest import FileEntry, Manifest
from recckpt.format.tables import TableEntry
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.threads import run_all
from recckpt.storage import Storage


@dataclass(frozen=True)
class Revising:
    """A checkpoint that is to be committed again.

    Attributes:
        checkpoint: the one that is revised, with its chain.
        contents: which of the ids each of its links contains, newest first.
        below: of a delta, what its revision stands on, newest link first: the revision of its parent, where that has
            one; () of a full checkpoint.
        erasure: what is left out.
        request: because of which.
    """

    checkpoint: Checkpoint
    contents: Sequence[IdsInFiles]
    below: Sequence[Checkpoint]
    erasure: OmittedRows
    request: str

    def n_rows(self, table: str) -> int:
        """Return how many of the ids have a row of a table in the checkpoint."""
        return rows_in_chain(list(zip(self.checkpoint.links, self.contents, strict=True)), table)


def revise(storage: Storage, fence: Fence, revising: Revising, threads: int, advance: Advance) -> Checkpoint:
    """Write and commit the revision, as the owner of the output dir.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged; nothing is committed.
        OSError: the storage failed; nothing is committed.
        CommitNotDurableError: committed, perhaps, but not known to be durable.
        WriterFencedError: another writer has taken the output dir over.
    """
    of = revising.checkpoint.manifest
    attempt = Attempt.begin(storage, fence, of.ckpt_id, step=of.step, overwrite=True)
    with attempt.abandoned_on_error():
        files, shards = _write(storage, revising, attempt, storage.threads(threads), advance)
        attempt.commit(fence, with_shards(_head(revising, attempt, files), shards))
    return next(c for c in fence.listing.committed if c.directory == attempt.directory)


def _write(
    storage: Storage, revising: Revising, to: Attempt, threads: int, advance: Advance
) -> tuple[Sequence[FileEntry], Sequence[ShardRecord]]:
    """Write all files; return the entries of those that are of no shard, and the shards."""
    link, records = OpenLink.of(storage, revising.checkpoint), []
    files = copy_others(storage, revising.checkpoint, to, advance, threads)
    for catalog in link.catalogs:
        shard = to.shard(catalog.shard, catalog.shards)
        shard.add(run_all(lambda part: _part(link, part, to, revising, advance), catalog.parts, threads))
        records.append(shard.record())
    return files, records


def _part(link: OpenLink, part: Part, to: Attempt, revising: Revising, advance: Advance) -> Part | None:
    has_ids = part.file in revising.contents[0].parts
    made = revise_part(link, part, to, revising.erasure) if has_ids else copy_part(link, part, to)
    advance(part.n_bytes)
    return made


def _head(revising: Revising, attempt: Attempt, files: Sequence[FileEntry]) -> Manifest:
    """Return the manifest of the revision but for its shards."""
    of, below = revising.checkpoint.manifest, revising.below
    number = 1 + (of.revision_of.number if of.revision_of else 0)
    parent, n_rows = None, revising.n_rows(revising.erasure.tables[0])
    if below:
        base = below[0]
        parent = Parent(base.ckpt_id, base.manifest.origin, base.directory, base.manifest.origin_xxh3)
    return replace(
        of,
        save_id=attempt.save_id,
        epoch=attempt.intent.epoch,
        seq=attempt.seq,
        tables=tuple(_entry(table, revising) for table in of.tables),
        files=tuple(files),
        parent=parent,
        chain=tuple(Link(link.ckpt_id, link.manifest.origin, link.directory) for link in below),
        form_of=None,
        revision_of=RevisionOf(of.save_id, revising.checkpoint.directory, *of.place, number, revising.request, n_rows),
    )


def _entry(table: TableEntry, revising: Revising) -> TableEntry:
    """Return the entry of a table with the counts of the revision."""
    if table.name not in revising.erasure.tables:
        return table
    own, delta = revising.contents[0].tables[table.name], table.delta
    if delta is not None:
        n_rows = int(own.rows.sum())
        delta = replace(delta, upserts=delta.upserts - n_rows, deletes=delta.deletes - own.n_deletes)
    n_left = table.rows - revising.n_rows(table.name)
    if n_left < 0:
        path, found = layout.join(revising.checkpoint.directory, layout.MANIFEST), f"{table.rows} rows"
        raise CorruptCheckpointError(path, f"table {table.name!r}", found=found, expected="those of its chain at least")
    return replace(table, rows=n_left, delta=delta)
