"""What an optimizer sees of a table: the gradients that wait for its step, and whose table it is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.sparse.table.gradients import RowGradients
from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.opaque import opaque

Int64s = npt.NDArray[np.int64]


class TrainedTable(TableModule):
    """A table whose rows have gradients, which go to the optimizer that was made for it last."""

    embedding_shape: tuple[int, ...]
    trained_by: object = None  # the mark of that optimizer

    @opaque
    def add_gradients(self, ids: Int64s, grads: Tensor) -> None:
        """Add what a backward pass gave for ``ids``, of which some may be equal, shape (n, *embedding_shape)."""
        self._gradients.add(ids, grads, self._store)

    @property
    @opaque
    def grad(self) -> Tensor | None:
        """The gradients that the optimizer takes next: one row for each different id, float32 or float64.

        Changes in place count, which is how scalers and clipping work. None where there was no backward pass; a row of
        zeros where it reached no id. Set to None, they are forgotten.
        """
        values = self._gradients.values(self._store)
        if values is None:
            return None
        return self._exposed(values if len(values) else values.new_zeros(1, *self.embedding_shape))

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        present = self.grad
        if grad is None:
            self._gradients.clear()
        elif present is None or grad.shape != present.shape:
            expected = "none, for no backward pass reached it" if present is None else str(tuple(present.shape))
            raise ValueError(f"gradients of table {self.name!r}: found shape {tuple(grad.shape)}, expected {expected}")
        elif grad is not present:
            present.copy_(grad)

    @opaque
    def take_gradients(self) -> tuple[Int64s, Tensor] | None:
        """Return (rows, summed gradients) of all backward passes since the last call, and forget them.

        The rows are all different; None where there was no backward pass.
        """
        with self._store.lock:
            taken = self.row_gradients()
            if taken is None:
                return None
            taken.used[0] = 1
            return taken.rows, taken.grads

    def row_gradients(self) -> RowGradients | None:
        """Return what :meth:`take_gradients` would, and keep them until they are marked as used."""
        return self._gradients.of_rows(self._store)

    @opaque
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the backward passes so far."""
        super().zero_grad(set_to_none)
        self._gradients.clear(set_to_none)

    def _exposed(self, grads: Tensor) -> Tensor:
        """Return gradients as scalers and clipping are to see them."""
        return grads
