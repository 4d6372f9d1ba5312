"""How an average follows a table: by the rows that have changed since the last update."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from recckpt.format.distinct import distinct
from recckpt.sparse.average.store import AverageStore
from recckpt.sparse.table.first_values import embedding_reader, first_embeddings
from recckpt.sparse.table.marks import FrozenRows
from recckpt.sparse.table.row_table import RowTable
from recckpt.sparse.table.tracker import Tracker
from recckpt.types import EMBEDDING

Int64s = npt.NDArray[np.int64]
_BASE = "the last update"
_PIECE = 1 << 16  # rows at a time
_NO_IDS = np.empty(0, np.int64)


class Follower:
    """The marks of one table for one average of it, since the last update.

    A new id begins at what :func:`first_embeddings` makes of it, as the row of an ``nn.Embedding`` would have
    before its first step. Rows that :meth:`HashTable.insert`, a load or ``clear()`` and what follows it bring have not
    begun there: they begin at what they are.
    """

    def __init__(self, table: RowTable, store: AverageStore) -> None:
        self.table = weakref.ref(table)
        self._tracker = Tracker()
        self._inserted: list[Int64s] = []  # ids that insert() has added since the last update
        self._eras: tuple[object, object] | None = None  # of the rows of both at the last update
        table.averages.add_follower(self)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> None:
        """Leave a copy of an average without one: it takes all rows at its first update."""

    def note_inserted(self, ids: Int64s) -> None:
        """Take note of ids that are inserted where there was no row."""
        self._inserted.append(ids)

    def update(self, table: RowTable, average: AverageStore, kept: float) -> None:
        """Average the rows that have changed, and drop those that are gone."""
        with table.store.lock, average.lock:
            frozen = self._tracker.freeze(table, {EMBEDDING})
            try:
                self._take(table, average, frozen, kept)
            except BaseException:
                frozen.failed()
                raise
            finally:
                frozen.snapshot.close()
            average.advance(kept)
            frozen.committed(_BASE)
            self._inserted, self._eras = [], (table.store.era, average.era)

    def _take(self, table: RowTable, average: AverageStore, frozen: FrozenRows, kept: float) -> None:
        store = table.store
        if frozen.is_replaced(_BASE) or average.is_given:
            rows, own = np.arange(len(store)), average.ids.to_tensor(len(average)).numpy()
            gone = own[store.find(own) < 0]
        else:
            changes = frozen.changes(_BASE)
            rows, gone = changes.rows, changes.erased  # one that is there again begins anew
        average.drop(gone)
        inserted = self._inserted_ids(table, average)
        for begin in range(0, len(rows), _PIECE):
            some = rows[begin : begin + _PIECE]
            ids, values = store.ids.gather(some).numpy(), store.columns[EMBEDDING].gather(some)

            def first(new_ids: Int64s) -> Tensor:
                return self._first(table, new_ids, inserted)

            average.update(ids, values, kept, first)

    def _inserted_ids(self, table: RowTable, average: AverageStore) -> Int64s | None:
        """Return the ids whose rows do not begin at their first embeddings; None for all."""
        eras = (table.store.era, average.era)
        if self._eras is not None and eras[0] is not self._eras[0] and eras[1] is self._eras[1]:
            return None  # the table was loaded or cleared, and the average was not: then what it has is not resumed
        return distinct(_NO_IDS, *self._inserted)

    def _first(self, table: RowTable, new_ids: Int64s, inserted: Int64s | None) -> Tensor:
        """Return what new ids begin at."""
        if inserted is None or np.isin(new_ids, inserted).any():
            current: Tensor = table.store.look_up(new_ids, embedding_reader(table)).cpu()
            if inserted is None:
                return current
            is_begun = ~np.isin(new_ids, inserted)
            if is_begun.any():
                current[is_begun] = first_embeddings(table, new_ids[is_begun])
            return current
        return first_embeddings(table, new_ids)
