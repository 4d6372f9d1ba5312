"""What the ranks that share a table have to agree on; a table of one process has it all to itself."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.policies.evict import Mask, first_rows

Int64s = npt.NDArray[np.int64]


class Sharing(Protocol):
    """The ranks that share a table. All methods but ``exposed`` are collective."""

    def numbers(self, what: str, number: int, problem: Exception | None = None) -> list[int]:
        """Return the number of each rank, or raise the ``problem`` of one."""

    def first_rows(self, by: npt.NDArray[Any], ids: Int64s, n: int) -> Mask:
        """Return which rows of this rank are among the first ``n`` of all ranks to go."""

    def refuse(self, table: Any, error: Exception, admit: bool | None) -> NoReturn:
        """Raise the error of wrong arguments, in place of a look-up that the other ranks wait for."""

    def exposed(self, grads: Tensor, name: str) -> Tensor:
        """Return the gradients of the table ``name`` as scalers and clipping are to see them."""


class NotShared:
    """The one process that has all rows."""

    def numbers(self, what: str, number: int, problem: Exception | None = None) -> list[int]:
        """Return the number, or raise the problem."""
        if problem is not None:
            raise problem
        return [number]

    def first_rows(self, by: npt.NDArray[Any], ids: Int64s, n: int) -> Mask:
        """Return which rows are among the first ``n`` to go."""
        return first_rows(by, ids, n)

    def refuse(self, table: Any, error: Exception, admit: bool | None) -> NoReturn:
        """Raise the error."""
        raise error

    def exposed(self, grads: Tensor, name: str) -> Tensor:
        """Return the gradients."""
        return grads
