"""The tables of a model as their averages: for a while, or from now on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from recckpt.sparse.average.averaged import AverageTable, average_class
from recckpt.sparse.table.first_values import embedding_reader
from recckpt.sparse.table.row_table import RowTable
from recckpt.types import EMBEDDING

_PIECE = 1 << 16  # rows at a time


@contextmanager
def swapped(pairs: Sequence[tuple[AverageTable, Any]]) -> Iterator[None]:
    """Let tables be their averages: read, saved and copied as those, without a row that moves."""
    with ExitStack() as stack:
        for average, table in pairs:
            stack.enter_context(_as_its_average(table, average))
        yield


@contextmanager
def _as_its_average(table: Any, average: AverageTable) -> Iterator[None]:
    kind = type(table)
    table.__class__ = average_class(kind)
    try:
        with table.showing(average):
            yield
    finally:
        table.__class__ = kind


def apply(average: AverageTable, table: RowTable) -> None:
    """Give the rows of a table the values of their averages; its other slots stay."""
    with table.store.lock, average.store.lock:
        ids = average.ids().numpy()
        for begin in range(0, len(ids), _PIECE):
            at = np.arange(begin, min(begin + _PIECE, len(ids)))
            rows = table.store.find(ids[at])
            present = np.flatnonzero(rows >= 0)
            values = embedding_reader(average)(average.store.columns, at[present])
            table.store.write(rows[present], {EMBEDDING: values})
