"""The rows of a table: ids, slots and the one door through which all of them change."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.pre_images import Log
from recckpt.sparse.table.snapshot import Logs, Snapshot
from recckpt.types import EMBEDDING, SlotSpec

Int64s = npt.NDArray[np.int64]

_ID_SPEC = SlotSpec("id", "int64", ())
_SPARE_BYTES, _SPARE_ID_BYTES = 256 << 20, 16 << 20  # of logs, kept for the next: fresh memory is slow


class RowStore:
    """Rows 0 to ``len - 1``, all live: an id each, and one column a slot.

    The door: ``add``, ``write``, ``erase`` and ``clear`` are the only ways in which a row changes, and each tells the
    snapshots before it does. Not thread-safe, but for ``write`` to rows that no other thread reads or writes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.columns: dict[str, Column] = {}
        self._initial: dict[str, float] = {}
        self._ids = Column(_ID_SPEC, torch.device("cpu"))
        self._index = IdIndex()
        self.generation = 0  # goes up when rows are renumbered
        self._snapshots: list[weakref.ref[Snapshot]] = []
        self._spare_logs: Logs | None = None

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of index, ids and slots, room for growth included."""
        return self._index.nbytes + self._ids.nbytes + sum(c.nbytes for c in self.columns.values())

    @property
    def ids(self) -> Column:
        """The ids in row order, on the CPU."""
        return self._ids

    def snapshot(self, name: str) -> Snapshot:
        """Return the rows as they are now, which stay so while the store goes on changing.

        Args:
            name: of the table.
        """
        columns = {slot: self.columns[slot] for slot in sorted(self.columns, key=lambda s: (s != EMBEDDING, s))}
        specs = tuple(column.spec for column in columns.values())
        logs, self._spare_logs = self._spare_logs, None
        if logs is None or logs.slots.specs != specs:
            logs = Logs(Log([self._ids.spec]), Log(specs))
        on_close = partial(self._take_back, logs)
        snapshot = Snapshot(name, len(self), self._ids, columns, logs=logs, on_close=on_close)
        self._snapshots = [*(r for r in self._snapshots if r() is not None), weakref.ref(snapshot)]
        return snapshot

    def add_column(self, spec: SlotSpec, initial: float = 0.0) -> None:
        """Add a slot whose rows, old and new, start at ``initial``."""
        column = Column(spec, self.device)
        column.reserve(self._ids.capacity)
        self.columns[spec.name] = column
        self._initial[spec.name] = initial
        for piece in column.pieces(0, len(self)):
            piece.fill_(initial)

    def initial(self, name: str) -> float:
        """Return the value that new rows of a slot start with."""
        return self._initial[name]

    def set_initial(self, name: str, value: float) -> None:
        """Let new rows of a slot start with ``value``."""
        self._initial[name] = value

    def reserve(self, n_rows: int) -> None:
        """Make room for ``n_rows`` rows in all."""
        self._index.reserve(n_rows)
        for column in (self._ids, *self.columns.values()):
            column.reserve(n_rows)

    def find(self, ids: Int64s) -> Int64s:
        """Return the row of each id, -1 where it is absent."""
        return self._index.find(ids)

    def add(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return the row of each id and the ids that were new, in the order of their rows, which come last.

        The slots of the new rows hold nothing defined: the caller writes all of them, or calls
        :meth:`initialize`.
        """
        first = len(self)
        rows, new_ids = self._index.find_or_add(ids)
        if len(new_ids):
            for column in (self._ids, *self.columns.values()):
                column.reserve(len(self))
            self._keep(np.arange(first, len(self)), with_ids=True)  # of rows that were erased since
            self._ids.write(first, torch.from_numpy(new_ids))
        return rows, new_ids

    def initialize(self, begin: int, end: int, without: frozenset[str] = frozenset()) -> None:
        """Give the rows [begin, end) the initial value in every slot not named in ``without``."""
        for name, column in self.columns.items():
            if name not in without:
                for piece in column.pieces(begin, end):
                    piece.fill_(self._initial[name])

    def write(self, rows: Int64s, values: Mapping[str, Tensor]) -> None:
        """Set ``rows``, all different, to ``values``: slot name -> tensor, (len(rows), *slot_shape)."""
        self._keep(rows, with_ids=False)
        in_sequence = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all())
        for name, tensor in values.items():
            if in_sequence:
                self.columns[name].write(int(rows[0]), tensor)
            else:
                self.columns[name].scatter(rows, tensor)

    def erase(self, ids: Int64s) -> int:
        """Drop the rows of ``ids`` that are present and return how many; the last rows move into the gaps."""
        erased = self._index.erase(ids)
        n_rows = len(self)
        holes = np.sort(erased[erased < n_rows])
        tail = np.arange(n_rows, n_rows + len(erased), dtype=np.int64)
        movers = tail[~np.isin(tail, erased)]
        if len(movers):
            self._keep(holes, with_ids=True)
            moved_ids = self._ids.gather(movers)
            self._index.move(moved_ids.numpy(), holes)
            self._ids.scatter(holes, moved_ids)
            self.write(holes, {name: column.gather(movers) for name, column in self.columns.items()})
        self.generation += len(erased) > 0
        return len(erased)

    def clear(self) -> None:
        """Drop all rows and their memory; snapshots have the old memory to themselves then."""
        self._snapshots = []
        self._index = IdIndex()
        for column in (self._ids, *self.columns.values()):
            column.clear()
        self.generation += 1

    def _keep(self, rows: Int64s, *, with_ids: bool) -> None:
        """Let snapshots copy rows aside that are about to change."""
        for reference in self._snapshots:
            snapshot = reference()
            if snapshot is not None:
                snapshot.keep_rows(rows)
                if with_ids:
                    snapshot.keep_ids(rows)

    def _take_back(self, logs: Logs) -> None:
        """Keep some of the memory of a snapshot that is over for the next one."""
        logs.ids.forget(_SPARE_ID_BYTES)
        logs.slots.forget(_SPARE_BYTES)
        self._spare_logs = logs

    def to(self, device: torch.device) -> RowStore:
        """Return a copy with the slots on ``device``; ids and index stay on the CPU."""
        copy = RowStore(device)
        copy.columns = {name: column.to(device) for name, column in self.columns.items()}
        copy._initial = dict(self._initial)
        copy._ids = self._ids.to(self._ids.device)
        copy._index = self._index.copy()
        copy.generation = self.generation
        return copy


class Slots(Mapping[str, Tensor]):
    """The optimizer slots of a store by name; reading one copies the live rows."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> Tensor:
        if name == EMBEDDING:
            raise KeyError(name)
        return self._store.columns[name].to_tensor(len(self._store))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._store.columns if name != EMBEDDING)

    def __len__(self) -> int:
        return len(self._store.columns) - 1
