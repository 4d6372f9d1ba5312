"""Ids that are row numbers: they need no memory, and never change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64s = npt.NDArray[np.int64]
_PIECE_ROWS = 1 << 17  # ids made at a time: 1 MiB


class RowRange:
    """The ids ``first`` to ``first + n - 1`` of the rows 0 to ``n - 1``. Thread-safe."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n = first, n

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the ids of the rows [begin, end), piece by piece."""
        for first in range(begin, end, _PIECE_ROWS):
            yield torch.arange(self.first + first, self.first + min(end, first + _PIECE_ROWS), device="cpu")

    def gather(self, rows: npt.NDArray[Any]) -> Tensor:
        """Return the ids of ``rows``."""
        return torch.from_numpy(rows.astype(np.int64) + self.first)

    def gather_into(self, rows: npt.NDArray[Any], target: npt.NDArray[np.uint8]) -> None:
        """Copy the bytes of the ids of ``rows`` into ``target``."""
        np.add(rows, self.first, out=target.view(np.int64), casting="unsafe")

    def to_tensor(self, n_rows: int) -> Tensor:
        """Return the ids of the first rows."""
        return torch.arange(self.first, self.first + n_rows, device="cpu")

    def keep(self, rows: Int64s) -> None:
        """Do nothing: the id of a row never changes."""

    def narrow(self, bits: npt.NDArray[np.uint8]) -> None:
        """Do nothing."""

    def fail(self, error: Exception) -> None:
        """Do nothing: the slots fail."""

    def close(self) -> None:
        """Do nothing: there is no memory."""
