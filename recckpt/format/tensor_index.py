"""The index of one shard's dense tensors: the places of their chunks (docs/format.md, section 6). Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.codec import Checksum, Count, FileKind, JsonRecord, encode_of_shard, open_of_shard, plain
from recckpt.format.manifest import Manifest
from recckpt.format.tables import Problem

_NATIVE = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128"
_ONE_BYTE = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {  # dtypes that numpy lacks are stored as bit patterns of the same size
    **{name: np.dtype(name).newbyteorder("<") for name in _NATIVE.split()},
    **{name: np.dtype("u1") for name in _ONE_BYTE.split()},
    "bfloat16": np.dtype("<u2"),
    "complex32": np.dtype("<u4"),
}
MAX_DIMS = 64
STORAGES = {  # part of the format: torch's names of storages in pickles; a storage of any other dtype is untyped
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
MAX_BYTES = 1 << 30  # part of the format
KIND = FileKind("recckpt-dense", 1, "", MAX_BYTES)  # part of the format
ALIGNMENT = 64  # part of the format: alignment of chunks
BLOCK_BYTES = 1 << 20  # bytes per checksum; smaller blocks read fewer unneeded bytes
MODEL, EXTRA = "model", "extra"  # part of the format: whether a tensor is of the model or of a registered object


def widened(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    wide: npt.NDArray[Any] = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return wide


class TensorChunk(JsonRecord, frozen=True):
    """A box of a tensor, stored contiguously in a file from byte ``at`` on; for the fields see docs/format.md."""

    of: str
    name: str
    dtype: str
    shape: tuple[Count, ...]
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    file: str
    at: Count
    xxh3: tuple[Checksum, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.sizes) * NUMPY_DTYPES[self.dtype].itemsize


class TensorIndex(JsonRecord, frozen=True):
    save_id: str
    shard: int
    shards: int
    block_bytes: int
    chunks: tuple[TensorChunk, ...]


def block_checksums(data: memoryview) -> tuple[int, ...]:
    blocks = (data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES))
    return tuple(xxhash.xxh3_64_intdigest(block) for block in blocks)


def encode(index: TensorIndex) -> bytes:
    """Return the bytes of the file; ValueError if a name of a tensor cannot be encoded, with this name."""
    for name in (chunk.name for chunk in index.chunks if not layout.is_encodable(chunk.name)):
        raise ValueError(f"tensor {name!r}: expected a name encodable as UTF-8; rename it")
    shard, chunks = (index.save_id, index.shard, index.shards), (json.dumps(plain(chunk)) for chunk in index.chunks)
    return encode_of_shard(KIND, shard, "chunks", chunks, block_bytes=index.block_bytes)


def decode(data: bytes, path: str, manifest: Manifest, shard: int) -> TensorIndex:
    """Return the index in ``data``, checked against its manifest.

    Raises CorruptCheckpointError if ``data`` is not a complete index of this shard of this save, FormatVersionError if
    a newer format wrote it.
    """
    of = (manifest.save_id, shard, len(manifest.shards))
    document = open_of_shard(data, path, KIND, of)
    block_bytes, chunks = document.count("block_bytes"), document.read(tuple[TensorChunk, ...], "chunks")
    if not block_bytes or block_bytes % ALIGNMENT:
        raise document.wrong("block_bytes", block_bytes, f"a multiple of {ALIGNMENT}")
    own = layout.dense_data(shard, len(manifest.shards))
    files = (layout.MODEL, own) if shard == 0 else (own,)
    last: dict[str, TensorChunk] = {}
    for number, chunk in enumerate(chunks):
        of_place = _place_problems(chunk, last.get(chunk.file), files, manifest)
        for key, found, expected in chain(_box_problems(chunk, block_bytes), of_place):
            raise document.wrong(f"chunks[{number}].{key}", found, expected)
        last[chunk.file] = chunk
    return TensorIndex(*of, block_bytes, chunks)


def _box_problems(chunk: TensorChunk, block_bytes: int) -> Iterator[Problem]:
    shape, offsets, sizes = chunk.shape, chunk.offsets, chunk.sizes
    if chunk.of not in (MODEL, EXTRA):
        yield "of", repr(chunk.of), f"{MODEL!r} or {EXTRA!r}"
    if chunk.dtype not in NUMPY_DTYPES:
        yield "dtype", repr(chunk.dtype), f"one of {', '.join(NUMPY_DTYPES)}"
    elif len(shape) > MAX_DIMS or math.prod(filter(None, shape)) >= 2**59:
        yield "shape", shape, f"at most {MAX_DIMS} dimensions of less than 2**59 values"
    elif not len(shape) == len(offsets) == len(sizes):
        yield "sizes", f"{len(sizes)} sizes, {len(offsets)} offsets", f"{len(shape)}, as in the shape"
    elif any(begin + size > whole for begin, size, whole in zip(offsets, sizes, shape, strict=True)):
        yield "sizes", f"{sizes} from {offsets} on", f"a box inside {shape}"
    elif len(chunk.xxh3) != -(-chunk.n_bytes // block_bytes):
        yield "xxh3", f"{len(chunk.xxh3)} checksums", f"one for each {block_bytes} bytes"


def _place_problems(
    chunk: TensorChunk, last: TensorChunk | None, files: Collection[str], manifest: Manifest
) -> Iterator[Problem]:
    """Yield problems if a chunk is not in a file of its shard after the last chunk, nor in the same bytes as that."""
    listed = manifest.file(chunk.file) if chunk.file in files else None
    if listed is None:
        yield "file", repr(chunk.file), f"{' or '.join(files)}, which the manifest lists"
    elif last is None or (chunk.at, chunk.n_bytes, chunk.xxh3) != (last.at, last.n_bytes, last.xxh3):  # not tied to it
        low = last.at + last.n_bytes if last else 0
        if chunk.at % ALIGNMENT or not low <= chunk.at <= chunk.at + chunk.n_bytes <= listed.n_bytes:
            expected = f"a multiple of {ALIGNMENT}, from byte {low} to {listed.n_bytes} of {chunk.file}"
            yield "at", f"{chunk.n_bytes} bytes at {chunk.at}", expected


def damaged(directory: str, chunk: TensorChunk, begin: int, found: int, expected: int) -> CorruptCheckpointError:
    path, where = layout.join(directory, chunk.file), f"tensor {chunk.name!r}, bytes {chunk.at + begin} on"
    return CorruptCheckpointError(path, where, found=f"{found:016x}", expected=f"{expected:016x}")
