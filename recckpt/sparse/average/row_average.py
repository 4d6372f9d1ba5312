"""Averages of the rows of a model whose dense parameters are averaged by a loop that knows no tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from torch import nn

from recckpt.sparse.average.averaged import AverageTable, as_average
from recckpt.sparse.average.models import paired, trained_tables
from recckpt.sparse.average.swapping import apply, swapped
from recckpt.sparse.table.table import HashTable


class RowAverage:
    """The exponential moving average of the rows of a model, for loops of your own, timm and others.

    ``torch.optim.swa_utils.AveragedModel`` averages tables by itself and needs none of this. A row becomes
    ``decay * average + (1 - decay) * row`` with each :meth:`update`, whose cost follows the rows that have changed
    since the last one. A new id begins at its first embeddings, as the row of an ``nn.Embedding`` would have; erased
    ids go.

    Without ``into`` the averages are tables of their own, ``f"{table}.{name}"``, which stand beside those of the model
    in state dicts: a :class:`recckpt.Saver` or manager of the model saves and restores them, so make this before
    ``restore()``. With ``into`` they are the tables of a copy of the model: give that a Saver of its own.

    Not collective: each rank averages the rows that it owns. Not thread-safe.

    Args:
        model: the model that is trained.
        decay: what an update keeps of the average, 0 to 1.
        into: a copy of the model, whose tables become averages: of timm's ``ModelEmaV3`` its ``module``.
        name: what the averages are called behind the names of their tables; several of one model need different ones.

    Raises:
        ValueError: ``decay`` is out of range, the model has no tables, ``into`` is not a copy of it, or a table has an
            average of this name.
    """

    def __init__(self, model: nn.Module, decay: float, *, into: nn.Module | None = None, name: str = "average") -> None:
        self.decay = _checked(decay)
        tables = list(trained_tables(model))
        if not tables:
            raise ValueError(f"found no table in {type(model).__name__}: RowAverage averages the rows of tables alone")
        self._model, self._is_swapped = model, False
        self._averages = nn.ModuleList([_beside(table, name) for table in tables]) if into is None else into
        for average, table in self._pairs():
            average.follow(table, 0.0)

    @property
    def tables(self) -> Mapping[str, HashTable]:
        """The averages by the names of their tables: read them as any table; an optimizer refuses them."""
        return {
            table.of: cast(HashTable, table) for table in self._averages.modules() if isinstance(table, AverageTable)
        }

    def update(self, decay: float | None = None) -> None:
        """Average the rows that have changed; call it after each step of the optimizers, or each n-th.

        Args:
            decay: of this update alone, such as ``ema.get_decay(step)`` of timm; None for that of all.

        Raises:
            ValueError: ``decay`` is out of range, or the model has other tables than before, or a resized one.
            RuntimeError: this is inside :meth:`swap`.
        """
        kept = self.decay if decay is None else _checked(decay)
        self._refuse_swapped("update()")
        for average, table in self._pairs():
            average.follow(table, kept)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Let the tables of the model be their averages inside ``with``: for validation, or a save of the averages.

        No row moves. Look-ups insert and count nothing, in training mode too, and sparse optimizers refuse to step.
        What is saved or copied inside is the average, without the optimizer's slots.

        Raises:
            RuntimeError: this is inside another ``swap()``.
        """
        self._refuse_swapped("swap()")
        self._is_swapped = True
        try:
            with swapped(self._pairs()):
                yield
        finally:
            self._is_swapped = False

    def apply(self) -> None:
        """Give the rows of the model the values of their averages, from now on; slots of optimizers stay.

        Raises:
            RuntimeError: this is inside :meth:`swap`.
        """
        self._refuse_swapped("apply()")
        for average, table in self._pairs():
            apply(average, table)

    def _pairs(self) -> list[tuple[AverageTable, HashTable]]:
        return paired(self._averages, self._model)

    def _refuse_swapped(self, what: str) -> None:
        if self._is_swapped:
            raise RuntimeError(f"RowAverage.{what}: found the averages swapped in, expected the rows of training")


def _beside(table: HashTable, name: str) -> AverageTable:
    """Return an empty average of a table, which stands beside it in state dicts."""
    if f"{table.name}.{name}" in {other.name for other in table._own_tables()}:
        raise ValueError(f"table {table.name!r} has an average {name!r} already: give this one another name")
    average = as_average(
        HashTable(
            table.embedding_shape,
            name=f"{table.name}.{name}",
            dtype=table.dtype,
            device=table.device,
            initializer=table.initializer,
            slice=table.slice,
        )
    )
    average.of = table.name
    table.averages.add(average)
    return average


def _checked(decay: float) -> float:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ValueError(f"RowAverage: decay must be a number from 0 to 1, found {decay!r}")
    return float(decay)
