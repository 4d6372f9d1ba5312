"""A tensor that several files have pieces of, put together when it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from recckpt.convert.source import Array, SourceTensor
from recckpt.errors import ConversionError
from recckpt.format.dtypes import NUMPY_DTYPES


@dataclass(frozen=True)
class SourceBox:
    """A box of a tensor; ``read`` returns rows [begin, end) of it, of a scalar ``read(0, 1)`` its value."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[int, int], Array]


def put_together(name: str, dtype: str, shape: tuple[int, ...], pieces: Sequence[SourceBox], url: str) -> SourceTensor:
    """Return a tensor whose values are read from its pieces.

    Raises:
        ConversionError: a piece leaves the tensor, or a value is missing or there twice.
    """
    pieces = sorted(pieces, key=lambda piece: piece.offsets)
    _check_tiled(name, shape, pieces, url)

    def read(begin: int, end: int) -> Array:
        if not shape:
            return pieces[0].read(0, 1)
        values = np.empty((end - begin, *shape[1:]), NUMPY_DTYPES[dtype])
        for piece in pieces:
            top = piece.offsets[0]
            first, last = max(begin, top), min(end, top + piece.sizes[0])
            if first < last:
                rest = tuple(slice(o, o + s) for o, s in zip(piece.offsets[1:], piece.sizes[1:], strict=True))
                place = (slice(first - begin, last - begin), *rest)
                values[place] = piece.read(first - top, last - top)
        return values

    return SourceTensor(name, dtype, shape, (url, name), read)


def _check_tiled(name: str, shape: tuple[int, ...], pieces: Sequence[SourceBox], url: str) -> None:
    """Refuse pieces that leave the tensor, or that do not have as many values together as it has."""
    where = repr(name)
    for piece in pieces:
        sides = zip(piece.offsets, piece.sizes, shape, strict=False)
        if len(piece.sizes) != len(shape) or any(at + size > whole for at, size, whole in sides):
            found = f"a piece of {piece.sizes} at {piece.offsets}"
            raise ConversionError(url, where, found=found, expected=f"one inside {shape}")
    filled = [piece for piece in pieces if math.prod(piece.sizes)]
    n_values = sum(math.prod(piece.sizes) for piece in filled)
    if n_values != math.prod(shape) or _overlap(filled):
        found = f"pieces of {n_values} values{', some of them twice' if _overlap(filled) else ''}"
        raise ConversionError(url, where, found=found, expected=f"{math.prod(shape)}, each once")


def _overlap(pieces: Sequence[SourceBox]) -> bool:
    """Say whether two pieces, which are in the order of their offsets, have a value in common."""
    running: list[SourceBox] = []  # those that reach as far as the piece in the first dimension
    for piece in pieces:
        if not piece.offsets:
            return len(pieces) > 1
        running = [each for each in running if each.offsets[0] + each.sizes[0] > piece.offsets[0]]
        if any(_meet(piece, each) for each in running):
            return True
        running.append(piece)
    return False


def _meet(one: SourceBox, other: SourceBox) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(at < there + length and there < at + size for at, size, there, length in sides)
