"""Finds the dense tensors of a checkpoint by the indexes of all shards, reads their bytes and checks them."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout, tensor_index
from recckpt.format.manifest import FileEntry, Manifest
from recckpt.format.tensor_index import EXTRA, MODEL, NUMPY_DTYPES, TensorChunk, TensorIndex
from recckpt.output_dir.checkpoint_dir import read_checked
from recckpt.storage.base import Files
from recckpt.storage.retry import read_twice
from recckpt.text import nearest

_SLAB_BYTES = 64 << 20  # bytes per read; more if a single row, or a chunk of one dimension, is larger
_CHECK_BYTES = 8 << 20
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class StoredTensor:
    of: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[TensorIndex, TensorChunk], ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize

    @property
    def place(self) -> tuple[tuple[str, int, int], ...]:
        """(File, first byte, size) of each chunk; the same for tied tensors."""
        return tuple((chunk.file, chunk.at, chunk.n_bytes) for _, chunk in self.chunks)

    @property
    def content(self) -> object:
        """A key that is equal for tensors with equal values: their chunks have equal places and checksums."""
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes), tuple(chunk.xxh3)) for _, chunk in self.chunks]
        return self.dtype, self.shape, chunks

    @property
    def is_sharded(self) -> bool:
        return self.chunks[0][1].file != layout.MODEL


def tensors_of(directory: str, indexes: Iterable[TensorIndex]) -> dict[tuple[str, str], StoredTensor]:
    """Return ("model" or "extra", name) -> tensor, assembled from the chunks of all shards."""
    chunks_of: dict[tuple[str, str], list[tuple[TensorIndex, TensorChunk]]] = {}
    for index in indexes:
        for chunk in index.chunks:
            chunks_of.setdefault((chunk.of, chunk.name), []).append((index, chunk))
    return {key: _whole(directory, pieces) for key, pieces in chunks_of.items()}


def _whole(directory: str, pieces: list[tuple[TensorIndex, TensorChunk]]) -> StoredTensor:
    first = pieces[0][1]
    covered = 0
    for index, chunk in pieces:
        if (chunk.dtype, chunk.shape) != (first.dtype, first.shape):
            expected = f"{first.dtype} {first.shape}, as in another chunk"
            raise _bad_index(directory, index, chunk, f"{chunk.dtype} {chunk.shape}", expected)
        covered += math.prod(chunk.sizes)
    twice = overlap([chunk for _, chunk in pieces if math.prod(chunk.sizes)])
    if twice is not None:
        index, chunk = next((index, chunk) for index, chunk in pieces if chunk is twice)
        found = f"a tile that overlaps another: {chunk.sizes} from {chunk.offsets} on"
        raise _bad_index(directory, index, chunk, found, "each value once")
    if covered != math.prod(first.shape):
        found = f"chunks of {covered} values"
        raise _bad_index(directory, pieces[0][0], first, found, f"{math.prod(first.shape)} values, {first.shape}")
    return StoredTensor(first.of, first.name, first.dtype, first.shape, tuple(pieces))


class Tile(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def overlap(boxes: Sequence[TensorChunk | Tile]) -> TensorChunk | Tile | None:
    """Return a box that overlaps another, or None; sweeps along the dimension with the most distinct offsets."""
    if len(boxes) < 2:
        return None
    if not boxes[0].sizes:
        return boxes[1]
    dim = max(range(len(boxes[0].sizes)), key=lambda d: len({box.offsets[d] for box in boxes}))
    order = sorted(range(len(boxes)), key=lambda n: boxes[n].offsets[dim])
    active: list[tuple[int, int]] = []  # (end, index) of the boxes at the present position of the sweep
    for number in order:
        box = boxes[number]
        del active[: bisect_right(active, (box.offsets[dim], len(boxes)))]
        for _, other in active:
            sides = zip(box.offsets, box.sizes, boxes[other].offsets, boxes[other].sizes, strict=True)
            if all(a < b + other_size and b < a + size for a, size, b, other_size in sides):
                return box
        insort(active, (box.offsets[dim] + box.sizes[dim], number))
    return None


def _bad_index(
    directory: str, index: TensorIndex, chunk: TensorChunk, found: object, expected: object
) -> CorruptCheckpointError:
    path = layout.join(directory, layout.dense_index(index.shard, index.shards))
    return CorruptCheckpointError(path, f"tensor {chunk.name!r}", found=found, expected=expected)


@dataclass(frozen=True)
class Read:
    """A box to read: ``at`` is where it begins in chunk ``chunk``, ``to`` where it begins in the result."""

    chunk: int
    at: tuple[int, ...]
    to: tuple[int, ...]
    sizes: tuple[int, ...]


class DenseTensors:
    """Reads the dense tensors of a checkpoint; CorruptCheckpointError if bytes are damaged. Not thread-safe."""

    def __init__(self, files: Files, directory: str, manifest: Manifest) -> None:
        self._files, self._directory = files, directory
        self._open: dict[str, BinaryIO] = {}
        names = [layout.dense_index(shard, len(manifest.shards)) for shard in range(len(manifest.shards))]
        self.bytes_read = sum(entry.n_bytes for name in names if (entry := manifest.file(name)))
        indexes = (read_index(files, directory, manifest, shard) for shard in range(len(manifest.shards)))
        self.tensors = tensors_of(directory, [index for index in indexes if index])
        model = {tensor.name: tensor for tensor in self.tensors.values() if tensor.of == MODEL}
        for name in model.keys() - set(manifest.names.dense):
            path, expected = layout.join(directory, layout.MANIFEST), f"{name!r}, which an index lists"
            raise CorruptCheckpointError(path, "names.dense", found="no such name", expected=expected)
        self.model = {name: model[name] for name in manifest.names.dense if name in model}

    def close(self) -> None:
        """Close the files; later reads open them again."""
        for file in self._open.values():
            file.close()
        self._open = {}

    def named(self, name: str) -> StoredTensor:
        if name not in self.model:
            raise KeyError(f"{self._directory} has no dense tensor {name!r}{nearest(name, self.model)}")
        return self.model[name]

    def of_extra(self, name: str) -> StoredTensor:
        tensor = self.tensors.get((EXTRA, name))
        if tensor is None:
            path = layout.join(self._directory, layout.EXTRA)
            raise CorruptCheckpointError(path, repr(name), found="no such sharded tensor", expected="one in dense/")
        return tensor

    def read(self, tensor: StoredTensor) -> npt.NDArray[Any]:
        """Return a whole tensor as a contiguous, writable array; as bit patterns if numpy lacks its dtype."""
        whole = [
            Read(number, (0,) * len(chunk.sizes), chunk.offsets, chunk.sizes)
            for number, (_, chunk) in enumerate(tensor.chunks)
        ]
        return self.read_box(tensor, tensor.shape, whole)

    def read_box(self, tensor: StoredTensor, sizes: Sequence[int], reads: Iterable[Read]) -> npt.NDArray[Any]:
        """Return an array of shape ``sizes`` filled by the reads; dtypes as for :meth:`read`."""
        dtype = NUMPY_DTYPES[tensor.dtype]
        values = np.empty(sizes, dtype)
        for read in reads:
            index, chunk = tensor.chunks[read.chunk]
            place = tuple(slice(begin, begin + size) for begin, size in zip(read.to, read.sizes, strict=True))
            there = values[(...,) + place]  # noqa: RUF005  # a view, of a scalar too
            if math.prod(read.sizes) == 0:
                continue
            for begin, shape, box, at in _rows(dtype.itemsize, chunk.sizes, read.at, read.sizes):
                data = self._read(index, chunk, begin, begin + math.prod(shape) * dtype.itemsize)
                there[at] = data.view(dtype).reshape(shape)[box]
        return values

    def _read(self, index: TensorIndex, chunk: TensorChunk, begin: int, end: int) -> Bytes:
        """Return bytes [begin, end) of a chunk, after a check of all blocks that contain them."""

        def close() -> None:
            if (file := self._open.pop(chunk.file, None)) is not None:
                file.close()

        read = partial(self._read_once, index, chunk, begin, end)
        return read_twice(self._files, layout.join(self._directory, chunk.file), read, close)

    def _read_once(self, index: TensorIndex, chunk: TensorChunk, begin: int, end: int) -> Bytes:
        first, block_bytes = begin // index.block_bytes, index.block_bytes
        start, stop = first * block_bytes, min(-(-end // block_bytes) * block_bytes, chunk.n_bytes)
        path = layout.join(self._directory, chunk.file)
        if chunk.file not in self._open:
            self._open[chunk.file] = self._files.open(path)
        self._open[chunk.file].seek(chunk.at + start)
        data = self._open[chunk.file].read(stop - start)
        self.bytes_read += len(data)
        if len(data) != stop - start:
            found, expected = f"{len(data)} bytes", f"{stop - start} bytes"
            raise CorruptCheckpointError(path, f"tensor {chunk.name!r}", found=found, expected=expected)
        for number, at in enumerate(range(0, len(data), block_bytes), start=first):
            digest = xxhash.xxh3_64_intdigest(memoryview(data)[at : at + block_bytes])
            if digest != chunk.xxh3[number]:
                raise tensor_index.damaged(self._directory, chunk, number * block_bytes, digest, chunk.xxh3[number])
        return np.frombuffer(data, np.uint8)[begin - start : end - start]


def read_index(files: Files, directory: str, manifest: Manifest, shard: int) -> TensorIndex | None:
    name = layout.dense_index(shard, len(manifest.shards))
    entry = manifest.file(name)
    if entry is None:
        return None
    data = read_checked(files, directory, entry, tensor_index.MAX_BYTES)
    return tensor_index.decode(data, layout.join(directory, name), manifest, shard)


def _rows(
    item_bytes: int, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[slice, ...], tuple[int | slice, ...]]]:
    """Yield reads of whole rows that cover a box of a row-major array.

    Each is (first byte, shape of the rows, place of the box in the rows, place in the result).
    """
    if not shape:
        yield 0, (), (), ()
        return
    row_bytes = math.prod(shape[1:]) * item_bytes
    if row_bytes > _SLAB_BYTES and len(shape) > 1:
        for row in range(sizes[0]):
            for begin, inner, box, place in _rows(item_bytes, shape[1:], offsets[1:], sizes[1:]):
                yield (offsets[0] + row) * row_bytes + begin, inner, box, (row, *place)
        return
    n_rows = max(1, _SLAB_BYTES // row_bytes)
    rest = tuple(slice(begin, begin + size) for begin, size in zip(offsets[1:], sizes[1:], strict=True))
    for row in range(0, sizes[0], n_rows):
        n = min(n_rows, sizes[0] - row)
        yield (offsets[0] + row) * row_bytes, (n, *shape[1:]), (slice(0, n), *rest), (slice(row, row + n),)


def check_file(
    files: Files,
    directory: str,
    file: FileEntry,
    *,
    index: TensorIndex | None,
    advance: Callable[[int], object],
) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each damaged block of indexed tensors in a file, or for the file as a whole."""
    path, is_whole = layout.join(directory, file.name), True
    chunks, block_bytes = (index.chunks, index.block_bytes) if index else ((), 1)
    with files.open(path) as content:
        passed = _Passed(content, advance)
        for chunk in chunks:
            if chunk.file != file.name or chunk.at < passed.at:
                continue  # in another file, or the same bytes as the previous chunk
            passed.skip(chunk.at)
            for begin, expected in zip(range(0, chunk.n_bytes, block_bytes), chunk.xxh3, strict=True):
                found = xxhash.xxh3_64_intdigest(passed.read(min(block_bytes, chunk.n_bytes - begin)))
                if found != expected:
                    is_whole = False
                    yield tensor_index.damaged(directory, chunk, begin, found, expected)
        passed.skip(file.n_bytes)
    found = passed.digest.intdigest()
    if is_whole and found != file.xxh3:  # damage between the chunks
        yield CorruptCheckpointError(path, "its checksum", found=f"{found:016x}", expected=f"{file.xxh3 or 0:016x}")


class _Passed:
    def __init__(self, content: BinaryIO, advance: Callable[[int], object]) -> None:
        self._content, self._advance, self.at = content, advance, 0
        self.digest = xxhash.xxh3_64()

    def read(self, n_bytes: int) -> bytes:
        data = self._content.read(n_bytes)
        self.at += len(data)
        self.digest.update(data)
        self._advance(len(data))
        return data

    def skip(self, at: int) -> None:
        while self.at < at and self.read(min(at - self.at, _CHECK_BYTES)):
            pass
