"""The index of one shard's part of sharded tensors: which chunks lie where (docs/format.md, section 6; no torch)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recckpt.errors import CorruptCheckpointError, FormatVersionError
from recckpt.format import layout
from recckpt.format.dtypes import MAX_DIMS, NUMPY_DTYPES
from recckpt.format.json_fields import Fields, parse
from recckpt.format.manifest import Manifest

FORMAT = "recckpt-dense"  # part of the format
VERSION = 1  # part of the format
MAX_BYTES = 1 << 30  # part of the format
ALIGNMENT = 64  # part of the format: where chunks begin
BLOCK_BYTES = 1 << 20  # what has a checksum of its own; the smaller, the less is read for nothing
MODEL, EXTRA = "model", "extra"  # part of the format: whose tensor it is
_NAME_CHARS = 16_384


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor that lies in one piece in a file.

    Attributes:
        of: :data:`MODEL`, or :data:`EXTRA` of the state of a registered object.
        name: of the tensor.
        dtype: a key of :data:`~recckpt.format.dtypes.NUMPY_DTYPES`.
        shape: of the whole tensor.
        offsets: where the box begins in each dimension.
        sizes: of the box.
        at: first byte in the file.
        xxh3: checksums of its blocks.
    """

    of: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    xxh3: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.sizes) * NUMPY_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class ChunkIndex:
    """What one shard wrote of sharded tensors.

    Attributes:
        save_id: of the attempt.
        shard, shards: which shard, of how many.
        file: the chunks' bytes.
        n_bytes: size of that file.
        block_bytes: size of the blocks of a chunk, but the last.
        chunks: in the order of the file.
    """

    save_id: str
    shard: int
    shards: int
    file: str
    n_bytes: int
    block_bytes: int
    chunks: tuple[Chunk, ...]


def encode(index: ChunkIndex) -> bytes:
    """Return the bytes of an index file."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": index.save_id,
        "shard": index.shard,
        "shards": index.shards,
        "file": index.file,
        "bytes": index.n_bytes,
        "block_bytes": index.block_bytes,
    }
    chunks = ",\n".join(json.dumps(_chunk_json(chunk)) for chunk in index.chunks)
    return f'{json.dumps(head)[:-1]}, "chunks": [\n{chunks}\n]}}\n'.encode()


def decode(data: bytes, path: str, manifest: Manifest, shard: int) -> ChunkIndex:
    """Return the index in ``data``, checked against its manifest.

    Raises:
        CorruptCheckpointError: not a whole index of this shard of this save.
        FormatVersionError: written by a newer format.
    """
    fields = parse(data, path)
    if fields.text("format") != FORMAT:
        raise fields.wrong("format", fields.text("format"), FORMAT)
    if fields.count("version") > VERSION:
        raise FormatVersionError(path, found=fields.count("version"), supported=VERSION)
    expected = (manifest.save_id, shard, len(manifest.shards))
    found = (fields.text("save_id"), fields.count("shard"), fields.count("shards"))
    if found != expected:
        raise fields.wrong("save_id, shard, shards", str(found), str(expected))
    file, n_bytes = layout.checked_name(fields.text("file"), path), fields.count("bytes")
    listed = manifest.file(file)
    if file != layout.dense_data(shard, found[2]) or listed is None or listed.n_bytes != n_bytes:
        expected_file = f"{layout.dense_data(shard, found[2])}, which the manifest lists with this size"
        raise fields.wrong("file", f"{file} of {n_bytes} bytes", expected_file)
    block_bytes, chunks, end = fields.count("block_bytes", low=1), [], 0
    if block_bytes % ALIGNMENT:
        raise fields.wrong("block_bytes", str(block_bytes), f"a multiple of {ALIGNMENT}")
    for entry in fields.objects("chunks"):
        chunks.append(_chunk(entry, block_bytes, end, n_bytes))
        end = chunks[-1].at + chunks[-1].n_bytes
    return ChunkIndex(*found, file, n_bytes, block_bytes, tuple(chunks))


def _chunk_json(chunk: Chunk) -> Mapping[str, Any]:
    return {
        "of": chunk.of,
        "name": chunk.name,
        "dtype": chunk.dtype,
        "shape": list(chunk.shape),
        "offsets": list(chunk.offsets),
        "sizes": list(chunk.sizes),
        "at": chunk.at,
        "xxh3": [f"{checksum:016x}" for checksum in chunk.xxh3],
    }


def _chunk(fields: Fields, block_bytes: int, low: int, high: int) -> Chunk:
    """Return a chunk that lies in bytes ``low`` to ``high`` of its file."""
    of, name, dtype = fields.text("of"), fields.text("name"), fields.text("dtype")
    if of not in (MODEL, EXTRA):
        raise fields.wrong("of", repr(of), f"{MODEL!r} or {EXTRA!r}")
    if len(name) > _NAME_CHARS:
        raise fields.wrong("name", f"{len(name)} characters", f"at most {_NAME_CHARS}")
    if dtype not in NUMPY_DTYPES:
        raise fields.wrong("dtype", repr(dtype), f"one of {', '.join(NUMPY_DTYPES)}")
    shape, offsets, sizes = fields.counts("shape"), fields.counts("offsets"), fields.counts("sizes")
    if len(shape) > MAX_DIMS or math.prod(filter(None, shape)) >= 2**59:
        raise fields.wrong("shape", str(shape), f"at most {MAX_DIMS} dimensions of less than 2**59 values")
    if not len(shape) == len(offsets) == len(sizes):
        raise fields.wrong("sizes", f"{len(sizes)} sizes, {len(offsets)} offsets", f"{len(shape)}, as in the shape")
    if any(begin + size > whole for begin, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise fields.wrong("sizes", f"{sizes} from {offsets} on", f"a box inside {shape}")
    chunk = Chunk(of, name, dtype, shape, offsets, sizes, fields.count("at"), fields.checksum_list("xxh3"))
    if chunk.at % ALIGNMENT or not low <= chunk.at <= chunk.at + chunk.n_bytes <= high:
        found = f"{chunk.n_bytes} bytes at {chunk.at}"
        raise fields.wrong("at", found, f"a multiple of {ALIGNMENT}, from byte {low} to {high} of the file")
    if len(chunk.xxh3) != -(-chunk.n_bytes // block_bytes):
        raise fields.wrong("xxh3", f"{len(chunk.xxh3)} checksums", f"one for each {block_bytes} bytes")
    return chunk


def corrupt(directory: str, index: ChunkIndex, where: str, found: object, expected: object) -> CorruptCheckpointError:
    """Return the error for the bytes of a chunk."""
    path = layout.join(directory, index.file)
    return CorruptCheckpointError(path, where, found=found, expected=expected)
