"""Stored tensors, put together from the chunks that the indexes of all shards list (no torch here)."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.format.tensor_index import Chunk, TensorIndex


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the chunks that tile it, each with the index that it is in."""

    of: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[TensorIndex, Chunk], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize

    @property
    def place(self) -> tuple[tuple[str, int, int], ...]:
        """File, first byte and size of each chunk, the same for tied tensors."""
        return tuple((chunk.file, chunk.at, chunk.n_bytes) for _, chunk in self.chunks)

    @property
    def is_sharded(self) -> bool:
        """Whether it lies in files of chunks, not in ``model.pt``."""
        return self.chunks[0][1].file != layout.MODEL


def tensors_of(directory: str, indexes: Iterable[TensorIndex]) -> dict[tuple[str, str], StoredTensor]:
    """Return the tensors that the chunks of all shards make up, by (of, name).

    Raises:
        CorruptCheckpointError: of a tensor there is too little or too much.
    """
    found: dict[tuple[str, str], list[tuple[TensorIndex, Chunk]]] = {}
    for index in indexes:
        for chunk in index.chunks:
            found.setdefault((chunk.of, chunk.name), []).append((index, chunk))
    return {key: _whole(directory, pieces) for key, pieces in found.items()}


def _whole(directory: str, pieces: list[tuple[TensorIndex, Chunk]]) -> StoredTensor:
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
    return StoredTensor(first.of, first.name, first.dtype, first.shape, tuple(pieces))


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
    directory: str, index: TensorIndex, chunk: Chunk, found: object, expected: object
) -> CorruptCheckpointError:
    path = layout.join(directory, layout.dense_index(index.shard, index.shards))
    return CorruptCheckpointError(path, f"tensor {chunk.name!r}", found=found, expected=expected)
