"""Decides by a policy which looked-up ids get rows, and counts the ids that have no row yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from recckpt.format.buckets import mix64
from recckpt.policies.admit import CELLS, MAX_BLOOM_COUNT, Admit, Bloom, Geometry
from recckpt.sparse.table.checks import check_owned
from recckpt.sparse.table.eviction import TableTime
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import compiled
from recckpt.sparse.table.kernels import mix64 as mix64_of_one
from recckpt.sparse.table.nn_module import TableModule, embedding_reader, first_embeddings
from recckpt.sparse.table.row_store import RowStore
from recckpt.types import EMBEDDING

Int64s = npt.NDArray[np.int64]
# (Embeddings of ids, indices of the ids that have rows or None for all); only ids with rows get gradients.
Fetched = tuple[Tensor, Int64s | None]
MakeTable = Callable[[int, torch.dtype, str], TableModule]
# Inverses of the factors of mix64.
_INVERSE_1, _INVERSE_2 = np.uint64(0x96DE1B173F119089), np.uint64(0x319642B2D24D8EC3)
_S16, _S27, _S30, _S31, _S48, _S54, _S60, _S62 = (np.uint64(n) for n in (16, 27, 30, 31, 48, 54, 60, 62))
_SECOND = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment: makes these bits independent of those for the block
Bools = npt.NDArray[np.bool_]
_MOST = 64  # number of look-ups remembered, for a recomputation that comes later than other look-ups
FetchRows = Callable[[Int64s, Int64s], Tensor]


class Candidates:
    """Counts of ids that wait for a row, one row per id. Callers hold the lock of the embedding table."""

    def __init__(self, make: MakeTable) -> None:
        self.table = make(1, torch.int64, "candidates")

    def counts(self, ids: Int64s, occurrences: Int64s) -> Int64s:
        """Return how often each of these distinct ids has occurred, including ``occurrences``."""
        counted: Int64s = self.table.store.look_up(ids, embedding_reader(self.table)).numpy()[:, 0]
        return counted + occurrences

    def add(self, ids: Int64s, occurrences: Int64s) -> None:
        store = self.table.store
        with store.lock:
            store.insert(ids, {EMBEDDING: torch.from_numpy(self.counts(ids, occurrences)).view(-1, 1)})

    def waiting(self) -> Int64s:
        store = self.table.store
        with store.lock:
            ids: Int64s = store.ids.to_tensor(len(store)).numpy()
        return ids

    def forget(self, ids: Int64s) -> None:
        self.table.store.erase(ids)


class BloomCandidates(Candidates):
    """A table of counts in blocks of cells; ids share cells by hash. Only blocks with a count have a row.

    The id of a block is in the same bucket as the ids that the block counts, so one rank owns all of them. The name of
    the table includes the geometry, so a load never mixes counts of two geometries.
    """

    def __init__(self, make: MakeTable, bloom: Bloom) -> None:
        self.geometry = bloom.geometry
        self.table = make(CELLS, torch.uint8, "candidates_{}x{}".format(*self.geometry))

    def counts(self, ids: Int64s, occurrences: Int64s) -> Int64s:
        _, cells, at = self._counted(ids, occurrences)
        least = np.empty(len(ids), np.int64)
        _least(ids, at, self.geometry.hashes, cells, least)
        return least

    def add(self, ids: Int64s, occurrences: Int64s) -> None:
        store = self.table.store
        with store.lock:
            blocks, cells, _ = self._counted(ids, occurrences)
            store.insert(blocks, {EMBEDDING: torch.from_numpy(cells)})

    def waiting(self) -> Int64s:
        return np.empty(0, np.int64)  # the ids cannot be recovered from the cells

    def forget(self, ids: Int64s) -> None:
        """Do nothing, because other ids may share the cells."""

    def _counted(self, ids: Int64s, occurrences: Int64s) -> tuple[Int64s, npt.NDArray[np.uint8], Int64s]:
        """Return the blocks of ids, their cells with the occurrences added, and the index of each id's block."""
        index = IdIndex()
        index.reserve(len(ids))
        at, blocks = index.find_or_add(block_of(ids, self.geometry))
        cells = self.table.store.look_up(blocks, embedding_reader(self.table)).numpy()
        _add(ids, at, np.minimum(occurrences, MAX_BLOOM_COUNT), self.geometry.hashes, cells)
        return blocks, cells, at


def block_of(ids: Int64s, geometry: Geometry) -> Int64s:
    """Return the id of each id's block. Both ids are in the same bucket."""
    hashed = mix64(ids.view(np.uint64))
    inside = hashed & ((np.uint64(1) << _S48) - np.uint64(1))
    number = (inside * np.uint64(geometry.blocks)) >> _S48
    bucket = hashed >> _S48
    # The bucket is repeated in the lowest bits, because the index of a table spreads its ids by these bits.
    z = (bucket << _S48) | (number << _S16) | bucket
    z = (z ^ (z >> _S31) ^ (z >> _S62)) * _INVERSE_2  # inverts mix64, so that the block's id hashes to z
    z = (z ^ (z >> _S27) ^ (z >> _S54)) * _INVERSE_1
    blocks: Int64s = (z ^ (z >> _S30) ^ (z >> _S60)).view(np.int64)
    return blocks


@compiled
def _cells_of(id_: Any, n_hashes: int, cells: Any) -> int:
    """Write the distinct cells of an id to ``cells`` and return their number."""
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
    cells = np.empty(n_hashes, np.int64)
    for i in range(len(ids)):
        for j in range(_cells_of(ids[i], n_hashes, cells)):
            count = np.int64(blocks[at[i], cells[j]]) + occurrences[i]
            blocks[at[i], cells[j]] = min(count, 255)


@compiled
def _least(ids: Any, at: Any, n_hashes: int, blocks: Any, least: Any) -> None:
    cells = np.empty(n_hashes, np.int64)
    for i in range(len(ids)):
        least[i] = 255
        for j in range(_cells_of(ids[i], n_hashes, cells)):
            least[i] = min(least[i], np.int64(blocks[at[i], cells[j]]))


class Admission:
    """Applies a policy for which ids get rows, and counts the ids that wait, if the policy needs counts.

    Remembers which ids the last look-ups refused, because ``torch.utils.checkpoint`` repeats look-ups: a repeated
    look-up must train the same rows as the first one, although a look-up in between may have admitted more ids.
    """

    def __init__(self, policy: Admit, table_time: TableTime, make: MakeTable) -> None:
        self.policy = policy
        self.candidates: Candidates | None = None
        if policy.counts:
            self.candidates = Candidates(make) if policy.bloom is None else BloomCandidates(make, policy.bloom)
        self._refused: dict[int, npt.NDArray[np.uint8]] = {}  # digest of a look-up's ids -> one bit per id
        self._table_time = table_time

    def fetch(self, table: TableModule, ids: Int64s, occurrences: Int64s, fetch_rows: FetchRows) -> Fetched:
        """Return the embeddings of ids. Admitted ids get a row; other ids read the initial values of a new row.

        ``fetch_rows`` inserts rows for ids and returns their embeddings. The rows change before the counts; after an
        exception each of the two is either fully changed or unchanged.
        """
        with table.store.lock:
            absent = np.flatnonzero(table.store.find(ids) < 0)
            if len(absent) == 0:
                self._note_refused(ids, None)
                return fetch_rows(ids, occurrences), None
            index = IdIndex()
            index.reserve(len(absent))
            groups, new_ids = index.find_or_add(ids[absent])
            check_owned(table.name, table.slice, new_ids)
            occurred = np.bincount(groups, occurrences[absent], len(new_ids)).astype(np.int64)
            counts = occurred if self.candidates is None else self.candidates.counts(new_ids, occurred)
            is_in = self._decide(table.name, new_ids, counts)
            is_out = np.flatnonzero(~is_in)
            is_present = np.ones(len(ids), np.bool_)
            is_present[absent] = is_in[groups]
            present, refused = np.flatnonzero(is_present), np.flatnonzero(~is_present)
            occurrences, first_at = occurrences.copy(), np.empty(len(new_ids), np.int64)
            first_at[groups[::-1]] = absent[::-1]  # reversed, so that each id keeps its first position in the look-up
            occurrences[first_at] += counts - occurred  # adds the occurrences counted while the id waited
            rows = fetch_rows(ids[present], occurrences[present])
            first = first_embeddings(table, new_ids[is_out])  # after new rows exist, as in a recomputation
            places = np.empty(len(ids), np.int64)  # each id's position in ``rows`` followed by ``first``
            places[present] = np.arange(len(present))
            places[refused] = len(present) + (np.cumsum(~is_in) - 1)[groups[~is_in[groups]]]
            rows = torch.cat([rows, first]).index_select(0, torch.from_numpy(places).to(rows.device))
            if self.candidates is not None:
                self.candidates.add(new_ids[is_out], occurred[is_out])
            self.forget(new_ids[is_in])
            self._note_refused(ids, ~is_present if len(refused) else None)
        return rows, present if len(refused) else None

    def _note_refused(self, ids: Int64s, is_refused: Bools | None) -> None:
        if is_refused is None and not self._refused:
            return
        key = xxhash.xxh3_64_intdigest(ids.data)
        self._refused.pop(key, None)
        if is_refused is not None:
            self._refused[key] = np.packbits(is_refused)
            if len(self._refused) > _MOST:
                self._refused.pop(next(iter(self._refused)), None)

    def refused(self, ids: Int64s) -> Bools:
        """Return a mask of the ids that the last look-up of exactly these ids refused."""
        bits = self._refused.get(xxhash.xxh3_64_intdigest(ids.data)) if self._refused else None
        if bits is None:
            return np.zeros(len(ids), np.bool_)
        return np.unpackbits(bits, count=len(ids)).view(np.bool_)

    def forget(self, ids: Int64s) -> None:
        """Drop the counts of ids that now have rows, or were erased. Counts in shared cells stay."""
        if self.candidates is not None:
            self.candidates.forget(ids)

    def forget_present(self, store: RowStore) -> None:
        """Drop the counts of ids that got rows in another way, for example through a merging load."""
        if self.candidates is not None:
            with store.lock:
                waiting = self.candidates.waiting()
                self.forget(waiting[store.find(waiting) >= 0])

    def _decide(self, table: str, ids: Int64s, counts: Int64s) -> Bools:
        step = self._table_time.step
        if self.policy.needs_step and step is None:
            raise ValueError(
                f"table {table!r}: {self.policy!r} decides anew at each step, but the table was not given a step: "
                "make a CheckpointManager and call its step(), or set table.step"
            )
        mask = self.policy.admits(ids, counts, step or 0)
        if not isinstance(mask, np.ndarray) or mask.shape != ids.shape or mask.dtype != bool:
            answer = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else type(mask).__name__
            raise ValueError(f"table {table!r}: admit returned {answer}, expected {len(ids)} bools, one for each id")
        return mask
