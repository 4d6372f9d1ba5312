"""Gradients of a table: which rows a backward pass reached, and with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.index import IdIndex

if TYPE_CHECKING:
    from recckpt.sparse.store import RowStore

Int64s = npt.NDArray[np.int64]


class Gradients:
    """The gradients of a table since its optimizer last took them, one entry a backward pass."""

    def __init__(self) -> None:
        self._entries: list[tuple[Int64s, Int64s, int, Tensor]] = []

    def add(self, ids: Int64s, rows: Int64s, generation: int, grad: Tensor) -> None:
        """Remember the gradient of ``rows``, which were those of ``ids`` in this generation of the store."""
        self._entries.append((ids, rows, generation, grad))

    def clear(self) -> None:
        """Forget all gradients."""
        self._entries.clear()

    def take(self, store: RowStore) -> tuple[Int64s, Tensor] | None:
        """Return (different rows, their summed gradients) and forget them; rows erased meanwhile drop out."""
        if not self._entries:
            return None
        rows = np.concatenate([
            rows if generation == store.generation else store.find(ids)
            for ids, rows, generation, _ in self._entries
        ])
        grads = torch.cat([grad for *_, grad in self._entries])
        self._entries.clear()
        return _sum_by_row(rows, grads)


def _sum_by_row(rows: Int64s, grads: Tensor) -> tuple[Int64s, Tensor]:
    """Add up the gradients of equal rows, in order of occurrence; row -1 drops out."""
    present = np.flatnonzero(rows >= 0)
    if len(present) < len(rows):
        rows, grads = rows[present], grads[torch.from_numpy(present).to(grads.device)]
    groups, different = IdIndex().find_or_add(rows)
    sums = torch.zeros((len(different), *grads.shape[1:]), dtype=grads.dtype, device=grads.device)
    return different, sums.index_add_(0, torch.from_numpy(groups).to(grads.device), grads)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, read: Callable[[Int64s], Tensor], gradients: Gradients, *where: Any
    ) -> Tensor:
        ctx.gradients, ctx.where = gradients, where
        return read(where[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # type: ignore[override]  # torch types it as Any
        ctx.gradients.add(*ctx.where, grad.detach())
        return (None,) * (3 + len(ctx.where))


def lookup_with_grad(
    read: Callable[[Int64s], Tensor], gradients: Gradients, ids: Int64s, rows: Int64s, generation: int
) -> Tensor:
    """Return ``read(rows)``; a backward pass through it adds to ``gradients``."""
    anchor = torch.empty(0, requires_grad=True)  # gives the function an input to differentiate
    out: Tensor = _Lookup.apply(anchor, read, gradients, ids, rows, generation)  # type: ignore[no-untyped-call]
    return out
