"""Rows of a table of ours that a load gathers until all are there; and values brought to the form of their slots."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.first_values import first_embeddings
from recckpt.sparse.table.table import HashTable
from recckpt.types import EMBEDDING

Int64s = npt.NDArray[np.int64]
Values = Mapping[str, Tensor]  # slot -> one value a row


class NewRows(NamedTuple):
    """Rows that a batch has claimed: the first of them, and their ids; and the row of each id of the batch."""

    first: int
    ids: Int64s
    of_batch: Int64s


class RowsAside:
    """Rows of one of our tables that it does not have yet, in a store of their own."""

    def __init__(self, table: HashTable) -> None:
        self.store, self._first_embeddings = table.store.emptied(), partial(first_embeddings, table)

    def claim(self, ids: Int64s) -> NewRows:
        """Find the rows of ids, adding those that are new, whose slots are still to be put. One thread at a time."""
        rows = self.store.rows
        first = len(rows)
        of_batch, new_ids = rows.claim(ids)
        rows.ids.write(first, torch.from_numpy(new_ids))
        rows.publish()
        return NewRows(first, new_ids, of_batch)

    def put(self, new: NewRows, rows: Int64s, values: Values, taken: Int64s | None) -> None:
        """Set slots of the rows of a batch.

        Args:
            new: those that the batch has claimed.
            rows: where its values go.
            values: of the batch.
            taken: their positions in the batch, whose rows are all new; None where all are taken.
        """
        all_rows, columns = self.store.rows, self.store.columns
        whole = _whole(columns, values)
        all_rows.initialize(new.first, new.first + len(new.ids), without=whole | {EMBEDDING})
        if EMBEDDING not in whole and len(new.ids):
            columns[EMBEDDING].write(new.first, self._first_embeddings(new.ids))
        if taken is not None:
            for name in whole:  # no copy of the values in between
                columns[name].write_some(new.first, values[name], taken)
            at = torch.from_numpy(taken)
            values = {name: value[at] for name, value in values.items() if name not in whole}
        all_rows.put(rows, fitted_to(columns, rows, values))


def chosen(values: Values, rows: Int64s, n_rows: int) -> dict[str, Tensor]:
    """Return the values of some of so many rows."""
    if len(rows) == n_rows:
        return dict(values)
    at = torch.from_numpy(rows)
    return {name: tensor[at] for name, tensor in values.items()}


def _whole(columns: Mapping[str, Column], values: Values) -> frozenset[str]:
    """Return the slots that the values cover in full."""
    return frozenset(name for name, value in values.items() if value.shape[1:] == columns[name].spec.shape)


def fitted_to(columns: Mapping[str, Column], rows: Int64s, values: Values) -> dict[str, Tensor]:
    """Bring values to the last dimension of their slots, cut or padded with what the rows have there."""
    fitted = dict(values)
    for name in values.keys() - _whole(columns, values):
        value = values[name]
        fitted[name] = columns[name].gather(rows)
        width = min(value.shape[-1], columns[name].spec.shape[-1])
        fitted[name][..., :width] = value[..., :width]
    return fitted
