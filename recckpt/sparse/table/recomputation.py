"""Look-ups that are made once more in a backward pass, as ``torch.utils.checkpoint`` makes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import xxhash

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MOST = 64  # look-ups of a table between a forward run and its recomputation
_graph_task_id = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # torch.utils.checkpoint asks it too


def is_in_backward() -> bool:
    """Whether this thread is in a backward pass, as a recomputation of any library is."""
    return _graph_task_id() != -1


class Refusals:
    """Which ids of the last look-ups were refused a row.

    A later look-up of the same forward run may admit them. A recomputation of the earlier one is to train the rows that
    it had trained: with ``use_reentrant=True`` the gradients go where the recomputation says.
    """

    def __init__(self) -> None:
        self._refused: dict[int, npt.NDArray[np.uint8]] = {}  # digest of the ids of a look-up -> one bit an id

    def note(self, ids: Int64s, is_refused: Bools | None) -> None:
        """Remember a look-up of the ids, None where none was refused."""
        if is_refused is None and not self._refused:
            return
        key = xxhash.xxh3_64_intdigest(ids.data)
        self._refused.pop(key, None)
        if is_refused is not None:
            self._refused[key] = np.packbits(is_refused)
            if len(self._refused) > _MOST:
                self._refused.pop(next(iter(self._refused)), None)

    def of(self, ids: Int64s) -> Bools:
        """Return which ids the last look-up of just these has refused."""
        bits = self._refused.get(xxhash.xxh3_64_intdigest(ids.data)) if self._refused else None
        if bits is None:
            return np.zeros(len(ids), np.bool_)
        return np.unpackbits(bits, count=len(ids)).view(np.bool_)
