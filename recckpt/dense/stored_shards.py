"""Sharded tensors of a checkpoint: put together from the indexes of all shards, and read by bytes (no torch here)."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout, tensor_index
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.format.manifest import Manifest
from recckpt.format.tensor_index import Chunk, ChunkIndex
from recckpt.output_dir.checked import read_checked
from recckpt.storage.base import Files

_SLAB_BYTES = 64 << 20  # read at once; more where a single row of a chunk of one dimension has more
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class StoredShards:
    """A tensor and the chunks that tile it.

    Attributes:
        of, name, dtype, shape: as of :class:`~recckpt.format.tensor_index.Chunk`.
        chunks: each with the index that it is in.
    """

    of: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[ChunkIndex, Chunk], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Read:
    """A box of a chunk, and where it goes.

    Attributes:
        chunk: number of the chunk in its tensor.
        at: where the box begins in the chunk.
        to: where it begins in what is filled.
        sizes: of the box.
    """

    chunk: int
    at: tuple[int, ...]
    to: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Slab:
    """Some rows of a chunk, whole in all dimensions but the first.

    Attributes:
        data: the bytes.
        shape: of the values in them.
        box: what was asked for of them.
        place: where that goes in what was asked for.
    """

    data: Bytes
    shape: tuple[int, ...]
    box: tuple[slice, ...]
    place: tuple[int | slice, ...]


class ShardReader:
    """Reads the sharded tensors of one checkpoint. Not thread-safe.

    Args:
        files: where it lies.
        directory: of the checkpoint in it.
        manifest: of the checkpoint.

    Attributes:
        tensors: (of, name) -> tensor.
        bytes_read: from files so far.

    Raises:
        CorruptCheckpointError: an index is damaged, or its tensors are not whole.
        FormatVersionError: written by a newer format.
    """

    def __init__(self, files: Files, directory: str, manifest: Manifest) -> None:
        self._files, self._directory = files, directory
        self._open: dict[str, BinaryIO] = {}
        names = [layout.dense_index(shard, len(manifest.shards)) for shard in range(len(manifest.shards))]
        self.bytes_read = sum(entry.n_bytes for name in names if (entry := manifest.file(name)))
        indexes = (read_index(files, directory, manifest, shard) for shard in range(len(manifest.shards)))
        self.tensors = tensors_of(directory, [index for index in indexes if index])

    def close(self) -> None:
        """Close the files; they are opened again when something is asked for."""
        for file in self._open.values():
            file.close()
        self._open = {}

    def tensor(self, of: str, name: str) -> StoredShards:
        """Return a tensor that ``extra.pt`` names.

        Raises:
            CorruptCheckpointError: there is none.
        """
        found = self.tensors.get((of, name))
        if found is None:
            path = layout.join(self._directory, layout.EXTRA)
            raise CorruptCheckpointError(path, repr(name), found="no such sharded tensor", expected="one in dense/")
        return found

    def read(self, tensor: StoredShards) -> npt.NDArray[Any]:
        """Return a whole tensor, contiguous and writable; a dtype that numpy lacks comes as bit patterns.

        Raises:
            CorruptCheckpointError: the bytes are damaged.
        """
        whole = [
            Read(number, (0,) * len(chunk.sizes), chunk.offsets, chunk.sizes)
            for number, (_, chunk) in enumerate(tensor.chunks)
        ]
        return self.read_box(tensor, tensor.shape, whole)

    def read_box(self, tensor: StoredShards, sizes: Sequence[int], reads: Iterable[Read]) -> npt.NDArray[Any]:
        """Return an array of ``sizes`` that the reads fill, as :meth:`read` does."""
        dtype = NUMPY_DTYPES[tensor.dtype]
        values = np.empty(sizes, dtype)
        for read in reads:
            index, chunk = tensor.chunks[read.chunk]
            place = tuple(slice(begin, begin + size) for begin, size in zip(read.to, read.sizes, strict=True))
            there = values[(...,) + place]  # noqa: RUF005  # a view, of a scalar too
            for slab in self._slabs(index, chunk, read):
                there[slab.place] = slab.data.view(dtype).reshape(slab.shape)[slab.box]
        return values

    def _slabs(self, index: ChunkIndex, chunk: Chunk, read: Read) -> Iterator[_Slab]:
        """Yield a box of a chunk, in pieces of rows that are read and checked one after another."""
        if math.prod(read.sizes) == 0:
            return
        item_bytes = NUMPY_DTYPES[chunk.dtype].itemsize
        for begin, shape, box, place in _rows(item_bytes, chunk.sizes, read.at, read.sizes):
            data = self._read(index, chunk, begin, begin + math.prod(shape) * item_bytes)
            yield _Slab(data, shape, box, place)

    def _read(self, index: ChunkIndex, chunk: Chunk, begin: int, end: int) -> Bytes:
        """Return bytes of a chunk, of which the blocks that they lie in are read and checked."""
        first, block_bytes = begin // index.block_bytes, index.block_bytes
        start, stop = first * block_bytes, min(-(-end // block_bytes) * block_bytes, chunk.n_bytes)
        where = f"tensor {chunk.name!r}"
        file = self._file(index.file)
        file.seek(chunk.at + start)
        data = file.read(stop - start)
        self.bytes_read += len(data)
        if len(data) != stop - start:
            raise tensor_index.corrupt(self._directory, index, where, f"{len(data)} bytes", f"{stop - start} bytes")
        for number, at in enumerate(range(0, len(data), block_bytes), start=first):
            digest = xxhash.xxh3_64_intdigest(memoryview(data)[at : at + block_bytes])
            if digest != chunk.xxh3[number]:
                place = f"{where}, bytes {chunk.at + number * block_bytes} on"
                raise tensor_index.corrupt(
                    self._directory, index, place, f"{digest:016x}", f"{chunk.xxh3[number]:016x}"
                )
        return np.frombuffer(data, np.uint8)[begin - start : end - start]

    def _file(self, name: str) -> BinaryIO:
        if name not in self._open:
            self._open[name] = self._files.open(layout.join(self._directory, name))
        return self._open[name]


def check_apart(names: Iterable[str], sharded: Container[str], path: str) -> None:
    """Refuse a tensor that is in ``model.pt``, the file ``path``, and in chunks too.

    Raises:
        CorruptCheckpointError: there is one; names it.
    """
    for name in names:
        if name in sharded:
            raise CorruptCheckpointError(path, f"tensor {name!r}", found="one in dense/ too", expected="each name once")


def read_index(files: Files, directory: str, manifest: Manifest, shard: int) -> ChunkIndex | None:
    """Return the index of a shard, None where it wrote nothing of sharded tensors."""
    name = layout.dense_index(shard, len(manifest.shards))
    entry = manifest.file(name)
    if entry is None:
        return None
    data = read_checked(files, directory, entry, tensor_index.MAX_BYTES)
    return tensor_index.decode(data, layout.join(directory, name), manifest, shard)


def tensors_of(directory: str, indexes: Iterable[ChunkIndex]) -> dict[tuple[str, str], StoredShards]:
    """Return the tensors that the chunks of all shards make up, by (of, name).

    Raises:
        CorruptCheckpointError: of a tensor there is too little or too much.
    """
    found: dict[tuple[str, str], list[tuple[ChunkIndex, Chunk]]] = {}
    for index in indexes:
        for chunk in index.chunks:
            found.setdefault((chunk.of, chunk.name), []).append((index, chunk))
    return {key: _whole(directory, pieces) for key, pieces in found.items()}


def _rows(
    item_bytes: int, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[slice, ...], tuple[int | slice, ...]]]:
    """Cut a box of a row-major array into (first byte, shape, box in it, place in the box) of whole rows."""
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


def _whole(directory: str, pieces: list[tuple[ChunkIndex, Chunk]]) -> StoredShards:
    """Return the tensor that chunks of one name make up.

    Raises:
        CorruptCheckpointError: they are of different tensors, overlap, or leave something out.
    """
    first = pieces[0][1]
    covered = 0
    for index, chunk in pieces:
        if (chunk.dtype, chunk.shape) != (first.dtype, first.shape):
            expected = f"{first.dtype} {first.shape}, as in another chunk"
            raise _bad_index(directory, index, chunk, f"{chunk.dtype} {chunk.shape}", expected)
        covered += math.prod(chunk.sizes)
    overlap = _overlap([chunk for _, chunk in pieces if math.prod(chunk.sizes)])
    if overlap is not None:
        index = next(index for index, chunk in pieces if chunk is overlap)
        found = f"a box that another has too: {overlap.sizes} from {overlap.offsets} on"
        raise _bad_index(directory, index, overlap, found, "each value once")
    if covered != math.prod(first.shape):
        found = f"chunks of {covered} values"
        raise _bad_index(directory, pieces[0][0], first, found, f"{math.prod(first.shape)} values, {first.shape}")
    return StoredShards(first.of, first.name, first.dtype, first.shape, tuple(pieces))


def _overlap(boxes: Sequence[Chunk]) -> Chunk | None:
    """Return a box that meets another, None where none does: swept along the dimension with the most beginnings."""
    if len(boxes) < 2:
        return None
    if not boxes[0].shape:
        return boxes[1]
    dim = max(range(len(boxes[0].shape)), key=lambda d: len({box.offsets[d] for box in boxes}))
    order = sorted(range(len(boxes)), key=lambda n: boxes[n].offsets[dim])
    active: list[tuple[int, int]] = []  # (end, number) of the boxes that the sweep is in
    for number in order:
        box = boxes[number]
        del active[: bisect_right(active, (box.offsets[dim], len(boxes)))]
        if any(_meet(box, boxes[other]) for _, other in active):
            return box
        insort(active, (box.offsets[dim] + box.sizes[dim], number))
    return None


def _meet(one: Chunk, other: Chunk) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + other_size and b < a + size for a, size, b, other_size in sides)


def _bad_index(
    directory: str, index: ChunkIndex, chunk: Chunk, found: object, expected: object
) -> CorruptCheckpointError:
    path = layout.join(directory, layout.dense_index(index.shard, index.shards))
    return CorruptCheckpointError(path, f"tensor {chunk.name!r}", found=found, expected=expected)
