"""What ids read that have no row, and what new rows start with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.sparse.table.checks import check_owned
from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.row_store import Take

Int64s = npt.NDArray[np.int64]


def first_embeddings(table: TableModule, new_ids: Int64s) -> Tensor:
    """Return what different new ids start with, shape (n, *embedding_shape).

    Raises:
        ValueError: an id lies outside the slice of the table.
    """
    check_owned(table.name, table.slice, new_ids)
    return table.initializer.values(new_ids, table.seed, table.spec)


def embedding_reader(table: TableModule) -> Take[Tensor]:
    """Return what copies the embeddings of rows; row -1 reads as an unseen id."""
    read, unseen = table.store.read, table.initializer.unseen
    return lambda columns, rows: read(columns, rows, unseen)
