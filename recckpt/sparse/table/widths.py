"""Rows in another width: what was there cut, or extended by first values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.column import BLOCK_BYTES, Column
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.rows import Rows
from recckpt.types import EMBEDDING, SlotSpec

Int64s = npt.NDArray[np.int64]


def resized(store: RowStore, dim: int, first_embeddings: Callable[[Int64s, SlotSpec], Tensor]) -> RowStore:
    """Return a copy of a store whose embeddings, and slots of their shape, have another last dimension.

    New columns of the embedding hold what ``first_embeddings`` makes of the ids, those of slots their initial value.
    Gradients that wait for the optimizer are of the old rows. Under the lock of the store.
    """
    rows, columns = store.rows, {}
    shape = rows.columns[EMBEDDING].spec.shape
    for name, column in rows.columns.items():
        if column.spec.shape != shape:
            columns[name] = column.to(rows.device)
            continue
        spec = SlotSpec(name, column.spec.dtype, (*shape[:-1], dim))
        columns[name] = _resized(rows, column, spec, first_embeddings if name == EMBEDDING else None)
    return RowStore(rows.device, rows.with_columns(rows.device, columns))


def _resized(
    rows: Rows, column: Column, spec: SlotSpec, first_values: Callable[[Int64s, SlotSpec], Tensor] | None
) -> Column:
    twin = Column(spec, rows.device)
    twin.reserve(rows.ids.capacity)
    kept, n_rows = min(spec.shape[-1], column.spec.shape[-1]), len(rows)
    piece_rows = max(1, BLOCK_BYTES // max(spec.row_bytes, column.spec.row_bytes))
    for begin in range(0, n_rows, piece_rows):
        at = np.arange(begin, min(n_rows, begin + piece_rows))
        if first_values is None:
            values = torch.full((len(at), *spec.shape), rows.initial[spec.name], dtype=twin.dtype, device=rows.device)
        else:
            values = first_values(rows.ids.gather(at).numpy(), spec).to(rows.device, copy=True)
        values[..., :kept] = column.gather(at)[..., :kept]
        twin.write(begin, values)
    return twin
