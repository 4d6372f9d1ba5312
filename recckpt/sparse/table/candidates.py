"""Counts of ids that have no row yet: rows of a further table, saved, loaded and sharded as any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from recckpt.format.buckets import mix64
from recckpt.policies.bloom import CELLS, MAX_BLOOM_COUNT, Bloom, Geometry
from recckpt.sparse.table.first_values import embedding_reader
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import compiled
from recckpt.sparse.table.kernels import mix64 as mix64_of_one
from recckpt.sparse.table.nn_module import TableModule
from recckpt.types import EMBEDDING

Int64s = npt.NDArray[np.int64]
MakeTable = Callable[[int, torch.dtype, str], TableModule]

_INVERSE_1, _INVERSE_2 = np.uint64(0x96DE1B173F119089), np.uint64(0x319642B2D24D8EC3)  # of the factors of mix64
_S16, _S27, _S30, _S31, _S48, _S54, _S60, _S62 = (np.uint64(n) for n in (16, 27, 30, 31, 48, 54, 60, 62))
_SECOND = np.uint64(0x9E3779B97F4A7C15)  # the step of splitmix64: other bits than those that choose the block


class Candidates(Protocol):
    """Counts of ids that have no row, in a table; the caller has the lock of the table that is to have the rows."""

    table: TableModule

    def counts(self, ids: Int64s, occurrences: Int64s) -> Int64s:
        """Return how often each of these ids, all different, occurred, the given occurrences included."""

    def add(self, ids: Int64s, occurrences: Int64s) -> None:
        """Count ids, all different, that stay without a row."""

    def waiting(self) -> Int64s:
        """Return the ids that are counted, where they are known."""

    def forget(self, ids: Int64s) -> None:
        """Drop the counts of ids that have rows now, where they are not mixed with the counts of others."""


class ExactCandidates:
    """One row for each id that waits: its count."""

    def __init__(self, make: MakeTable) -> None:
        self.table = make(1, torch.int64, "candidates")

    def counts(self, ids: Int64s, occurrences: Int64s) -> Int64s:
        """Return the counts of the rows, 0 without one, and the occurrences."""
        counted: Int64s = self.table.store.look_up(ids, embedding_reader(self.table)).numpy()[:, 0]
        return counted + occurrences

    def add(self, ids: Int64s, occurrences: Int64s) -> None:
        """Add the occurrences to the rows."""
        store = self.table.store
        with store.lock:
            store.insert(ids, {EMBEDDING: torch.from_numpy(self.counts(ids, occurrences)).view(-1, 1)})

    def waiting(self) -> Int64s:
        """Return the ids of the rows."""
        store = self.table.store
        with store.lock:
            ids: Int64s = store.ids.to_tensor(len(store)).numpy()
        return ids

    def forget(self, ids: Int64s) -> None:
        """Drop the rows."""
        self.table.store.erase(ids)


class BloomCandidates:
    """One row for each block of cells in which something is counted.

    The id of a row is in the bucket of the ids that it counts, so that both are always on one rank. The table bears the
    geometry in its name: no load takes the counts of another geometry for those of this one.
    """

    def __init__(self, make: MakeTable, bloom: Bloom) -> None:
        self.geometry = bloom.geometry
        self.table = make(CELLS, torch.uint8, "candidates_{}x{}".format(*self.geometry))

    def counts(self, ids: Int64s, occurrences: Int64s) -> Int64s:
        """Return the least cell of each id once all of them are counted."""
        _, cells, at = self._counted(ids, occurrences)
        least = np.empty(len(ids), np.int64)
        _least(ids, at, self.geometry.hashes, cells, least)
        return least

    def add(self, ids: Int64s, occurrences: Int64s) -> None:
        """Add the occurrences to the cells, up to what a byte holds."""
        store = self.table.store
        with store.lock:
            blocks, cells, _ = self._counted(ids, occurrences)
            store.insert(blocks, {EMBEDDING: torch.from_numpy(cells)})

    def waiting(self) -> Int64s:
        """Return nothing: cells do not say of which ids they are."""
        return np.empty(0, np.int64)

    def forget(self, ids: Int64s) -> None:
        """Leave the cells as they are: others may be counted in them."""

    def _counted(self, ids: Int64s, occurrences: Int64s) -> tuple[Int64s, npt.NDArray[np.uint8], Int64s]:
        """Return the blocks of ids, their cells with the occurrences added, and which of them is that of each id."""
        index = IdIndex()
        index.reserve(len(ids))
        at, blocks = index.find_or_add(block_of(ids, self.geometry))
        cells = self.table.store.look_up(blocks, embedding_reader(self.table)).numpy()
        _add(ids, at, np.minimum(occurrences, MAX_BLOOM_COUNT), self.geometry.hashes, cells)
        return blocks, cells, at


def candidates_of(make: MakeTable, bloom: Bloom | None) -> Candidates:
    """Return where candidates are counted, in a table that ``make`` makes of a shape, a dtype and a name."""
    return ExactCandidates(make) if bloom is None else BloomCandidates(make, bloom)


def block_of(ids: Int64s, geometry: Geometry) -> Int64s:
    """Return the id of the block of each id, which is in the same bucket."""
    hashed = mix64(ids.view(np.uint64))
    inside = hashed & ((np.uint64(1) << _S48) - np.uint64(1))
    number = (inside * np.uint64(geometry.blocks)) >> _S48
    bucket = hashed >> _S48
    # The bucket again in the lowest bits, by which the index of a table spreads its ids.
    blocks: Int64s = _unmix64((bucket << _S48) | (number << _S16) | bucket).view(np.int64)
    return blocks


def _unmix64(z: Any) -> Any:
    """Return what ``mix64`` made this of."""
    z = (z ^ (z >> _S31) ^ (z >> _S62)) * _INVERSE_2
    z = (z ^ (z >> _S27) ^ (z >> _S54)) * _INVERSE_1
    return z ^ (z >> _S30) ^ (z >> _S60)


@compiled
def _cells_of(id_: Any, n_hashes: int, cells: Any) -> int:
    """Put the different cells of an id into ``cells``, and return how many they are."""
    n, bits = 0, np.uint64(0)
    hashed = mix64_of_one(np.uint64(id_)) + _SECOND
    for i in range(n_hashes):
        if i % 8 == 0:
            bits = hashed = mix64_of_one(hashed + _SECOND)
        cell = np.int64(bits & np.uint64(255))
        bits >>= np.uint64(8)
        is_new = True
        for j in range(n):
            is_new &= cells[j] != cell
        if is_new:
            cells[n] = cell
            n += 1
    return n


@compiled
def _add(ids: Any, at: Any, occurrences: Any, n_hashes: int, blocks: Any) -> None:
    """Add the occurrences of each id to its cells of block ``at``; a cell stays at 255."""
    cells = np.empty(n_hashes, np.int64)
    for i in range(len(ids)):
        for j in range(_cells_of(ids[i], n_hashes, cells)):
            count = np.int64(blocks[at[i], cells[j]]) + occurrences[i]
            blocks[at[i], cells[j]] = min(count, 255)


@compiled
def _least(ids: Any, at: Any, n_hashes: int, blocks: Any, least: Any) -> None:
    """Set ``least`` to the least cell of each id."""
    cells = np.empty(n_hashes, np.int64)
    for i in range(len(ids)):
        least[i] = 255
        for j in range(_cells_of(ids[i], n_hashes, cells)):
            least[i] = min(least[i], np.int64(blocks[at[i], cells[j]]))
