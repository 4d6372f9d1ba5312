"""Where the rows of columns on the CPU lie, for loops that change several columns in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.sparse.table.column import Column

Int64s = npt.NDArray[np.int64]


class Addresses(NamedTuple):
    """The addresses of the blocks of one column after those of the other."""

    blocks: Int64s
    starts: Int64s
    shifts: Int64s
    row_bytes: Int64s

    @classmethod
    def of(cls, columns: Sequence[Column]) -> Addresses:
        """Return where the rows of columns lie now."""
        blocks = [np.empty(0, np.int64), *(column.memory.addresses for column in columns)]
        return cls(
            np.concatenate(blocks),
            np.cumsum([len(some) for some in blocks]),
            np.array([column.shift for column in columns], np.int64),
            np.array([column.spec.row_bytes for column in columns], np.int64),
        )
