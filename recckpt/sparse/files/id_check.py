"""The ids of a table as batches bring them: in the order of their buckets, and each once (no torch here)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import bucket_of
from recckpt.format.catalog import Batch

Int64s = npt.NDArray[np.int64]

_OUT_OF_ORDER = "rows out of bucket order", "buckets that never fall"


class IdCheck:
    """The ids of one table in one part, batch by batch: in bucket order, and none twice."""

    def __init__(self) -> None:
        self._first_bucket = self._bucket = -1
        self._head: Int64s = np.empty(0, np.int64)  # the ids in the first bucket, where the part before may end
        self._tail: Int64s = np.empty(0, np.int64)  # the ids so far in the last bucket, which may go on

    def check(self, ids: Int64s, batch: Batch) -> Iterator[tuple[str, str]]:
        """Yield (found, expected) for all that is wrong with the ids of the next batch."""
        buckets = bucket_of(ids)
        span = int(buckets.min()), int(buckets.max()) + 1
        if span != batch.buckets:
            yield f"ids of buckets {list(span)}", f"{list(batch.buckets)}"
        if buckets[0] < self._bucket or (np.diff(buckets) < 0).any():
            yield _OUT_OF_ORDER
        if buckets[0] != self._bucket:
            self._tail = self._tail[:0]
        yield from repeats(np.concatenate([self._tail, ids]))
        if self._bucket < 0:
            self._first_bucket = int(buckets[0])
        if buckets[0] == self._first_bucket:
            self._head = np.union1d(self._head, ids[buckets == self._first_bucket])
        self._bucket = int(buckets[-1])
        ended = ids[buckets == self._bucket]
        self._tail = np.union1d(self._tail, ended) if buckets[0] == self._bucket else ended.copy()

    def follow(self, before: IdCheck) -> Iterator[tuple[str, str]]:
        """Yield (found, expected) for what does not fit to the part before; take over what goes on from there."""
        if self._first_bucket < before._bucket:
            yield _OUT_OF_ORDER
        elif self._first_bucket == before._bucket:
            twice = np.intersect1d(before._tail, self._head)
            yield from repeats(np.concatenate([twice, twice]))
            if self._bucket == self._first_bucket:
                self._tail = np.union1d(before._tail, self._tail)


def repeats(ids: Int64s) -> Iterator[tuple[str, str]]:
    """Yield (found, expected) if an id is there twice."""
    ordered = np.sort(ids)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if len(twice):
        others = f" and {len(twice) - 1} others" if len(twice) > 1 else ""
        yield f"id {twice[0]}{others} twice", "every id once"
