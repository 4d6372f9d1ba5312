"""Which rank every id of a batch belongs to, and the way of its row back into the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import N_BUCKETS, bucket_of, gen_slice
from recckpt.sparse.table.id_index import IdIndex

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Route:
    """The different ids of a batch for each of several tables, in the order in which they are sent."""

    ids: Int64s  # in the order of owners, for each owner in the order of tables
    occurrences: Int64s | None  # of each of them in the batch, if the owners are to know
    counts: Int64s  # shape (owners, tables): how many ids they are
    positions: tuple[Int64s, ...]  # by table: where the row of each id of the batch is among those that come back

    def message(self) -> tuple[Int64s, list[int]]:
        """Return what is sent to the owners, and the length for each: its counts, its ids, and their occurrences."""
        n_ids = self.counts.sum(1)
        columns = [some for some in (self.ids, self.occurrences) if some is not None]
        blocks = [np.split(column, np.cumsum(n_ids)[:-1]) for column in columns]
        parts = [part for of_owner in zip(self.counts, *blocks, strict=True) for part in of_owner]
        return np.concatenate(parts), (len(columns) * n_ids + self.counts.shape[1]).tolist()


@dataclass(frozen=True)
class Requests:
    """The ids of which all ranks request rows from this one; several ranks may request the same."""

    ids: tuple[Int64s, ...]  # by table, in the order of the ranks that ask
    counts: Int64s  # shape (ranks, tables): how many ids they are
    occurrences: tuple[Int64s, ...] | tuple[None, ...]  # by table, of each id at the rank that asks, if it says so


def route(batches: Sequence[Int64s], n_owners: int, spacing: int, *, counted: bool) -> Route:
    """Return the way of some batches, one for each table, each id of which is sent once to its owner by ``gen_slice``.

    On the way back the rows of each owner are followed by ``spacing`` more; ``counted`` ids go with their occurrences.
    """
    groups, different = zip(*map(_deduplicated, batches), strict=True)
    tables = np.repeat(np.arange(len(batches)), [len(ids) for ids in different])
    ids = np.concatenate(different)
    owners = _owners(n_owners)[bucket_of(ids)]
    keys = owners * len(batches) + tables
    n_keys = n_owners * len(batches)
    order = np.argsort(keys.astype(np.uint16) if n_keys <= N_BUCKETS else keys, kind="stable")  # 16 bits: radix sort
    places = np.empty(len(ids), np.int64)
    places[order] = np.arange(len(ids)) + owners[order] * spacing
    firsts = np.cumsum([0, *(len(some) for some in different[:-1])])
    sizes = [len(some) for some in different] if counted else []
    occurrences = [np.bincount(group, minlength=n) for group, n in zip(groups, sizes, strict=False)]
    return Route(
        ids[order],
        np.concatenate(occurrences)[order] if counted else None,
        np.bincount(keys, minlength=n_keys).reshape(n_owners, len(batches)),
        tuple(places[first:][group] for first, group in zip(firsts, groups, strict=True)),
    )


def requests_in(message: Int64s, lengths: Sequence[int], n_tables: int, *, counted: bool) -> Requests:
    """Return the requests in a message that joins those of all ranks, whose lengths are given."""
    parts = np.split(message, np.cumsum(lengths)[:-1])
    counts = np.stack([part[:n_tables] for part in parts])
    n_ids = counts.sum(1)
    ids = [part[n_tables : n_tables + n] for part, n in zip(parts, n_ids, strict=True)]
    occurrences = [part[n_tables + n :] for part, n in zip(parts, n_ids, strict=True)]
    return Requests(_by_table(ids, counts), counts, _by_table(occurrences, counts) if counted else (None,) * n_tables)


def _by_table(parts: Sequence[Int64s], counts: Int64s) -> tuple[Int64s, ...]:
    """Return what several ranks sent, each table by table, as one array a table."""
    blocks = [np.split(part, np.cumsum(row)[:-1]) for part, row in zip(parts, counts, strict=True)]
    return tuple(np.concatenate(of_table) for of_table in zip(*blocks, strict=True))


def _deduplicated(ids: Int64s) -> tuple[Int64s, Int64s]:
    """Return for each id its number among the different ones, and those."""
    index = IdIndex()
    index.reserve(len(ids))
    return index.find_or_add(ids)


@lru_cache
def _owners(n_owners: int) -> Int64s:
    """Return the owner of each bucket."""
    begins = [gen_slice(owner, n_owners).begin for owner in range(n_owners)]
    return np.searchsorted(begins, np.arange(N_BUCKETS), side="right").astype(np.int64) - 1
