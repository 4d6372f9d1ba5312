"""Writes the dense state of a model as one torch file, which can be loaded without recckpt and on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from recckpt.checkpoint.chain import OpenChain
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.output_dir.at_path import locate_path
from recckpt.output_dir.listing import Checkpoint
from recckpt.output_dir.open_files import first_whole
from recckpt.storage import SinkFile, Storage, new_file
from recckpt.text import Progress

_OTHER_KINDS = frozenset({".safetensors", ".arrow", ".npz", ".npy", ".h5", ".onnx", ".json", ".parquet"})


@dataclass(frozen=True)
class Consolidated:
    ckpt_id: str  # the checkpoint
    names: tuple[str, ...]  # names of all entries of the file
    sharded: tuple[str, ...]  # names of the tensors that were stored in chunks
    n_bytes: int  # size of the file


def consolidate(path: str, out: str) -> Consolidated:
    """Write a model's dense state as one ``model.pt``, whatever ranks and meshes saved it.

    Checks everything that it reads. Holds one tensor at a time in memory.

    Args:
        path: a checkpoint, or an output dir for its newest checkpoint; any fsspec URL.
        out: the file to write, which must not exist; any fsspec URL.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint.
        CheckpointRemovedError: the writer removed the checkpoint during the read, four times in a row.
        CorruptCheckpointError: a file is damaged.
        FormatVersionError: a newer recckpt wrote the checkpoint.
        FileExistsError: ``out`` exists.
        OSError: ``out`` cannot be written. After any error, no part of ``out`` is left.
        ValueError: ``out`` has the name of a file of another kind, such as ``x.safetensors``.
    """
    kind = PurePosixPath(out).suffix
    if kind in _OTHER_KINDS:
        raise ValueError(f"{out}: consolidate writes a torch file, found the name of a {kind} file; name it model.pt")
    return first_whole(lambda: locate_path(path), lambda found: _write(*found, out))


def _write(storage: Storage, checkpoint: Checkpoint, out: str) -> Consolidated:
    from recckpt.dense.loader import check_indexed
    from recckpt.dense.saver import Later, write_state  # imports torch, which no other command needs

    directory, manifest = checkpoint.directory, checkpoint.manifest
    chain = OpenChain.of(storage, checkpoint)
    chain.files.keep_open(file.name for file in manifest.files if layout.has_tensors(file.name))
    tensors, names, path = chain.tensors, manifest.names.dense, layout.join(directory, layout.MODEL)
    state: dict[str, Any] = {}  # the values of ``model.pt``, if it has values besides tensors
    if tensors.model.keys() != set(names):
        state = chain.state(layout.MODEL)
        check_indexed(state, tensors.model, names, path)
    for name, tensor in tensors.model.items():
        state[name] = Later(tensor.dtype, tensor.shape, tensor.place, partial(tensors.read, tensor))
    state = {name: state[name] for name in names}
    total = sum(tensor.nbytes for tensor in tensors.model.values())
    try:
        with new_file(out) as sink, Progress(f"consolidating {manifest.ckpt_id}", total) as progress:
            write_state(state, SinkFile(sink), progress.advance)
    except RecursionError as error:
        raise CorruptCheckpointError(path, "", found="values nested too deep", expected="fewer levels") from error
    finally:
        tensors.close()
    sharded = tuple(name for name, tensor in tensors.model.items() if tensor.is_sharded)
    return Consolidated(manifest.ckpt_id, tuple(state), sharded, sink.n_bytes)
