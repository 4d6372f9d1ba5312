"""The index of what one shard wrote of dense tensors: which chunks lie where (docs/format.md, section 6; no torch)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.dtypes import MAX_DIMS, NUMPY_DTYPES
from recckpt.format.json_fields import Fields, encode_of_shard, parse_of_shard
from recckpt.format.manifest import Manifest

FORMAT = "recckpt-dense"  # part of the format
VERSION = 1  # part of the format
MAX_BYTES = 1 << 30  # part of the format
ALIGNMENT = 64  # part of the format: where chunks begin
BLOCK_BYTES = 1 << 20  # what has a checksum of its own; the smaller, the less is read for nothing
MODEL, EXTRA = "model", "extra"  # part of the format: whose tensor it is


@dataclass(frozen=True)
class TensorChunk:
    """A box of a tensor that lies in one piece in a file, from byte ``at`` on; fields as in docs/format.md."""

    of: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    xxh3: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.sizes) * NUMPY_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class TensorIndex:
    """What one shard wrote of dense tensors; fields as in docs/format.md."""

    save_id: str
    shard: int
    shards: int
    block_bytes: int
    chunks: tuple[TensorChunk, ...]


def block_checksums(data: memoryview) -> tuple[int, ...]:
    """Return the checksums of the blocks of a chunk, as writers cut it."""
    blocks = (data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES))
    return tuple(xxhash.xxh3_64_intdigest(block) for block in blocks)


def encode(index: TensorIndex) -> bytes:
    """Return the bytes of an index file."""
    shard, chunks = (index.save_id, index.shard, index.shards), (json.dumps(_chunk_json(c)) for c in index.chunks)
    return encode_of_shard(FORMAT, VERSION, shard, "chunks", chunks, block_bytes=index.block_bytes)


def decode(data: bytes, path: str, manifest: Manifest, shard: int) -> TensorIndex:
    """Return the index in ``data``, checked against its manifest.

    Raises CorruptCheckpointError where it is not a whole index of this shard of this save, FormatVersionError where a
    newer format wrote it.
    """
    of = (manifest.files_id, shard, len(manifest.shards))
    fields = parse_of_shard(data, path, FORMAT, VERSION, of)
    block_bytes, chunks = fields.count("block_bytes", low=1), _Chunks(manifest, shard)
    if block_bytes % ALIGNMENT:
        raise fields.wrong("block_bytes", str(block_bytes), f"a multiple of {ALIGNMENT}")
    for entry in fields.objects("chunks"):
        chunks.add(entry, _chunk(entry, block_bytes))
    return TensorIndex(*of, block_bytes, tuple(chunks.checked))


class _Chunks:
    """Checks that chunks lie in the files of their shard, one after another or in the same bytes."""

    def __init__(self, manifest: Manifest, shard: int) -> None:
        self._manifest, self._own = manifest, layout.dense_data(shard, len(manifest.shards))
        self._files = (layout.MODEL, self._own) if shard == 0 else (self._own,)
        self._last: dict[str, TensorChunk] = {}
        self.checked: list[TensorChunk] = []

    def add(self, fields: Fields, chunk: TensorChunk) -> None:
        listed = self._manifest.file(chunk.file) if chunk.file in self._files else None
        if listed is None:
            raise fields.wrong("file", repr(chunk.file), f"{' or '.join(self._files)}, which the manifest lists")
        last = self._last.get(chunk.file)
        self._last[chunk.file] = chunk
        self.checked.append(chunk)
        if last and (chunk.at, chunk.n_bytes, chunk.xxh3) == (last.at, last.n_bytes, last.xxh3):
            return  # tied tensors
        low = last.at + last.n_bytes if last else 0
        if chunk.at % ALIGNMENT or not low <= chunk.at <= chunk.at + chunk.n_bytes <= listed.n_bytes:
            found = f"{chunk.n_bytes} bytes at {chunk.at}"
            expected = f"a multiple of {ALIGNMENT}, from byte {low} to {listed.n_bytes} of {chunk.file}"
            raise fields.wrong("at", found, expected)


def _chunk_json(chunk: TensorChunk) -> Mapping[str, Any]:
    return {
        "of": chunk.of,
        "name": chunk.name,
        "dtype": chunk.dtype,
        "shape": list(chunk.shape),
        "offsets": list(chunk.offsets),
        "sizes": list(chunk.sizes),
        "file": chunk.file,
        "at": chunk.at,
        "xxh3": [f"{checksum:016x}" for checksum in chunk.xxh3],
    }


def _chunk(fields: Fields, block_bytes: int) -> TensorChunk:
    of, name, dtype = fields.text("of"), fields.text("name"), fields.text("dtype")
    if of not in (MODEL, EXTRA):
        raise fields.wrong("of", repr(of), f"{MODEL!r} or {EXTRA!r}")
    if dtype not in NUMPY_DTYPES:
        raise fields.wrong("dtype", repr(dtype), f"one of {', '.join(NUMPY_DTYPES)}")
    shape, offsets, sizes = fields.counts("shape"), fields.counts("offsets"), fields.counts("sizes")
    if len(shape) > MAX_DIMS or math.prod(filter(None, shape)) >= 2**59:
        raise fields.wrong("shape", str(shape), f"at most {MAX_DIMS} dimensions of less than 2**59 values")
    if not len(shape) == len(offsets) == len(sizes):
        raise fields.wrong("sizes", f"{len(sizes)} sizes, {len(offsets)} offsets", f"{len(shape)}, as in the shape")
    if any(begin + size > whole for begin, size, whole in zip(offsets, sizes, shape, strict=True)):
        raise fields.wrong("sizes", f"{sizes} from {offsets} on", f"a box inside {shape}")
    file, at = fields.text("file"), fields.count("at")
    chunk = TensorChunk(of, name, dtype, shape, offsets, sizes, file, at, fields.checksum_list("xxh3"))
    if len(chunk.xxh3) != -(-chunk.n_bytes // block_bytes):
        raise fields.wrong("xxh3", f"{len(chunk.xxh3)} checksums", f"one for each {block_bytes} bytes")
    return chunk


def damaged(directory: str, chunk: TensorChunk, begin: int, found: int, expected: int) -> CorruptCheckpointError:
    """Return the error for the checksum of a block, which begins at a byte of a chunk."""
    path, where = layout.join(directory, chunk.file), f"tensor {chunk.name!r}, bytes {chunk.at + begin} on"
    return CorruptCheckpointError(path, where, found=f"{found:016x}", expected=f"{expected:016x}")
