"""Commits one checkpoint again in its place, without some ids; a full checkpoint stays full, a delta stays a delta."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from recckpt.checkpoint.attempt import Advance, Attempt, ShardRecord, copy_others, with_shards
from recckpt.checkpoint.chain import OpenLink
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.buckets import is_among
from recckpt.format.catalog import Part
from recckpt.format.forgetting import Ids
from recckpt.format.manifest import FileEntry, Link, Manifest, Parent, Supersedes
from recckpt.format.tables import TableEntry
from recckpt.output_dir.fence import Fence
from recckpt.output_dir.forget_requests import meant_in, tables_of
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.catalogs import IdSet
from recckpt.sparse.files.part_reader import PartReader
from recckpt.sparse.files.part_writer import RowBatch, write_part
from recckpt.sparse.files.pieces import RowPiece
from recckpt.sparse.files.table_reader import ABSENT, DELETED, newest
from recckpt.sparse.files.verifier import RowSums, check_part
from recckpt.storage import Storage
from recckpt.types import SlotSpec

_Flags = npt.NDArray[np.bool_]  # one per id
_STEP_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class IdsInTable:
    """Which of the ids a table has in the checkpoint's own files, not counting its parents."""

    rows: _Flags  # the ids that have a row
    n_deletes: int  # number of deletes of the ids, repeated ones included
    deletes: _Flags  # the ids that have a delete
    parts: frozenset[str]  # the files that contain any of the ids

    def find(self, places: Ids) -> Ids:
        """Return, for indices into the ids: 0 if the id has a row, ``DELETED`` if it has a delete, else ``ABSENT``."""
        return np.where(self.rows[places], 0, np.where(self.deletes[places], DELETED, ABSENT))


IdsInFiles = dict[str, IdsInTable]  # name of a table -> its ids in a checkpoint's own files


def files_with(ids: IdsInFiles) -> frozenset[str]:
    return frozenset[str]().union(*(table.parts for table in ids.values()))


def ids_in_files(storage: Storage, checkpoint: Checkpoint, table: str, ids: Ids) -> IdsInFiles:
    """Find ids of a table, of its counts and its averages, in one checkpoint's own files; skip batches without them."""
    link = OpenLink.of(storage, checkpoint)
    meant = meant_in(checkpoint.manifest, table)
    names = {*tables_of(table), *meant}
    entries = {name: checkpoint.manifest.table(name) if name in meant else None for name in names}
    return {name: _of_table(link, entry, ids) for name, entry in entries.items()}


def _of_table(link: OpenLink, entry: TableEntry | None, ids: Ids) -> IdsInTable:
    rows, deletes = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
    n_deletes, parts = 0, set[str]()
    if entry is not None:
        sought = IdSet(ids)
        reader = link.reader(entry.name, ())
        for catalog in reader.catalogs:
            for part, _, piece in reader.batches(catalog, "rows", sought):
                parts.update([part.file] if _mark(rows, ids, piece.ids) else ())
            for part, _, piece in reader.batches(catalog, "deletes", sought):
                n_common = _mark(deletes, ids, piece.ids)
                n_deletes += n_common
                parts.update([part.file] if n_common else ())
    return IdsInTable(rows, n_deletes, deletes, frozenset(parts))


def _mark(flags: _Flags, ids: Ids, there: npt.NDArray[np.int64]) -> int:
    common = there[is_among(there, ids)]
    flags[np.searchsorted(ids, common)] = True
    return len(common)


def rows_in_chain(links: Sequence[tuple[Checkpoint, IdsInFiles]], table: str) -> int:
    """Return how many of the ids have a row in the checkpoint with these links, newest first. Pure."""
    of_table: list[IdsInTable] = []
    for checkpoint, of_link in links:
        entry = checkpoint.manifest.table(table)
        of_table += [] if entry is None or table not in of_link else [of_link[table]]
        if entry is None or entry.is_whole:
            break
    places = np.arange(len(links[0][1][table].rows))
    return sum(len(here) for _, here, _ in newest(of_table, places))


def _kept(reader: PartReader, slots: tuple[SlotSpec, ...], rewrite: Rewrite, sums: RowSums) -> Iterator[RowBatch]:
    for number, batch in enumerate(reader.part.batches):
        piece = RowPiece.of(reader, number, reader.read(number), is_checked=True)
        columns = piece.columns
        if batch.table in rewrite.tables:
            stays = np.flatnonzero(~is_among(piece.ids, rewrite.ids))
            if len(stays) < len(piece.ids):
                columns = [column[stays] for column in columns]
        if len(columns[0]):
            sums.add(batch.table, columns, slice(None))
            yield RowBatch.of(batch.table, slots, columns)


@dataclass(frozen=True)
class Rewrite:
    checkpoint: Checkpoint  # the superseded checkpoint, with its chain
    contents: Sequence[IdsInFiles]  # per link, newest first
    below: Sequence[Checkpoint]  # parents of the new checkpoint, newest first, perhaps rewritten; () if it is full
    tables: tuple[str, ...]  # tables that lose rows
    ids: Ids  # ids of the rows to remove
    request: str  # the request to forget

    def n_rows(self, table: str) -> int:
        return rows_in_chain(list(zip(self.checkpoint.links, self.contents, strict=True)), table)


def commit_without(storage: Storage, fence: Fence, rewrite: Rewrite, threads: int, advance: Advance) -> Checkpoint:
    """Write and commit a checkpoint without the ids, as the owner of the output dir.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged; nothing is committed.
        OSError: the storage failed; nothing is committed.
        CommitNotDurableError: the checkpoint may be committed, but may not be durable.
        WriterFencedError: another writer has taken over the output dir.
    """
    of = rewrite.checkpoint.manifest
    attempt = Attempt.begin(storage, fence, of.ckpt_id, step=of.step, overwrite=True)
    with attempt.abandoned_on_error():
        files, shards = _write(storage, rewrite, attempt, storage.threads(threads), advance)
        attempt.commit(fence, with_shards(_head(rewrite, attempt, files), shards))
    return next(c for c in fence.listing.committed if c.directory == attempt.directory)


def _write(
    storage: Storage, rewrite: Rewrite, to: Attempt, threads: int, advance: Advance
) -> tuple[Sequence[FileEntry], Sequence[ShardRecord]]:
    link, records = OpenLink.of(storage, rewrite.checkpoint), []
    files = copy_others(storage, rewrite.checkpoint, to, advance, threads)
    for catalog in link.catalogs:
        shard = to.shard(catalog.shard, catalog.shards)
        shard.add(run_all(lambda part: _part(link, part, to, rewrite, advance), catalog.parts, threads))
        records.append(shard.record())
    return files, records


def _part(link: OpenLink, part: Part, to: Attempt, rewrite: Rewrite, advance: Advance) -> Part | None:
    """Write a part, without the ids if it has any; return its catalog entry, or None if no rows are left.

    All other rows keep their bytes and order. The written part is read back and compared with the source.
    """
    name, tables = layout.join(to.directory, part.file), link.manifest.tables
    made: Part | None = part
    if part.file in files_with(rewrite.contents[0]):
        slots = link.manifest.named_table(part.tables[0]).slots if part.holds == "rows" else ()
        reader, sums = PartReader(link.files, link.directory, part, slots), RowSums()
        rows = _kept(reader, slots, rewrite, sums)
        made = write_part(lambda: (part.file, to.storage.create(name)), part.tables, slots, rows, holds=part.holds)
        sums.check_written(to.storage, to.directory, tables, made)
    else:  # copied unchanged; every byte is checked against the catalog
        with link.files.open(layout.join(link.directory, part.file)) as content, to.storage.create(name) as sink:
            while data := content.read(_STEP_BYTES):
                sink.write(data)
        for error in check_part(to.storage, to.directory, tables, part).errors:
            raise error
    advance(part.n_bytes)
    return made


def _head(rewrite: Rewrite, attempt: Attempt, files: Sequence[FileEntry]) -> Manifest:
    of, below, parent = rewrite.checkpoint.manifest, rewrite.below, None
    if below:
        base = below[0]
        parent = Parent(base.ckpt_id, base.manifest.name, base.directory, base.manifest.name_xxh3)
    where, n_rows = (rewrite.checkpoint.directory, *of.place), rewrite.n_rows(rewrite.tables[0])
    return replace(
        of,
        save_id=attempt.save_id,
        epoch=attempt.intent.epoch,
        seq=attempt.seq,
        tables=tuple(_entry(table, rewrite) for table in of.tables),
        files=tuple(files),
        parent=parent,
        chain=tuple(Link(link.ckpt_id, link.manifest.name, link.directory) for link in below),
        supersedes=Supersedes(of.save_id, of.xxh3, *where, "fewer", "forgotten", rewrite.request, n_rows),
    )


def _entry(table: TableEntry, rewrite: Rewrite) -> TableEntry:
    if table.name not in rewrite.tables:
        return table
    own, delta = rewrite.contents[0][table.name], table.delta
    if delta is not None:
        n_rows = int(own.rows.sum())
        delta = delta.but(upserts=delta.upserts - n_rows, deletes=delta.deletes - own.n_deletes)
    n_left = table.rows - rewrite.n_rows(table.name)
    if n_left < 0:
        path, found = layout.join(rewrite.checkpoint.directory, layout.MANIFEST), f"{table.rows} rows"
        raise CorruptCheckpointError(path, f"table {table.name!r}", found=found, expected="at least those in its chain")
    return table.but(rows=n_left, delta=delta)
