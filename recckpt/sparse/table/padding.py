"""The padding id, which stands for no id: it reads zeros, or a row that was given to it, and is left as it is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.nn_module import TableModule

Int64s = npt.NDArray[np.int64]


def padding_row(table: TableModule) -> Tensor:
    """Return what the padding id reads, shape (1, *embedding_shape).

    Zeros, whatever the initializer, unless there is a row of it: from an ``nn.Embedding`` whose rows were taken over,
    or one that was inserted or loaded.
    """
    read = table.store.read
    return table.store.look_up(np.array([table.padding_id], np.int64), lambda columns, rows: read(columns, rows, 0.0))


def around(rows: Tensor, places: Int64s, n_ids: int, of_padding: Tensor) -> Tensor:
    """Return the rows of ``n_ids`` ids, of which those at ``places`` have ``rows``, and all others that of padding."""
    whole = of_padding.expand(n_ids, *of_padding.shape[1:]).contiguous()
    return whole.index_copy_(0, torch.from_numpy(places).to(whole.device), rows)
