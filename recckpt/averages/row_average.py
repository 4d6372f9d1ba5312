"""Exponential moving averages of table rows, which torch does not provide; torch averages dense parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from recckpt import types
from recckpt.averages.store import AverageStore
from recckpt.format.buckets import distinct
from recckpt.sparse.table.checks import check_owned, check_values, flat_ids
from recckpt.sparse.table.initializers import FromRow
from recckpt.sparse.table.marks import FrozenRows
from recckpt.sparse.table.nn_module import embedding_reader, first_embeddings
from recckpt.sparse.table.row_table import RowTable
from recckpt.sparse.table.table import HashTable
from recckpt.sparse.table.tracker import Tracker
from recckpt.types import EMBEDDING

Int64s = npt.NDArray[np.int64]
_BASE = "the last update"
_PIECE = 1 << 16  # rows to read at once
_NO_IDS = np.empty(0, np.int64)


class Follower:
    """Tracks which rows of a table changed since the last update of one average of the table.

    The average of a new id begins at :func:`first_embeddings`, like a row of an ``nn.Embedding`` before its first step.
    The average of a row from :meth:`HashTable.insert`, from a load or after ``clear()`` begins at the row's value.
    """

    def __init__(self, table: RowTable) -> None:
        self.table = weakref.ref(table)
        self._tracker = Tracker()
        self._inserted: list[Int64s] = []  # ids that insert() has added since the last update
        self._erased: list[Int64s] = []  # ids that were erased or evicted since
        self._eras: tuple[object, object] | None = None  # eras of the table's and the average's store, last update
        table.followers.append(weakref.ref(self))

    def __deepcopy__(self, memo: Mapping[int, Any]) -> None:
        """Return None, so that a copied average has no follower and reads all rows at its first update."""

    def note_inserted(self, ids: Int64s) -> None:
        """Record ids that ``insert`` adds to the table."""
        self._inserted.append(ids)

    def note_erased(self, ids: Int64s) -> None:
        """Record ids that the table drops, because its marks forget them if there are many."""
        self._erased.append(ids)

    def update(self, table: RowTable, average: AverageStore, kept: float) -> None:
        """Update the averages of rows that have changed, and drop the averages of erased rows."""
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
            self._inserted, self._erased, self._eras = [], [], (table.store.rows.era, average.rows.era)

    def _take(self, table: RowTable, average: AverageStore, frozen: FrozenRows, kept: float) -> None:
        store = table.store
        # Whether the table was loaded or cleared and the average was not: then all averages begin anew, at the rows.
        eras = table.store.rows.era, average.rows.era
        is_anew = self._eras is not None and eras[0] is not self._eras[0] and eras[1] is self._eras[1]
        if frozen.is_replaced(_BASE) or average.is_given:
            rows, own = np.arange(len(store)), average.ids.to_tensor(len(average)).numpy()
            gone = own if is_anew else distinct(own[store.find(own) < 0], *self._erased)
        else:
            changes = frozen.delta(_BASE, narrows=False)
            rows, gone = changes.rows, changes.erased  # an erased id that was inserted again starts a new average
        average.drop(gone)
        # New ids whose averages begin at the row's value, not at its first embedding; None for all new ids.
        inserted: Int64s | None = None if is_anew else distinct(_NO_IDS, *self._inserted)
        for begin in range(0, len(rows), _PIECE):
            some = rows[begin : begin + _PIECE]
            ids, values = store.ids.gather(some).numpy(), store.columns[EMBEDDING].gather(some)

            def first(new_ids: Int64s) -> Tensor:
                return self._first(table, new_ids, inserted)

            average.update(ids, values, kept, first)

    def _first(self, table: RowTable, new_ids: Int64s, inserted: Int64s | None) -> Tensor:
        """Return the values at which averages of new ids begin.

        With FromRow, returns the current values, because the row that they were copied from may have changed since.
        """
        if isinstance(table.initializer, FromRow):
            inserted = None
        if inserted is None or np.isin(new_ids, inserted).any():
            current: Tensor = table.store.look_up(new_ids, embedding_reader(table)).cpu()
            if inserted is None:
                return current
            is_begun = ~np.isin(new_ids, inserted)
            if is_begun.any():
                current[is_begun] = first_embeddings(table, new_ids[is_begun])
            return current
        return first_embeddings(table, new_ids)


class AverageTable(HashTable):
    """The averages of the rows of the table named ``of``; empty at first.

    Look-ups only read, also in training mode. This table has no optimizer slots, counters, admission or eviction; when
    the followed table drops a row, the next update drops its average.
    """

    is_trained = False
    store: AverageStore

    def __init__(self, table: HashTable, name: str) -> None:
        super().__init__(
            table.embedding_shape,
            name=name,
            dtype=table.dtype,
            device=table.device,
            initializer=table.initializer,
            slice=table.slice,
        )
        self.store, self.of = AverageStore.of(self.store), table.name
        self._follower: Follower | None = None

    def follow(self, table: RowTable, kept: float) -> None:
        """Update the averages after a step of the table; ``kept`` is the share of the old average that stays."""
        if self._follower is None or self._follower.table() is not table:
            self._follower = Follower(table)
        self.padding_id = table.padding_id
        self._follower.update(table, self.store, kept)

    def _copy_rows_of(self, other: types.SavableTable) -> None:
        """Copy all averages of ``other``; if it is not an average, keep its rows as averages until the next update."""
        with other.store.lock if isinstance(other, RowTable) else nullcontext():  # a consistent state of all rows
            ids, embeddings = flat_ids(other.ids()), other.embeddings()
            rows = other.store.to(self.device) if isinstance(other, AverageTable) else None
        check_owned(self.name, self.slice, ids)
        check_values(self.name, self.spec, embeddings, len(ids))
        if rows is not None:
            self.store.adopt(rows)
            return
        plain = self.store.emptied()
        plain.insert(ids, {EMBEDDING: embeddings})
        self.store.adopt(plain)


class RowAverage:
    """The exponential moving average of the rows of a model.

    Averages of parameters, such as ``torch.optim.swa_utils.AveragedModel``, do not include rows of tables. Each
    :meth:`update` sets each average to ``decay * average + (1 - decay) * row``. The cost of an update grows with the
    number of rows that have changed since the last update. The average of a new id begins at its first embedding, like
    the row of an ``nn.Embedding``. The averages of erased ids are dropped.

    The averages are tables named ``f"{table}.{name}"``. State dicts of the model include these tables, so a
    :class:`recckpt.Saver` or manager of the model saves and restores them. Make the RowAverage before ``restore()``.

    Not collective: each rank averages the rows that it owns. Not thread-safe.

    Args:
        model: the model that is trained.
        decay: the share of the old average that an update keeps, 0 to 1.
        name: suffix of the averages' names; several averages of one model need different ones.

    Attributes:
        decay: the argument ``decay``.

    Raises:
        ValueError: ``decay`` is out of range, the model has no tables, or a table already has an average of this name.
    """

    def __init__(self, model: nn.Module, decay: float, *, name: str = "average") -> None:
        self.decay = _checked(decay)
        tables = list(_trained_tables(model))
        if not tables:
            raise ValueError(f"found no table in {type(model).__name__}: RowAverage averages only rows of tables")
        for table in tables:
            if f"{table.name}.{name}" in {other.name for other in table._own_tables()}:
                raise ValueError(f"table {table.name!r} has an average {name!r} already: choose another name")
        self._model, self._is_swapped = model, False
        self._averages = {table.name: AverageTable(table, f"{table.name}.{name}") for table in tables}
        for table in tables:
            table.companions.append(self._averages[table.name])
            self._averages[table.name].follow(table, 0.0)

    @property
    def tables(self) -> Mapping[str, HashTable]:
        """Name of a table -> the table of its averages. Read them like any table, but do not train them."""
        return dict(self._averages)

    def update(self, decay: float | None = None) -> None:
        """Update the averages; call this after each optimizer step, or after each n-th.

        Args:
            decay: the decay of this update alone, such as during a warm-up; None for the attribute ``decay``.

        Raises:
            ValueError: ``decay`` is out of range, or tables of the model were added, removed or resized.
            RuntimeError: the call is inside :meth:`swap`.
        """
        kept = self.decay if decay is None else _checked(decay)
        self._refuse_swapped("update()")
        for average, table in self._pairs():
            average.follow(table, kept)

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Make the model's tables read the averages inside ``with``: to validate with the averages, or to save them.

        No row is copied. Look-ups insert and count nothing, also in training mode. Sparse optimizers refuse to step,
        and tables refuse all other changes of rows, such as ``insert`` or a load. A save or copy inside ``with`` holds
        the averages, without the optimizer's slots. Dense layers stay as trained: average them with
        ``torch.optim.swa_utils.AveragedModel``, and use both together (docs/rows.md).

        Raises:
            RuntimeError: the call is inside another ``swap()``.
        """
        self._refuse_swapped("swap()")
        with ExitStack() as shown:
            for average, table in self._pairs():
                shown.enter_context(table._showing(average.store))
            self._is_swapped = True
            try:
                yield
            finally:
                self._is_swapped = False

    def apply(self) -> None:
        """Set the rows of the model to their averages; optimizer slots stay unchanged.

        Raises:
            RuntimeError: the call is inside :meth:`swap`.
        """
        self._refuse_swapped("apply()")
        for average, table in self._pairs():
            with table.store.lock, average.store.lock:
                ids = average.ids().numpy()
                for begin in range(0, len(ids), _PIECE):
                    at = np.arange(begin, min(begin + _PIECE, len(ids)))
                    rows = table.store.find(ids[at])
                    present = np.flatnonzero(rows >= 0)
                    values = embedding_reader(average)(average.store.columns, at[present])
                    table.store.write(rows[present], {EMBEDDING: values})

    def _pairs(self) -> list[tuple[AverageTable, HashTable]]:
        """Return (average, table) for each table; ValueError if tables of the model were added, removed or resized."""
        tables = {table.name: table for table in _trained_tables(self._model)}
        if tables.keys() != self._averages.keys():
            raise ValueError(
                f"found tables {sorted(tables)} in the model, expected {sorted(self._averages)}, which have averages: "
                "make RowAverage after all tables"
            )
        for name, table in tables.items():
            if self._averages[name].embedding_shape != table.embedding_shape:
                raise ValueError(
                    f"table {name!r} was resized: its average has rows of {self._averages[name].embedding_shape}, "
                    f"expected {table.embedding_shape}: make a new average"
                )
        return [(self._averages[name], table) for name, table in tables.items()]

    def _refuse_swapped(self, what: str) -> None:
        if self._is_swapped:
            raise RuntimeError(f"RowAverage.{what}: found the averages swapped in, expected the rows of training")


def _trained_tables(model: nn.Module) -> Iterator[HashTable]:
    return (module for module in model.modules() if isinstance(module, HashTable) and module.is_trained)


def _checked(decay: float) -> float:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ValueError(f"RowAverage: decay must be a number from 0 to 1, found {decay!r}")
    return float(decay)
