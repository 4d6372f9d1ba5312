"""The rule of ids for a load: which are new, come twice, or are deleted, while links are read in any order of batches.

Links come newest first. The form for files, whose ids are sorted, is :mod:`recckpt.sparse.files.once`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.format.distinct import is_among, repeated
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import compiled

Int64s = npt.NDArray[np.int64]


class RepeatedIdError(Exception):
    """An id is twice in one link."""

    def __init__(self, id_: int) -> None:
        super().__init__(f"id {id_} twice")


class LinkRows:
    """Tells the ids of one link that are new from those that an index had before the link. Not thread-safe.

    Args:
        n_known: how many ids the index had.
    """

    def __init__(self, n_known: int) -> None:
        self._n_rows = n_known
        self._met = np.zeros(n_known, np.uint8)  # whether an id of newer links was in this one, too

    def new(self, ids: Int64s, rows: Int64s, n_new: int) -> Int64s:
        """Return the positions of the ids that are new.

        Args:
            ids: of a batch.
            rows: where the index has them by now, -1 where it has not.
            n_new: how many it did not have before, whose rows are its last ones.

        Raises:
            RepeatedIdError: one was in the link before, or is twice in the batch.
        """
        before, self._n_rows = self._n_rows, self._n_rows + n_new
        if n_new == len(ids):
            return np.arange(len(ids))
        positions = np.empty(len(ids), np.int64)
        repeated, n_found = _new_rows(rows, self._met, before, positions)
        if repeated >= 0:
            raise RepeatedIdError(ids[repeated])
        return positions[:n_found]


class KnownIds:
    """The ids that have been seen, as rows or as deletes. Not thread-safe."""

    def __init__(self) -> None:
        self._ids = IdIndex()
        self._of_link = LinkRows(0)
        self.n_rows = 0  # seen as rows, so those of the chain in the end

    def begin_link(self) -> None:
        """Take all ids so far for those of newer links."""
        self._of_link = LinkRows(len(self._ids))

    def new_rows(self, ids: Int64s) -> Int64s:
        """Return the positions of the ids that no newer link has, and know them; RepeatedIdError where one is twice."""
        rows, new_ids = self._ids.find_or_add(ids)
        self.n_rows += len(new_ids)
        return self._of_link.new(ids, rows, len(new_ids))

    def without(self, ids: Int64s) -> Int64s:
        """Return the positions of the ids that are not known; RepeatedIdError where one that is comes twice."""
        if not len(self._ids):
            return np.arange(len(ids))
        return self._of_link.new(ids, self._ids.find(ids), 0)

    def delete(self, ids: Int64s) -> Int64s:
        """Know ids that this link deletes, after all of its rows; return those that are no row of it or a newer one."""
        return self._ids.find_or_add(ids)[1]


class LinkDeletes:
    """The deleted ids of a link by table and shard; in one shard an id is there once, as a row or as a delete.

    ``add`` may be called from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], Int64s] = {}

    def add(self, table: str, shard: int, ids: Int64s) -> Int64s:
        """Know the ids of a batch; return those that are there twice now."""
        with self._lock:
            both = self._found[table, shard] = np.sort(np.concatenate([self.of_shard(table, shard), ids]))
        return repeated(both)

    def of_shard(self, table: str, shard: int) -> Int64s:
        """Return the ids that one shard deletes, in order."""
        return self._found.get((table, shard), np.empty(0, np.int64))

    def among(self, table: str, shard: int, ids: Int64s) -> Int64s:
        """Return those of the ids, which have rows in a shard, that the same shard deletes."""
        return ids[is_among(ids, self.of_shard(table, shard))]

    def of(self, table: str) -> Int64s:
        """Return the ids that any shard deletes."""
        some = [ids for (name, _), ids in self._found.items() if name == table]
        return np.concatenate([np.empty(0, np.int64), *some])


@compiled
def _new_rows(rows: Any, met: Any, n_rows: int, positions: Any) -> tuple[int, int]:
    """Return the position of an id that is there again, or -1, and the number of those that are new or absent."""
    n_found, next_row = 0, n_rows
    for i in range(len(rows)):
        row = rows[i]
        if 0 <= row < len(met):
            if met[row]:
                return i, n_found
            met[row] = 1
            continue
        if row >= 0:
            if row < next_row:
                return i, n_found
            next_row += 1
        positions[n_found] = i
        n_found += 1
    return -1, n_found
