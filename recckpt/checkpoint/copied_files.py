"""All files of a checkpoint but the parts: copied and checked, and those that repeat a save id written anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import BinaryIO

from recckpt.checkpoint.attempt import Attempt
from recckpt.checkpoint.link import files_of
from recckpt.dense.file_check import check_file
from recckpt.dense.tensors import read_index
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout, tensor_index
from recckpt.format.manifest import FileEntry
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import OpenFiles
from recckpt.parallel.threads import run_all
from recckpt.storage import HashingSink, Storage

_STEP_BYTES = 8 << 20
Advance = Callable[[int], object]


def copied_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the files that are copied as they are."""
    return sum(entry.n_bytes for entry in _copied(checkpoint))


def copy_others(
    storage: Storage, checkpoint: Checkpoint, to: Attempt, advance: Advance, threads: int
) -> list[FileEntry]:
    """Copy dense state, registered objects and positions, and return the entries of the new files.

    Raises:
        CheckpointRemovedError: the checkpoint was removed meanwhile.
        CorruptCheckpointError: a file is damaged, or its copy.
        OSError: the storage failed.
    """
    manifest, directory = checkpoint.manifest, checkpoint.directory
    files = files_of(storage, checkpoint)
    run_all(lambda entry: _copy(files, directory, entry, to, advance), _copied(checkpoint), storage.threads(threads))
    entries = list(_copied(checkpoint))
    for shard in range(len(manifest.shards)):
        index = read_index(files, directory, manifest, shard)
        if index is not None:
            data = tensor_index.encode(replace(index, save_id=to.save_id))
            entries.append(to.write(layout.dense_index(shard, len(manifest.shards)), data))
    return entries


def _copied(checkpoint: Checkpoint) -> list[FileEntry]:
    manifest, shards = checkpoint.manifest, len(checkpoint.manifest.shards)
    written = {shard.catalog for shard in manifest.shards} | {layout.dense_index(n, shards) for n in range(shards)}
    return [file for file in manifest.files if not layout.is_part(file.name) and file.name not in written]


def _copy(files: OpenFiles, directory: str, entry: FileEntry, to: Attempt, advance: Advance) -> None:
    source, copy = layout.join(directory, entry.name), layout.join(to.directory, entry.name)
    with files.open(source) as content, to.storage.create(copy) as sink:
        hashing = HashingSink(sink)
        for data in _pieces(content):
            hashing.write(data)
            advance(len(data))
        if hashing.xxh3 != entry.xxh3:
            found, expected = f"{hashing.xxh3:016x}", f"{entry.xxh3 or 0:016x}"
            raise CorruptCheckpointError(source, "its checksum", found=found, expected=expected)
    for error in check_file(to.storage, to.directory, entry, index=None, advance=lambda n_bytes: None):
        raise error


def _pieces(content: BinaryIO) -> Iterator[bytes]:
    while data := content.read(_STEP_BYTES):
        yield data
