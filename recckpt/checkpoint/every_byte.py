"""Every byte of one checkpoint, read and compared with its checksums (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator

from recckpt.checkpoint.link import OpenLink
from recckpt.dense.file_check import check_file
from recckpt.dense.tensors import read_index
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.output_dir.listing import Checkpoint
from recckpt.parallel.threads import run_all
from recckpt.sparse.files.verifier import check_part
from recckpt.storage import Storage


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
    checks = run_all(lambda part: check_part(link.files, directory, manifest.tables, part, _unseen), parts, threads)
    yield from (error for check in checks for error in check.errors)
    yield from _problems_of_others(link)


def _problems_of_others(link: OpenLink) -> Iterator[CorruptCheckpointError]:
    manifest, directory = link.manifest, link.directory
    for file in (file for file in manifest.files if not layout.is_part(file.name)):
        yield from check_file(link.files, directory, file, index=None, advance=_unseen)
    for shard in range(len(manifest.shards)):
        try:
            read_index(link.files, directory, manifest, shard)
        except CorruptCheckpointError as error:
            yield error


def _unseen(*_: object) -> None:
    """Do nothing with what is read: its checksums are all that matters here."""
