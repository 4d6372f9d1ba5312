"""Saves the rows of a damaged table that are still whole, batch by batch, link by link (no torch here)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.buckets import N_BUCKETS, bucket_of
from recckpt.format.links import Link, Parent
from recckpt.format.manifest import Manifest
from recckpt.inspect.fuller import Fuller, fuller_one
from recckpt.inspect.salvage_link import LinkRemains, Lost
from recckpt.output_dir.at_path import counted_back
from recckpt.output_dir.checkpoint_dir import read_manifest
from recckpt.output_dir.listing import Checkpoint, age, look_around
from recckpt.sparse.files.arrow_format import ids_in, int64_array
from recckpt.sparse.files.once import Int64s, NamedIds
from recckpt.sparse.files.table_reader import table_schema
from recckpt.storage import SinkFile, Storage, new_file, open_parent, open_storage
from recckpt.text import Progress, escaped


@dataclass(frozen=True)
class Salvaged:
    """What :func:`salvage` did."""

    rows: int  # rows in the file that was written
    expected: int  # rows of the table by the manifest
    unverified: int  # those of ``rows`` that nothing vouches for
    lost: tuple[Lost, ...]  # what is not there, in the order of the files, of a delta by link, the newest first
    ckpt_id: str  # the checkpoint that was meant
    fuller: Fuller | None  # an older checkpoint that has more rows

    @property
    def n_unverified_left(self) -> int:
        """How many rows are there that nothing vouches for, and that were left out for that."""
        return sum(lost.unverified for lost in self.lost)


def salvage(path: str, table: str, out: str, *, unverified: bool = False) -> Salvaged:
    """Write the rows of a table that are still whole to one Arrow IPC file: ``id`` and a column a slot.

    A batch is whole if each of its columns has the checksum in the catalog. From a damaged catalog, those batches are
    taken whose checksums can still be read there and hold. Where several shards have the same id, the row of the first
    is taken. Needs memory for one batch, and where shards overlap in their buckets, 8 bytes a row.

    Of a delta, the newest link comes first. Rows of older links are left out where a newer link has lost some in their
    buckets: they may have changed since, or been deleted. That takes 8 bytes for each row of the newer links.

    Args:
        path: the checkpoint, or an output dir, whose newest is meant, damaged or not; any fsspec URL.
        table: name of the table.
        out: the file to write, which must not exist; any fsspec URL.
        unverified: whether to also take rows of parts whose catalog cannot be read, which no checksum covers, and those
            of older links that may have changed since.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: its manifest is damaged, so that nothing says what should be there.
        FormatVersionError: written by a newer format.
        KeyError: no such table.
        FileExistsError: ``out`` exists.
        OSError: ``out`` cannot be written; nothing of it is left.
    """
    storage, checkpoint = _located(path)
    manifest = checkpoint.manifest
    entry = manifest.named_table(table)
    remains = _Remains(storage, table, _links_of(storage, checkpoint, table))
    with new_file(out) as sink, Progress(f"salvaging {escaped(table)}", entry.rows * entry.row_bytes) as progress:
        # Not a context manager: it would complete the file on an error too.
        writer = pa.ipc.new_file(pa.PythonFile(SinkFile(sink), "w"), table_schema(entry.slots))
        for batch in remains.batches(unverified=unverified):
            writer.write_batch(batch)
            progress.add_rows(remains.n_rows)
            progress.advance(batch.num_rows * entry.row_bytes)
        writer.close()
    lost = tuple(remains.lost)
    fuller = fuller_one(storage, checkpoint, table, remains.n_rows, lost) if lost else None
    return Salvaged(remains.n_rows, entry.rows, remains.n_unverified, lost, manifest.ckpt_id, fuller)


def _located(path: str) -> tuple[Storage, Checkpoint]:
    """Return the checkpoint that a path means, though it may be damaged; of an output dir the newest."""
    storage, directory = open_parent(path)
    manifest = read_manifest(storage, directory)
    if manifest is not None:
        return storage, Checkpoint(directory, manifest)
    inside = open_storage(path)
    listing = look_around(inside)
    newest = max((*listing.committed, *listing.lost), key=age, default=None)
    if newest is not None:
        return inside, replace(newest, below=())
    counted = counted_back(storage, directory)
    if counted is None:
        what = inside.why_empty() or f"found no {layout.MANIFEST}"
        raise CheckpointNotFoundError(f"{path}: {what}; name the checkpoint's own directory")
    return storage, Checkpoint(counted.directory, counted.manifest)


class _Remains:
    """The rows of a table that are left in its links."""

    def __init__(self, storage: Storage, table: str, links: Iterable[Checkpoint | Lost]) -> None:
        self._storage, self._table, self._links = storage, table, list(links)
        self.n_rows = self.n_unverified = 0
        self.lost: list[Lost] = []
        self._newer = NamedIds()
        self._is_doubtful = np.zeros(N_BUCKETS, np.bool_)  # where newer links have lost rows or deletes

    def batches(self, *, unverified: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows, and keep account of what is lost."""
        for link in self._links:
            if isinstance(link, Lost):
                self._lose([link])
            else:
                yield from self._of_link(link, unverified=unverified, is_last=link is self._links[-1])

    def _of_link(self, link: Checkpoint, *, unverified: bool, is_last: bool) -> Iterator[pa.RecordBatch]:
        remains = LinkRemains(self._storage, link, self._table)
        own, n_doubtful = list[Int64s](), 0
        for batch, vouched in remains.batches(unverified=unverified):
            ids = ids_in(batch)
            own += [] if is_last else [ids]
            is_wanted = self._newer.is_new(ids)
            is_doubtful = is_wanted & self._is_doubtful[bucket_of(ids)]
            n_doubtful += int(is_doubtful.sum())
            is_wanted &= unverified | ~is_doubtful
            n_wanted = int(is_wanted.sum())
            self.n_rows += n_wanted
            self.n_unverified += int((is_wanted & is_doubtful).sum()) if vouched else n_wanted
            if n_wanted:
                yield batch if n_wanted == len(ids) else batch.take(int64_array(np.flatnonzero(is_wanted)))
        lost = list(remains.lost())
        if n_doubtful and not unverified:
            path, reason = layout.join(link.directory, layout.SPARSE_DIR), "may have changed or gone in newer links"
            lost.append(Lost(path, _span(self._is_doubtful), n_doubtful, reason, n_doubtful))
        self._newer.add(remains.deleted, *own)
        self._lose(lost)

    def _lose(self, lost: Iterable[Lost]) -> None:
        for one in lost:
            self.lost.append(one)
            self._is_doubtful[slice(*one.buckets)] = True


def _span(buckets: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return [begin, end) of the marked buckets."""
    marked = np.flatnonzero(buckets)
    return int(marked[0]), int(marked[-1]) + 1


def _links_of(storage: Storage, newest: Checkpoint, table: str) -> Iterator[Checkpoint | Lost]:
    """Yield what a table is read from, newest link first, down to one that holds all of it; Lost for what is not there.

    Below a link that is lost the others are where the manifest says they were.
    """
    above, entry = newest.manifest, newest.manifest.named_table(table)
    yield newest
    slots = entry.slots
    for hint in newest.manifest.chain:
        if entry.is_whole:
            return
        place, record, problem = _find(storage, hint, above.parent)
        table_there = None if record is None else record.table(table)
        if record is None or table_there is None or table_there.slots != slots:
            path = layout.join(place, layout.MANIFEST)
            yield Lost(path, (0, N_BUCKETS), None, problem or f"has no table {table!r} with these slots")
            above = newest.manifest if record is None else record
            continue
        entry, above = table_there, record
        yield Checkpoint(place, record)


def _find(storage: Storage, hint: Link, parent: Parent | None) -> tuple[str, Manifest | None, str]:
    """Return where a link is, its manifest, and what is wrong where that is not found."""
    problem = "no such file"
    try:
        record = read_manifest(storage, hint.directory)
        if record is not None and _is_meant(record, hint, parent):
            return hint.directory, record, ""
        problem = "a manifest of another save" if record else problem
    except (CorruptCheckpointError, FormatVersionError, OSError) as error:
        problem = f"unreadable ({getattr(error, 'found', error)})"
    listing = look_around(storage)
    for other in (*listing.committed, *listing.lost):
        if _is_meant(other.manifest, hint, parent):
            return other.directory, other.manifest, ""
    return hint.directory, None, problem


def _is_meant(record: Manifest, hint: Link, parent: Parent | None) -> bool:
    """Say whether this is the link, or a form of it; its checksum is known from the link above where that is there."""
    checksum = parent.manifest if parent is not None and parent.save_id == hint.save_id else None
    return record.origin == hint.save_id and checksum in (None, record.origin_xxh3)
