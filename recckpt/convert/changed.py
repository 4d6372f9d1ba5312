"""What has changed between two checkpoints of a chain: rows that are new or other, and ids that are gone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pyarrow as pa

from recckpt.convert.source import Int64s
from recckpt.errors import ConversionError
from recckpt.format.buckets import N_BUCKETS
from recckpt.format.distinct import distinct
from recckpt.output_dir.at_path import counted_back
from recckpt.output_dir.listing import Checkpoint
from recckpt.sparse.files.link_cursors import LinkCursor, bucket_ranges, ids_of
from recckpt.sparse.files.merged_rows import merged_range
from recckpt.sparse.files.once import NamedIds
from recckpt.sparse.files.table_reader import TableReader
from recckpt.storage import Storage, open_parent

_BUDGET_BYTES = 128 << 20
_EVERYWHERE = (0, N_BUCKETS)


def links_since(storage: Storage, checkpoint: Checkpoint, since: str) -> int:
    """Return how many links of a chain, newest first, are newer than the one of that id or path; 0 of the newest.

    Raises:
        ConversionError: the checkpoint does not stand on it.
    """
    for number, link in enumerate(checkpoint.links):
        if since in (link.ckpt_id, link.directory) or ("/" in since and _is_at(since, storage, link.directory)):
            return number
    meant = _counted_back(storage, since)
    for number, link in enumerate(checkpoint.links):
        if meant is not None and link.manifest.origin == meant.manifest.origin:
            return number
    found = f"{since!r}, which {checkpoint.ckpt_id!r} does not stand on"
    below = ", ".join(link.ckpt_id for link in checkpoint.below)
    expected = f"one of {below}" if below else "a checkpoint that it stands on, and it is full: it stands on none"
    remedy = "export all of it, or save with Saver(deltas=True)"
    raise ConversionError(checkpoint.directory, "since", found=found, expected=expected, remedy=remedy)


def _counted_back(storage: Storage, since: str) -> Checkpoint | None:
    """Return the checkpoint that ``latest~N`` means, alone or as a path in the output dir."""
    around, name = open_parent(since) if "/" in since else (storage, since)
    return counted_back(storage, name) if _real(around.url) == _real(storage.url) else None


def _is_at(path: str, storage: Storage, directory: str) -> bool:
    around, name = open_parent(path)
    return name == directory and _real(around.url) == _real(storage.url)


def _real(url: str) -> str:
    return url if "://" in url else os.path.realpath(url)


def upserts(links: Sequence[TableReader]) -> Iterator[pa.RecordBatch]:
    """Yield the rows that the newest of some links have, in bucket order."""
    if not links:
        return iter(())
    return merged_range(links, _EVERYWHERE, _BUDGET_BYTES, lambda piece, rows: None)


def deletes(links: Sequence[TableReader]) -> Iterator[Int64s]:
    """Yield the ids that the newest of some links delete, each once, in the order of ranges of buckets."""
    chain = [LinkCursor(link, _EVERYWHERE) for link in links]
    for begin, end in bucket_ranges(links, _EVERYWHERE, _BUDGET_BYTES):
        named = NamedIds()
        for cursor in chain:
            rows, gone = cursor.between(begin, end)
            named.add(ids_of(rows))
            deleted = distinct(ids_of(gone))
            new = deleted[named.is_new(deleted)]
            if len(new):
                yield new
            named.add(deleted)
