"""Gradients of a table: which ids a backward pass reached, and with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import add_rows
from recckpt.sparse.table.opaque import opaque

if TYPE_CHECKING:
    from recckpt.sparse.table.row_store import RowStore

Int64s = npt.NDArray[np.int64]


_MAX_ENTRIES = 64


class Gradients:
    """The gradients of a table since its optimizer last took them, one entry a backward pass.

    An entry keeps ids, not rows: rows may be renumbered before the optimizer comes.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Int64s, Tensor]] = []

    def add(self, ids: Int64s, grads: Tensor) -> None:
        """Remember the gradients of ``ids``, of which some may be equal."""
        # Summed now and not when taken: the memory of ``grads`` is autograd's, which may reuse it.
        self._entries.append(_sum_by_id(ids, grads))
        if len(self._entries) == _MAX_ENTRIES:  # of a table that no optimizer steps, they would only pile up
            self._merge()

    def clear(self, set_to_none: bool = True) -> None:
        """Forget all gradients; those of no rows stay where there were any and ``set_to_none`` is False."""
        self._entries = [] if set_to_none else [(ids[:0], grads[:0]) for ids, grads in self._entries[:1]]

    @property
    def values(self) -> Tensor | None:
        """The gradients that :meth:`take` would give, one row a different id; changed in place, they stay so."""
        self._merge()
        return self._entries[0][1] if self._entries else None

    def take(self, store: RowStore) -> tuple[Int64s, Tensor] | None:
        """Return (different rows, their summed gradients) and forget them; ids without a row drop out."""
        if not self._entries:
            return None
        self._merge()
        ids, grads = self._entries.pop()
        rows = store.find(ids)
        present = np.flatnonzero(rows >= 0)
        if len(present) < len(rows):
            rows, grads = rows[present], grads[torch.from_numpy(present).to(grads.device)]
        return rows, grads

    def _merge(self) -> None:
        """Make one entry of all, in the same order of additions."""
        if len(self._entries) > 1:
            ids, grads = zip(*self._entries, strict=True)
            self._entries = [_sum_by_id(np.concatenate(ids), torch.cat(grads))]


def _sum_by_id(ids: Int64s, grads: Tensor) -> tuple[Int64s, Tensor]:
    """Return the different ids and the sum of the gradients of each, at least in float32."""
    index = IdIndex()
    index.reserve(len(ids))
    groups, different = index.find_or_add(ids)
    dtype = torch.promote_types(grads.dtype, torch.float32)
    sums = torch.zeros((len(different), *grads.shape[1:]), dtype=dtype, device=grads.device)
    add_by_group(groups, grads, sums)
    return different, sums


def add_by_group(groups: Int64s, grads: Tensor, sums: Tensor) -> None:
    """Add each row of ``grads`` to the row of ``sums``, which is contiguous, that its group names, in order."""
    grads = grads.detach().to(sums.dtype).contiguous()
    if sums.device.type == "cpu":
        add_rows(groups, grads.flatten(1).numpy(), sums.flatten(1).numpy())
    else:
        sums.index_add_(0, torch.from_numpy(groups).to(sums.device), grads)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, read: Callable[[], Tensor], gradients: Gradients, ids: Int64s) -> Tensor:
        ctx.gradients, ctx.ids = gradients, ids
        return read()

    @staticmethod
    @opaque
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.gradients.add(ctx.ids, grad)
        return None, None, None, None


def lookup_with_grad(read: Callable[[], Tensor], gradients: Gradients, ids: Int64s) -> Tensor:
    """Return ``read()``, the embeddings of ``ids``; a backward pass through them adds to ``gradients``."""
    anchor = torch.empty(0, requires_grad=True)  # gives the function an input to differentiate
    out: Tensor = _Lookup.apply(anchor, read, gradients, ids)  # type: ignore[no-untyped-call]
    return out
