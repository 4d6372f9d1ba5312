"""Rows of a table and what changes them, for one thread at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table import changes
from recckpt.sparse.table.changes import Erasure
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.id_index import IdIndex
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]

_CPU = torch.device("cpu")
_ID_SPEC = SlotSpec("id", "int64", ())


class Rows:
    """Rows 0 to ``len - 1``, all live: an id each, and one column a slot.

    What is claimed lies beyond: memory that nobody sees until it is published. A change of rows that are seen is one
    compiled call, so an exception finds it not begun or done; where slots lie on another device, it is undone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.columns: Mapping[str, Column] = {}  # replaced, never changed
        self.initial: dict[str, float] = {}
        self.ids = Column(_ID_SPEC, _CPU)
        self.index = IdIndex()
        self.era = object()

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes of index, ids and slots, room for growth included."""
        return self.index.nbytes + self.ids.nbytes + sum(c.nbytes for c in self.columns.values())

    def emptied(self) -> Rows:
        """Return no rows of the same slots."""
        twin = Rows(self.device)
        twin.columns = {name: Column(column.spec, self.device) for name, column in self.columns.items()}
        twin.initial = dict(self.initial)
        return twin

    def to(self, device: torch.device) -> Rows:
        """Return a copy with the slots on ``device``."""
        twin = Rows(device)
        twin.columns = {name: column.to(device) for name, column in self.columns.items()}
        twin.initial = dict(self.initial)
        twin.ids, twin.index, twin.era = self.ids.to(_CPU), self.index.copy(), self.era
        return twin

    def add_column(self, spec: SlotSpec, initial: float) -> None:
        """Add a slot whose rows, old and new, start at ``initial``."""
        column = Column(spec, self.device)
        column.reserve(self.ids.capacity)
        for piece in column.pieces(0, len(self)):
            piece.fill_(initial)
        self.initial[spec.name] = initial
        self.columns = {**self.columns, spec.name: column}

    def reserve(self, n_rows: int) -> None:
        """Make room for ``n_rows`` rows in all."""
        self.index.reserve(n_rows)
        for column in (self.ids, *self.columns.values()):
            column.reserve(n_rows)

    def claim(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return the row of each id and the ids that are new, whose rows come last, in this order.

        Nobody sees the new rows until :meth:`write` or :meth:`publish`; their slots hold nothing defined.
        """
        at, new_ids = self.index.claim(ids)
        if len(new_ids):
            for column in (self.ids, *self.columns.values()):
                column.reserve(len(self) + len(new_ids))
        return at, new_ids

    def publish(self) -> None:
        """Let all see what is claimed."""
        self.index.publish()

    def initialize(self, begin: int, end: int, without: frozenset[str] = frozenset()) -> None:
        """Give the rows [begin, end), which nobody sees, the initial value in every slot not named in ``without``."""
        for name, column in self.columns.items():
            if name not in without:
                for piece in column.pieces(begin, end):
                    piece.fill_(self.initial[name])

    def put(self, rows: Int64s, values: Mapping[str, Tensor]) -> None:
        """Set ``rows``, all different, which nobody sees; several threads may do so, each to rows of its own."""
        in_sequence = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all())
        for name, tensor in values.items():
            if in_sequence:
                self.columns[name].write(int(rows[0]), tensor)
            else:
                self.columns[name].scatter(rows, tensor)

    def write(self, rows: Int64s, values: Mapping[str, Tensor], flag: Int64s | None = None) -> None:
        """Set ``rows``, all different, publish what is claimed, and set ``flag[0]``: all of it or nothing."""
        columns = [self.columns[name] for name in values]
        if self.device == _CPU:
            changes.write(self.index, rows, columns, list(values.values()), flag)
            return
        before = [column.gather(rows) for column in columns]
        try:
            for column, tensor in zip(columns, values.values(), strict=True):
                column.scatter(rows, tensor)
            changes.write(self.index, rows, [], [], flag)
        except BaseException:
            for column, old in zip(columns, before, strict=True):
                column.scatter(rows, old)
            raise

    def find_erasure(self, ids: Int64s) -> Erasure:
        """Return what has to be done to drop those of ``ids`` that are present; the last rows move into the gaps."""
        rows = np.unique(self.index.find(ids))
        rows = rows[rows >= 0]
        n_left = len(self) - len(rows)
        tail = np.arange(n_left, len(self), dtype=np.int64)
        movers = tail[~np.isin(tail, rows)]
        gone, moved = self.ids.gather(rows).numpy(), self.ids.gather(movers).numpy()
        return Erasure(gone, moved, movers, rows[rows < n_left])

    def erase(self, erasure: Erasure) -> None:
        """Do it, all of it or nothing."""
        slots = list(self.columns.values())
        if self.device == _CPU:
            changes.erase(self.index, erasure, [self.ids, *slots])
            return
        before = [column.gather(erasure.holes) for column in slots]
        try:
            for column in slots:
                column.scatter(erasure.holes, column.gather(erasure.movers))
            changes.erase(self.index, erasure, [self.ids])
        except BaseException:
            for column, old in zip(slots, before, strict=True):
                column.scatter(erasure.holes, old)
            raise
