"""A table whose rows are the averages of those of another one: it is read and saved as any, and never trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt import types
from recckpt.sparse.average.followed import Averages
from recckpt.sparse.average.follower import Follower
from recckpt.sparse.average.snapshot import FROM, OF, SINCE
from recckpt.sparse.average.store import AverageStore
from recckpt.sparse.table.checks import check_owned, check_values, flat_ids
from recckpt.sparse.table.eviction import Eviction
from recckpt.sparse.table.first_values import embedding_reader
from recckpt.sparse.table.gradients import Gradients
from recckpt.sparse.table.nn_module import GradientTaker
from recckpt.sparse.table.opaque import opaque
from recckpt.sparse.table.row_table import RowTable
from recckpt.sparse.table.tracking import Tracking
from recckpt.types import EMBEDDING

if TYPE_CHECKING:
    from typing_extensions import Self

Int64s = npt.NDArray[np.int64]
_CLASSES: dict[type, Any] = {}


class AverageTable(RowTable):
    """What a table does otherwise once it is an average; the first base of its class then.

    Look-ups read, in training mode too. The optimizer's slots, counters, admission and eviction are left to the table
    that is followed: whose rows go, they go here.
    """

    is_trained = False
    of: str  # the name of the table that is followed
    mode_asked: bool | None = None  # the last that train() was called with
    store: AverageStore
    _follower: Follower | None = None

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """Nothing: what an average is made of is its own."""
        return {}

    def follow(self, table: RowTable, kept: float) -> None:
        """Take part in an update that keeps this share of the average, after a step of the table."""
        if self._follower is None or self._follower.table() is not table:
            self._follower = Follower(table, self.store)
        self.padding_id = table.padding_id
        self._follower.update(table, self.store, kept)

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: a look-up in training mode would insert and count."""
        self.mode_asked = mode
        return super().train(False)

    @opaque
    def embeddings(self) -> Tensor:
        """Return the averages, shape (rows, *embedding_shape), in the order of :meth:`ids`."""
        with self.store.lock:
            return embedding_reader(self)(self.store.columns, np.arange(len(self)))

    def add_slot(
        self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, initial: float | None = None
    ) -> None:
        """Refuse: the slots of an optimizer are of what it trains."""
        self._refuse_change(f"cannot have a slot {name!r}")

    def resize(self, dim: int) -> None:
        """Refuse: an average has the width of what it follows."""
        self._refuse_change("cannot be resized")

    def filled_by(self, slots: Mapping[str, str]) -> Mapping[str, str]:
        """Return which columns a load fills, here -> there, given the slots that it has for this table."""
        if {FROM, OF, SINCE} <= slots.keys():
            return {EMBEDDING: slots[FROM], OF: slots[OF], SINCE: slots[SINCE]}
        return {EMBEDDING: slots[EMBEDDING]} if EMBEDDING in slots else {}

    def _copy_rows_of(self, other: types.SavableTable) -> None:
        """Become a copy of an average, or stand at the rows of another table until the next update."""
        with other.store.lock if isinstance(other, RowTable) else nullcontext():  # rows of one moment
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

    @contextmanager
    def showing(self, average: AverageTable) -> Iterator[None]:
        """Be an average for a while, as a table that has become one of this class: with its rows, not to be trained.

        The table is left in the mode in which its last ``train()`` was to leave it.
        """
        own = {name: getattr(self, name) for name in ("store", "trained_by", "tracking")}
        self.store, self.trained_by, self.of = average.store, GradientTaker(), average.of
        self.tracking = Tracking((), self.time)
        self.train(self.training)
        try:
            yield
        finally:
            self.training = bool(self.mode_asked)
            del self.of, self.mode_asked
            for name, value in own.items():
                setattr(self, name, value)

    def _begin(self) -> None:
        """Turn from a table, or a copy of one, into an average that begins with its rows."""
        self.store, self.pending_gradients = AverageStore.of(self.store), Gradients()
        self.tracking, self.eviction = Tracking((), self.time), Eviction(self.time)
        self.admission, self.averages, self.trained_by, self.of = None, Averages(), GradientTaker(), self.name
        self.train(False)

    def _refuse_change(self, what: str) -> NoReturn:
        raise ValueError(f"table {self.name!r} is an average, it {what}: do that to the table that it follows")


def as_average(table: Any) -> AverageTable:
    """Make an average of a table, in place, if it is not one; it begins with the rows that there are."""
    if not isinstance(table, AverageTable):
        table.__class__ = average_class(type(table))
        table._begin()
    average: AverageTable = table
    return average


def average_class(kind: type) -> Any:
    """Return the class of averages of tables of a kind, as ``torch.nn.utils.parametrize`` makes one of a module."""
    if kind not in _CLASSES:
        own = {"__module__": __name__, "__doc__": kind.__doc__}
        _CLASSES[kind] = type(f"Average{kind.__name__}", (AverageTable, kind), own)
    return _CLASSES[kind]
