"""This rank's part of sharded tensors to a file of bytes, and the index of what lies where in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from recckpt.dense.sharded_state import OwnChunk
from recckpt.format import layout, tensor_index
from recckpt.format.manifest import FileEntry
from recckpt.format.tensor_index import ALIGNMENT, BLOCK_BYTES, Chunk, ChunkIndex
from recckpt.storage import HashingSink, NewFiles


def save_chunks(
    own: Sequence[OwnChunk], storage: NewFiles, directory: str, *, save_id: str, shard: int, shards: int
) -> list[FileEntry]:
    """Write chunks and their index, and return the files; none where there is nothing to write.

    Raises:
        OSError: the storage failed.
    """
    if not own:
        return []
    name, listed = layout.dense_data(shard, shards), []
    with storage.create(layout.join(directory, name)) as sink:
        hashing = HashingSink(sink)
        for chunk in own:
            hashing.write(bytes(-sink.n_bytes % ALIGNMENT))
            listed.append(_write(chunk, hashing, sink.n_bytes))
    data = FileEntry(name, sink.n_bytes, hashing.xxh3)
    index = ChunkIndex(save_id, shard, shards, name, data.n_bytes, BLOCK_BYTES, tuple(listed))
    name = layout.dense_index(shard, shards)
    with storage.create(layout.join(directory, name)) as sink:
        hashing = HashingSink(sink)
        hashing.write(tensor_index.encode(index))
    return [data, FileEntry(name, sink.n_bytes, hashing.xxh3)]


def _write(chunk: OwnChunk, sink: HashingSink, at: int) -> Chunk:
    data, checksums = _bytes_of(chunk.values), []
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        checksums.append(xxhash.xxh3_64_intdigest(block))
        sink.write(block)
    sizes = tuple(chunk.values.shape)
    return Chunk(chunk.of, chunk.name, chunk.dtype, chunk.shape, chunk.offsets, sizes, at, tuple(checksums))


def _bytes_of(values: Tensor) -> memoryview:
    """Return the values of a tensor, row by row, without a copy where they lie so."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data
