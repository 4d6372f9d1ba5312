"""What a table does for averages of it: notes what is inserted for them, and takes its own to the checkpoints."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import nn

from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.row_store import RowStore

Int64s = npt.NDArray[np.int64]
log = logging.getLogger("recckpt")

_is_for_average = ContextVar("_is_for_average", default=False)
_WARNED = "recckpt: warned that the rows of this copy stay"  # in the memo of a copy
_ROWS_STAY = (
    "table %r was copied with a model in training mode, and loops over parameters() do not reach the rows of the copy: "
    "for an average use torch.optim.swa_utils.AveragedModel, or recckpt.sparse.RowAverage(model, decay, into=copy) "
    "beside loops of your own; for a target network copy.load_state_dict(model.state_dict())"
)


class NotesInserts(Protocol):
    """An average that has to know which rows were not begun by training."""

    def note_inserted(self, ids: Int64s) -> None:
        """Take note of ids that are inserted where there was no row."""


class Averages:
    """The averages of a table.

    Attributes:
        tables: those that stand beside the table in state dicts and checkpoints.
    """

    def __init__(self, tables: tuple[TableModule, ...] = ()) -> None:
        self.tables = tables
        self._followers: tuple[weakref.ref[NotesInserts], ...] = ()
        self._was_copied = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Averages:
        twin = Averages(copy.deepcopy(self.tables, memo))
        twin._was_copied = self._was_copied
        return twin  # followers are of one table

    def add(self, average: TableModule) -> None:
        """Take an average along in state dicts and checkpoints, in place of one of the same name."""
        self.tables = (*(other for other in self.tables if other.name != average.name), average)

    def add_follower(self, follower: NotesInserts) -> None:
        """Call ``follower.note_inserted``, for as long as there is one, with the ids that inserts add."""
        self._followers = (*(other for other in self._followers if other() is not None), weakref.ref(follower))

    def note_inserted(self, store: RowStore, ids: Int64s) -> None:
        """Let all followers note which of ``ids``, about to be inserted, are new."""
        if self._followers:
            new = ids[store.find(ids) < 0]
            for reference in self._followers:
                if (follower := reference()) is not None:
                    follower.note_inserted(new)

    def warn_of_copy(self, table: TableModule, memo: dict[Any, Any]) -> None:
        """Warn, once, where a model is copied that goes on training: the copy may be meant for an average."""
        is_of_model = table.training and any(map(_is_model, memo.values()))
        if not is_of_model or self._was_copied or _is_for_average.get():
            return
        self._was_copied = True
        if _WARNED not in memo:
            memo[_WARNED] = True
            log.warning(_ROWS_STAY, table.name)


def _is_model(copied: object) -> bool:
    """Return whether something else than a table was copied: what is in a state dict is not copied with a model."""
    return isinstance(copied, nn.Module) and not isinstance(copied, TableModule)


@contextmanager
def for_average() -> Iterator[None]:
    """Let tables be copied without a warning: what copies them averages them."""
    token = _is_for_average.set(True)
    try:
        yield
    finally:
        _is_for_average.reset(token)
