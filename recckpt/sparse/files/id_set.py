"""Ids that are looked for, and where in a checkpoint they may be (no torch here)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from recckpt.format.buckets import bucket_of
from recckpt.format.distinct import distinct
from recckpt.format.shards import IdRange


class IdSet:
    """Some ids, and which batches and shards may have any of them.

    Args:
        ids: in order, each once.
    """

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self.ids = ids
        self._of_ids = bucket_of(ids)
        self._buckets = distinct(self._of_ids)

    def meets(self, buckets: tuple[int, int], ids: IdRange | None) -> bool:
        """Say whether any id lies both in buckets [begin, end) and in a range of ids, None for all."""
        at = np.searchsorted(self._buckets, buckets[0])
        if at == len(self._buckets) or self._buckets[at] >= buckets[1]:
            return False
        if ids is None:
            return True
        first, last = np.searchsorted(self.ids, ids[0]), np.searchsorted(self.ids, ids[1], side="right")
        within = self._of_ids[first:last]
        if len(within) in (0, len(self.ids)):
            return bool(len(within))
        return bool(((buckets[0] <= within) & (within < buckets[1])).any())
