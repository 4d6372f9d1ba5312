"""How large a counting Bloom filter has to be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from recckpt.format.buckets import N_BUCKETS
from recckpt.types import positive_int, positive_number

CELLS = 256  # of a block: one byte each, and one byte says which
MAX_BLOOM_COUNT = 255
_MAX_HASHES, _MAX_BLOCKS = 16, 1 << 12  # of a bucket
_MAX_CELLS = N_BUCKETS * _MAX_BLOCKS * CELLS  # with an id a cell, more than half share theirs; more are not summed up
_MIN_ERROR = 1e-4


class Geometry(NamedTuple):
    """How many blocks of cells each bucket has, and in how many cells of one of them an id is counted."""

    blocks: int
    hashes: int


@dataclass(frozen=True)
class Bloom:
    """A counting Bloom filter (Fan et al., 2000) in blocks (Putze, Sanders, Singler, 2007), as in DeepRec.

    Each of the 65,536 buckets of ids has blocks of its own, so the filter is divided among any number of ranks as the
    ids are, and counts the same on all of them. A cell is one byte. Blocks exist once something is counted in them.

    Attributes:
        capacity: how many different ids it is to count. Beyond that the error grows; nothing else happens.
        error: how many of the ids may be taken for more frequent than they are once it is full, as a part of 1; from
            0.0001 to 0.5.

    Raises:
        ValueError: a number is not such.
    """

    capacity: int
    error: float

    def __post_init__(self) -> None:
        positive_int("Bloom: capacity", self.capacity)
        if not _MIN_ERROR <= positive_number("Bloom: error", self.error) <= 0.5:
            raise ValueError(f"Bloom: error must be {_MIN_ERROR} to 0.5, found {self.error!r}")
        if self.capacity > _MAX_CELLS or false_positives(self.capacity, _MAX_BLOCKS) > self.error:
            raise ValueError(f"Bloom: no filter has room for capacity={self.capacity} at error={self.error}")

    @property
    def geometry(self) -> Geometry:
        """The smallest that does."""
        return _smallest(self.capacity, self.error)

    @property
    def nbytes(self) -> int:
        """Bytes of all cells; a table of blocks takes a sixth more, for the index."""
        return N_BUCKETS * self.geometry.blocks * CELLS


@lru_cache
def _smallest(capacity: int, error: float) -> Geometry:
    low, high = 1, _MAX_BLOCKS  # the first number of blocks that will do is in [low, high]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if false_positives(capacity, middle) <= error else (middle + 1, high)
    hashes = (n for n in range(1, _MAX_HASHES + 1) if _error(capacity, Geometry(low, n)) <= error)
    return Geometry(low, next(hashes))


def false_positives(capacity: int, blocks: int) -> float:
    """Return what part of the ids shares all cells with others, by the best number of hashes."""
    return min(_error(capacity, Geometry(blocks, hashes)) for hashes in range(1, _MAX_HASHES + 1))


def _error(capacity: int, geometry: Geometry) -> float:
    """Return the part over blocks that hold more ids and fewer, as a Poisson distribution has it."""
    mean = capacity / (N_BUCKETS * geometry.blocks)
    spread = 8 * math.sqrt(mean) + 20
    ids = np.arange(max(0, int(mean - spread)), int(mean + spread) + 1)
    logs = ids * math.log(mean) - mean - np.array([math.lgamma(n + 1) for n in ids])
    full = 1 - (1 - 1 / CELLS) ** (geometry.hashes * ids)
    return float((np.exp(logs) * full**geometry.hashes).sum())
