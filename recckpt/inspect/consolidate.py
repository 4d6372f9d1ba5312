"""A checkpoint's model in one file, for those who have neither recckpt nor several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from recckpt.dense.stored_shards import ShardReader, check_apart
from recckpt.format import layout
from recckpt.format.tensor_index import MODEL
from recckpt.output_dir.listing import Checkpoint, locate_path
from recckpt.output_dir.open_files import HeldFiles
from recckpt.output_dir.read_again import until_whole
from recckpt.storage import Storage, open_parent
from recckpt.text import Progress


@dataclass(frozen=True)
class Consolidated:
    """What :func:`consolidate` wrote.

    Attributes:
        ckpt_id: of the checkpoint.
        names: of all that is in the file.
        sharded: names of those that lay in chunks.
        n_bytes: size of the file.
    """

    ckpt_id: str
    names: tuple[str, ...]
    sharded: tuple[str, ...]
    n_bytes: int


def consolidate(path: str, out: str) -> Consolidated:
    """Write the dense state of a model as one ``model.pt``, whatever ranks and meshes it was saved on.

    All that is read is checked. Sharded tensors pass through memory one at a time, the others all at once.

    Args:
        path: a checkpoint, or an output dir, whose newest is meant; any fsspec URL.
        out: the file to write, which must not exist; any fsspec URL.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint.
        CheckpointRemovedError: time and again it was removed while it was read.
        CorruptCheckpointError: a file is damaged; nothing is left of ``out``.
        FormatVersionError: written by a newer format.
        FileExistsError: there is a file ``out``.
        OSError: ``out`` cannot be written; nothing is left of it.
    """
    return until_whole(lambda: locate_path(path), lambda found: _write(*found, out))


def _write(storage: Storage, checkpoint: Checkpoint, out: str) -> Consolidated:
    from recckpt.dense.loader import load_state  # torch, which no other command needs
    from recckpt.dense.torch_writer import Later, write_torch_file

    directory, manifest = checkpoint.directory, checkpoint.manifest
    sizes = {file.name: file.n_bytes for file in manifest.files if layout.has_tensors(file.name)}
    files = HeldFiles(storage, directory, sizes)
    shards, entry = ShardReader(files, directory, manifest), manifest.file(layout.MODEL)
    state: dict[str, Any] = load_state(files, directory, entry) if entry else {}
    sharded = {tensor.name: tensor for tensor in shards.tensors.values() if tensor.of == MODEL}
    check_apart(state, sharded, layout.join(directory, layout.MODEL))
    state |= {name: Later(t.dtype, t.shape, partial(shards.read, t)) for name, t in sharded.items()}
    total = sum(tensor.nbytes for tensor in sharded.values()) + (entry.n_bytes if entry else 0)
    target, name = open_parent(out)
    try:
        with target.create(name) as sink, Progress(f"consolidating {manifest.ckpt_id}", total) as progress:
            write_torch_file(state, sink, progress.advance)
    finally:
        shards.close()
    return Consolidated(manifest.ckpt_id, tuple(state), tuple(sharded), sink.n_bytes)
