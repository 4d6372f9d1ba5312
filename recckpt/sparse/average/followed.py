"""A table that averages follow: it tells them what it inserts, and takes those of its own to the checkpoints."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import nn

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.tracking import TrackedTable

if TYPE_CHECKING:
    from typing_extensions import Self

    from recckpt.sparse.average.follower import Follower

Int64s = npt.NDArray[np.int64]
log = logging.getLogger("recckpt")

_is_for_average = ContextVar("_is_for_average", default=False)
_SAID = "recckpt: said that the rows of this copy stay"  # in the memo of a copy
_ROWS_STAY = (
    "table %r was copied with a model in training mode, and loops over parameters() do not reach the rows of the copy: "
    "for an average use torch.optim.swa_utils.AveragedModel, or recckpt.sparse.RowAverage(model, decay, into=copy) "
    "beside loops of your own; for a target network copy.load_state_dict(model.state_dict())"
)


class FollowedTable(TrackedTable):
    """A table that says what an average of it has to know."""

    _averages: tuple[TableModule, ...] = ()  # those that stand beside it in state dicts
    _followers: tuple[weakref.ref[Follower], ...] = ()
    _was_copied = False

    def tell_of_inserts(self, follower: Follower) -> None:
        """Tell a follower, for as long as there is one, of the ids that :meth:`insert` adds."""
        self._followers = (*(other for other in self._followers if other() is not None), weakref.ref(follower))

    def add_average(self, average: TableModule) -> None:
        """Take an average along in state dicts and checkpoints, in place of one of the same name."""
        self._averages = (*(other for other in self._averages if other.name != average.name), average)

    @property
    def store(self) -> RowStore:
        """The rows, and the one door through which they change."""
        return self._store

    @property
    def saved_columns(self) -> Mapping[str, Column]:
        """The columns that a checkpoint has of this table."""
        return self._store.columns

    def _note_inserted(self, ids: Int64s) -> None:
        if self._followers:
            new = ids[self._store.find(ids) < 0]
            for reference in self._followers:
                if (follower := reference()) is not None:
                    follower.note_inserted(new)

    def _own_tables(self) -> list[TableModule]:
        return [*super()._own_tables(), *self._averages]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._say_that_rows_stay(memo)
        twin = super().__deepcopy__(memo)
        twin._followers = ()
        return twin

    def _say_that_rows_stay(self, memo: dict[Any, Any]) -> None:
        """Warn, once, where a model is copied that goes on training: the copy may be meant for an average."""
        is_of_model = self.training and any(map(_is_model, memo.values()))
        if not is_of_model or self._was_copied or _is_for_average.get():
            return
        self._was_copied = True
        if _SAID not in memo:
            memo[_SAID] = True
            log.warning(_ROWS_STAY, self.name)


def _is_model(copied: object) -> bool:
    """Say whether something else than a table was copied: what is in a state dict is not copied with a model."""
    return isinstance(copied, nn.Module) and not isinstance(copied, TableModule)


@contextmanager
def for_average() -> Iterator[None]:
    """Let tables be copied without a warning: what copies them averages them."""
    token = _is_for_average.set(True)
    try:
        yield
    finally:
        _is_for_average.reset(token)
