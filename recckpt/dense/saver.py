"""Dense state to ``.pt`` files, sharded tensors to a file of chunks, and the index of what lies where in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recckpt.dense.sharded_state import OwnChunk
from recckpt.dense.torch_writer import write_state
from recckpt.format import layout, tensor_index
from recckpt.format.manifest import FileEntry
from recckpt.format.tensor_index import ALIGNMENT, Chunk, TensorIndex, block_checksums
from recckpt.storage import HashingSink, NewFiles

_STEP_BYTES = 1 << 20


def save_state(state: Mapping[str, Any], storage: NewFiles, directory: str, name: str) -> FileEntry:
    """Write a dict, as :func:`recckpt.dense.portable.portable` returns it, and return its entry for the manifest.

    Raises:
        OSError: the storage failed; the file is not there then.
    """
    return _save_state(state, storage, directory, name)[0]


def save_tensors(
    state: Mapping[str, Any] | None,
    own: Sequence[OwnChunk],
    storage: NewFiles,
    directory: str,
    *,
    save_id: str,
    shard: int,
    shards: int,
) -> list[FileEntry]:
    """Write the model's state, the chunks that are this rank's own, and the index of both; return the files.

    The state goes to ``model.pt``, as :func:`save_state` takes it; it is None where another rank writes that.

    Raises:
        OSError: the storage failed.
    """
    files: list[FileEntry] = []
    chunks: list[Chunk] = []
    if state is not None:
        entry, chunks = _save_state(state, storage, directory, layout.MODEL)
        files.append(entry)
    if own:
        entry, written = _save_chunks(own, storage, directory, layout.dense_data(shard, shards))
        files.append(entry)
        chunks = chunks + written
    if chunks:
        index = TensorIndex(save_id, shard, shards, tensor_index.BLOCK_BYTES, tuple(chunks))
        name = layout.dense_index(shard, shards)
        with storage.create(layout.join(directory, name)) as sink:
            hashing = HashingSink(sink)
            hashing.write(tensor_index.encode(index))
        files.append(FileEntry(name, sink.n_bytes, hashing.xxh3))
    return files


def _save_state(
    state: Mapping[str, Any], storage: NewFiles, directory: str, name: str
) -> tuple[FileEntry, list[Chunk]]:
    with storage.create(layout.join(directory, name)) as sink:
        hashing = HashingSink(sink)
        chunks = write_state(state, hashing)
    return FileEntry(name, sink.n_bytes, hashing.xxh3), chunks


def _save_chunks(
    own: Sequence[OwnChunk], storage: NewFiles, directory: str, name: str
) -> tuple[FileEntry, list[Chunk]]:
    chunks = []
    with storage.create(layout.join(directory, name)) as sink:
        hashing = HashingSink(sink)
        for chunk in own:
            hashing.write(bytes(-sink.n_bytes % ALIGNMENT))
            at, data = sink.n_bytes, _bytes_of(chunk.values)
            for begin in range(0, len(data), _STEP_BYTES):
                hashing.write(data[begin : begin + _STEP_BYTES])
            sizes, checksums = tuple(chunk.values.shape), block_checksums(data)
            listed = Chunk(chunk.of, chunk.name, chunk.dtype, chunk.shape, chunk.offsets, sizes, name, at, checksums)
            chunks.append(listed)
    return FileEntry(name, sink.n_bytes, hashing.xxh3), chunks


def _bytes_of(values: Tensor) -> memoryview:
    """Return the values of a tensor, row by row, without a copy where they lie so."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data
