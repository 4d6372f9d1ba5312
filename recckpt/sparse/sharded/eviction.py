"""Which rows of all ranks go, where together they have too many: each rank offers those that may be among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recckpt.errors import LookupFailedError
from recckpt.policies.evict import Mask, first_rows
from recckpt.sparse.sharded.all_to_all import Exchange, agree
from recckpt.sparse.table.row_table import RowTable

Int64s = npt.NDArray[np.int64]


def first_of_all(exchange: Exchange, by: npt.NDArray[Any], ids: Int64s, n: int) -> Mask:
    """Return which rows of this rank are among the ``n`` of all ranks that :func:`first_rows` would take. Collective.

    ``by`` and ``ids``, both int64, are those of this rank; ``n`` is the same on all, and no rank sends more rows.
    """
    mask = np.zeros(len(ids), np.bool_)
    if n <= 0:
        return mask
    offered = np.flatnonzero(first_rows(by, ids, n))
    lengths = agree(exchange, "agreeing on what is evicted", [len(offered)] * exchange.size, None)
    pairs = torch.from_numpy(np.stack([by[offered], ids[offered]], 1))
    of_all = exchange.all_to_all(pairs.repeat(exchange.size, 1), [len(offered)] * exchange.size, lengths).numpy()
    is_first = first_rows(of_all[:, 0], of_all[:, 1], n)
    begin = sum(lengths[: exchange.rank])
    mask[offered] = is_first[begin : begin + len(offered)]
    return mask


def evict_due(tables: Sequence[RowTable], ids: Mapping[str, Any]) -> Mapping[str, Any]:
    """Evict what is due before a look-up, and return its ids; where that fails here, the error stands in their place.

    It reaches the other ranks as an error of ids does: by the messages of the look-up that they wait for.
    """
    for table in tables:
        try:
            table.eviction.evict_due(table)
        except LookupFailedError:  # all ranks raise it
            raise
        except Exception as error:
            return {**ids, table.name: error}
    return ids
