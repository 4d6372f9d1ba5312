"""``AveragedModel`` of torch, which walks parameters: from the first import of a table on it averages tables too."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from recckpt.sparse.average.averaged import AverageTable, as_average
from recckpt.sparse.average.followed import for_average
from recckpt.sparse.average.function import share_kept
from recckpt.sparse.table.row_table import RowTable

_MARK = "_recckpt_averages_tables"


def average_tables_too() -> None:
    """Wrap the two methods of ``AveragedModel`` that copy and average: of models without tables nothing changes."""
    make, update = AveragedModel.__init__, AveragedModel.update_parameters
    if hasattr(update, _MARK):  # a module that is loaded anew
        return

    @functools.wraps(make)
    def make_with_tables(self: AveragedModel, *args: Any, **kwargs: Any) -> None:
        with for_average():
            make(self, *args, **kwargs)
        if tables := list(trained_tables(self.module)):
            share_kept(self, torch.tensor(1, device="cpu"))  # refused here, and not at the second update
            for table in tables:
                as_average(table)

    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        pairs = paired(self.module, model)
        n_averaged = self.n_averaged.clone()
        kept = share_kept(self, n_averaged) if pairs and n_averaged > 0 else 0.0
        update(self, model)
        for average, table in pairs:
            average.follow(table, kept)

    setattr(update_parameters, _MARK, True)
    AveragedModel.__init__ = make_with_tables  # type: ignore[method-assign]
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def trained_tables(model: nn.Module) -> Iterator[Any]:
    """Yield the tables of a model, averages left out."""
    return (m for m in model.modules() if isinstance(m, RowTable) and not isinstance(m, AverageTable))


def paired(averaged: nn.Module, model: nn.Module) -> list[tuple[AverageTable, Any]]:
    """Return the tables of a copy, which become averages if they are not, beside those of the model with their names.

    Raises:
        ValueError: one side alone has a table, both are the same, or a table was resized.
    """
    tables = {table.name: table for table in trained_tables(model)}
    own = (table for table in averaged.modules() if isinstance(table, RowTable))
    copies = {table.of if isinstance(table, AverageTable) else table.name: table for table in own}
    if tables.keys() != copies.keys() or any(copies[name] is table for name, table in tables.items()):
        raise ValueError(
            f"found tables {sorted(copies)} to hold averages, expected copies of {sorted(tables)}, the tables of the "
            "model: make the copy once the model is whole"
        )
    for name, table in tables.items():
        if copies[name].embedding_shape != table.embedding_shape:
            raise ValueError(
                f"table {name!r} was resized since it was copied: its average has rows of "
                f"{copies[name].embedding_shape}, expected {table.embedding_shape}: make a new average"
            )
    return [(as_average(copies[name]), table) for name, table in tables.items()]
