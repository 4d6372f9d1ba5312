"""A table among the parameters of an optimizer, for what works on ``param_groups``: scalers and clipping."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from recckpt.sparse.table.table import HashTable


class TableParameter(Tensor):
    """An empty tensor whose ``grad`` is the gradients that wait in a table for the optimizer's step.

    torch keeps its books by tensor, and asks of a parameter no more than that it is one and has a ``grad``.
    """

    table: HashTable
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter

    def __new__(cls, table: HashTable) -> TableParameter:
        """Return a parameter for a table."""
        self = torch.empty(0, device="cpu").as_subclass(cls)
        self.table = table
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradients of the rows, shape (rows with one, *embedding_shape), which may be changed in place."""
        return self.table.grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        self.table.grad = grad

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        twin = memo[id(self)] = TableParameter(copy.deepcopy(self.table, memo))
        return twin
