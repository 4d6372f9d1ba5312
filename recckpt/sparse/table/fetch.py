"""What a look-up reads, before it is made differentiable, and what training leaves in the rows."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.admission import Fetched
from recckpt.sparse.table.first_values import embedding_reader, first_embeddings
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.initializers import TorchInitializer
from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.padding import around, padding_row
from recckpt.sparse.table.recomputation import is_in_backward
from recckpt.sparse.table.row_table import RowTable
from recckpt.types import flag

Int64s = npt.NDArray[np.int64]

_OTHER_DRAWS = (
    "a look-up was made once more in a backward pass, and its initializer has drawn from torch's generator for the ids "
    "that were new in the forward run: dropout and the like behind it draw other numbers this time; call the table "
    "outside of torch.utils.checkpoint, or take an initializer of recckpt.sparse, which draws by id"
)


def inserts(table: TableModule, admit: bool | None) -> bool:
    """Return whether a training look-up with this ``admit`` inserts and counts: by default in a trained table."""
    return table.requires_grad if admit is None else flag("admit", admit)


def counts_occurrences(table: RowTable) -> bool:
    """Return whether a look-up of this moment has to know how often each id occurs."""
    waits = table.admission is not None and table.admission.candidates is not None
    return table.training and (table.tracking.counts or waits)


def fetch(table: RowTable, ids: Int64s, occurrences: Int64s | None = None, *, admit: bool) -> Fetched:
    """Return the embeddings of ``ids`` as a call of the table does, but not differentiable, and which have rows.

    Without ``occurrences`` each of the ids counts for one. Of padding nothing is inserted or counted, and it is not
    among those that have rows, which alone get gradients.
    """
    if table.padding_id is None:
        return _fetch(table, ids, occurrences, admit=admit)
    places = np.flatnonzero(ids != table.padding_id)
    if len(places) == len(ids):
        return _fetch(table, ids, occurrences, admit=admit)
    others = _fetch(table, ids[places], None if occurrences is None else occurrences[places], admit=admit)
    rows = around(others.rows, places, len(ids), padding_row(table))
    return Fetched(rows, places if others.present is None else places[others.present])


def _fetch(table: RowTable, ids: Int64s, occurrences: Int64s | None, *, admit: bool) -> Fetched:
    """Return what :func:`fetch` does of ids that are no padding."""
    if not table.training:
        return Fetched(table.store.look_up(ids, embedding_reader(table)), None)
    if not admit:
        read = embedding_reader(table)
        return Fetched(*table.store.look_up(ids, lambda some, at: (read(some, at), np.flatnonzero(at >= 0))))
    if is_in_backward() and (again := _fetched_again(table, ids)) is not None:
        return again
    admission = table.admission
    if occurrences is None and (table.tracking.names or admission is not None):
        occurrences = np.ones(len(ids), np.int64)
    if admission is not None and occurrences is not None:
        return admission.fetch(table, ids, occurrences, partial(_fetch_rows, table))
    return Fetched(_fetch_rows(table, ids, occurrences), None)


def _fetch_rows(table: RowTable, ids: Int64s, occurrences: Int64s | None) -> Tensor:
    """Return the embeddings of ``ids``, which all get rows, counted and dated if that is tracked."""
    table.eviction.check_batch(table, ids)
    read, first = embedding_reader(table), partial(first_embeddings, table)
    if table.tracking.names and occurrences is not None:
        with table.store.lock:  # an event time may come meanwhile
            return table.store.visit(ids, table.tracking.visit(occurrences), read, first)
    return table.store.look_up_or_add(ids, read, first)


def _fetched_again(table: RowTable, ids: Int64s) -> Fetched | None:
    """Return what a training look-up of these ids has read before the backward pass, and which of them had rows.

    It has counted, dated and inserted all that there is. None where this cannot be that look-up once more, since there
    is an id without a row in a table in which all get one.
    """
    if isinstance(table.initializer, TorchInitializer):
        table.warned_of.once(table.name, "recomputation", _OTHER_DRAWS)
    read, admission = embedding_reader(table), table.admission
    embeddings, rows = table.store.look_up(ids, lambda columns, rows: (read(columns, rows), rows))
    is_present = (rows >= 0) if admission is None else (rows >= 0) & ~admission.refusals.of(ids)
    refused = np.flatnonzero(~is_present)
    if len(refused) == 0:
        return Fetched(embeddings, None)
    if admission is None:
        return None
    index = IdIndex()
    index.reserve(len(refused))
    groups, different = index.find_or_add(ids[refused])
    first = first_embeddings(table, different).index_select(0, torch.from_numpy(groups))
    embeddings[torch.from_numpy(refused).to(embeddings.device)] = first.to(embeddings.device)
    return Fetched(embeddings, np.flatnonzero(is_present))
