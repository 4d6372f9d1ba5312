"""Look-ups in torch's graph: a backward pass through the rows leaves their gradients with the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.anchor import captured
from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.opaque import opaque

Int64s = npt.NDArray[np.int64]
Give = Callable[[Int64s, Tensor], object]
Read = Callable[[], tuple[Tensor, Int64s | None]]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, read: Read, give: Give, ids: Int64s) -> Tensor:
        rows, present = read()
        ctx.give, ctx.ids, ctx.present = give, ids, present
        return rows

    @staticmethod
    @opaque
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_anchor = captured(ctx.next_functions[0][0])
        if of_anchor is None:
            ctx.give(*of_present(ctx.ids, grad, ctx.present))
        return of_anchor, None, None, None


def lookup_with_grad(anchor: Tensor, read: Read, give: Give, ids: Int64s) -> Tensor:
    """Return the embeddings of ``ids``, which ``read`` gives, and where those are that have rows; None for all.

    A backward pass through the embeddings gives the gradients of those to ``give``, if ``anchor`` requires a gradient.
    """
    out: Tensor = _Lookup.apply(anchor, read, give, ids)  # type: ignore[no-untyped-call]
    return out


def of_present(ids: Int64s, grads: Tensor, present: Int64s | None) -> tuple[Int64s, Tensor]:
    """Return the ids that have rows, at the places ``present``, and their gradients; None for all."""
    if present is None:
        return ids, grads
    return ids[present], grads.index_select(0, torch.from_numpy(present).to(grads.device))


def add_gradients(table: TableModule, ids: Int64s, grads: Tensor) -> None:
    """Add what a backward pass gave for ``ids``, of which some may be equal, shape (n, *embedding_shape).

    As of a parameter, nothing is added where the table was frozen since the look-up; nor is it to an average.
    """
    if not (table.requires_grad and table.is_trained):
        return
    if grads.shape[1:] != table.embedding_shape:
        raise ValueError(
            f"table {table.name!r}: found gradients of shape {tuple(grads.shape[1:])}, expected "
            f"{table.embedding_shape}: it was resized since it was looked up; look it up again"
        )
    table.pending_gradients.add(ids, grads, table.store)
