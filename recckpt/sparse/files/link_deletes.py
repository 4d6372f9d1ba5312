"""The ids that one link of a chain deletes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from recckpt.sparse.files.id_check import is_among

Int64s = npt.NDArray[np.int64]


class LinkDeletes:
    """The deleted ids of a link by table and shard; in one shard an id is there once, as a row or as a delete.

    ``add`` may be called from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], Int64s] = {}

    def add(self, table: str, shard: int, ids: Int64s) -> Iterator[int]:
        """Know the ids of a batch; yield those that were there before."""
        with self._lock:
            both = np.sort(np.concatenate([self.of_shard(table, shard), ids]))
            self._found[table, shard] = both
        yield from both[1:][both[1:] == both[:-1]].tolist()

    def of_shard(self, table: str, shard: int) -> Int64s:
        """Return the ids that one shard deletes, in order."""
        return self._found.get((table, shard), np.empty(0, np.int64))

    def repeated(self, table: str, shard: int, ids: Int64s) -> Iterator[int]:
        """Yield those of the ids, which have rows in a shard, that the same shard deletes."""
        yield from ids[is_among(ids, self.of_shard(table, shard))].tolist()

    def of(self, table: str) -> Int64s:
        """Return the ids that any shard deletes."""
        some = [ids for (name, _), ids in self._found.items() if name == table]
        return np.concatenate([np.empty(0, np.int64), *some])
