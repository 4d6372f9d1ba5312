"""Gradients of a sharded table, whose norm and finiteness are those of the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recckpt.sparse.sharded.all_to_all import Exchange, agree


class SharedGradients(Tensor):
    """The gradients of the rows of this rank: a plain tensor, but for what clipping and scalers ask of all rows.

    Norms and checks for finiteness are collective, so that all ranks clip by one factor and skip a step together, as
    they do with the dense gradients that DistributedDataParallel has made equal.
    """

    exchange: Exchange
    table: str

    def __new__(cls, grads: Tensor, exchange: Exchange, table: str) -> SharedGradients:
        """Return a view of the gradients of the rows of this rank."""
        self = grads.as_subclass(cls)
        self.exchange, self.table = exchange, table
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        finish = _COLLECTIVE.get(func)
        return result if finish is None else finish(result, *args, **(kwargs or {}))


def _norm(local: Tensor, grads: Tensor, ord: float = 2, *_: Any, **__: Any) -> Tensor:
    if not isinstance(grads, SharedGradients):
        return local
    norms = _from_all(grads.exchange, f"the norm of the gradients of {grads.table!r}", local)
    total: Tensor = torch.linalg.vector_norm(norms, ord)
    return total.to(local.dtype)


def _norms(local: Sequence[Tensor], grads: Sequence[Tensor], ord: float = 2, *_: Any, **__: Any) -> list[Tensor]:
    return [_norm(own, some, ord) for own, some in zip(local, grads, strict=True)]


def _unscaled(result: None, grads: Sequence[Tensor], found_inf: Tensor, *_: Any) -> None:
    shared = {some.exchange: some.table for some in grads if isinstance(some, SharedGradients)}
    for exchange, table in shared.items():
        flags = _from_all(exchange, f"the check of the gradients of {table!r} and others", found_inf)
        found_inf.copy_(flags.max())


_COLLECTIVE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm,
    torch._foreach_norm: _norms,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscaled,
}


def _from_all(exchange: Exchange, what: str, value: Tensor) -> Tensor:
    """Return the value of each rank, shape (ranks,), in float64. Collective.

    Raises:
        LookupFailedError: a rank is at something else; all ranks raise it.
    """
    ones = [1] * exchange.size
    agree(exchange, what, ones, None)
    return exchange.all_to_all(value.detach().double().expand(exchange.size, 1), ones, ones).flatten()
