"""A live table in three roles: as found in a model, as attached by a saver, and as the target of a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.registered import is_read_only
from recckpt.errors import LiveTableError
from recckpt.live.boxes import whole_spec
from recckpt.live.store import LiveStore
from recckpt.sparse.files.owners import IdSpan, OwnedIds
from recckpt.sparse.files.table_rows import TableSource
from recckpt.sparse.files.table_target import LoadTarget, Values, fitted_to
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.sparse.table.store import Store, in_order
from recckpt.text import nearest
from recckpt.types import EMBEDDING, LiveTable, RowShare, SlotSpec, WatchedTable, check_table_name

FINGERPRINTS = "fingerprints"  # of all rows, computed at each save
OWN = "own"
HOOKED = "its optimizer has step hooks of other code, which may write any row"  # a reason for FINGERPRINTS
Int64s = npt.NDArray[np.int64]
# Arguments: collections -> keys of their live tables in their state dicts; a model; its dense state by name.
LoadAround = Callable[[Mapping[nn.Module, Set[str]], nn.Module, Mapping[str, Any]], None]
_PIECE_ROWS = 1 << 17  # number of rows that are reset at a time


def is_a(obj: object, module: str, *names: str) -> bool:
    return any(cls.__module__ == module and cls.__name__ in names for cls in type(obj).__mro__)


class LiveTarget(LoadTarget):
    """Loads into a live table. All its rows exist already; rows that a checkpoint lacks stay unchanged."""

    takes_slots = True

    def __init__(self, table: AttachedTable) -> None:
        super().__init__(table)
        self._attached = table

    def begin(self) -> None:
        self._attached.prepare()
        self._attached.rows.wait()  # the load's threads write in CUDA streams of their own
        first, end = self._attached.rows.box.rows
        self.was_empty = first == end
        self.is_read_only = any(map(is_read_only, self._attached.live.tensors().values()))

    @property
    def owned_ids(self) -> OwnedIds:
        return IdSpan.of_rows(*self._attached.rows.box.rows, self._attached.live.n_rows)

    def placed(self, ids: Int64s) -> Int64s | None:
        """Return the positions of ids that have a row; None if all have one."""
        has_row = (ids >= 0) & (ids < self._attached.live.n_rows)
        return None if has_row.all() else np.flatnonzero(has_row)

    def check_ids(self, least: int, greatest: int) -> None:
        """Raise LiveTableError if one of the ids ``least`` to ``greatest`` has no row on any rank."""
        n_rows = self._attached.live.n_rows
        if least < 0 or greatest >= n_rows:
            raise LiveTableError(
                f"table {self.table.name!r}: found ids from {least} to {greatest}, expected ids from 0 to "
                f"{n_rows - 1}: make the table larger, or drop ids without a row with 'on_mismatch': 'resize' in "
                "load_conf"
            )

    def clear(self, fresh: Collection[str]) -> None:
        """Keep all rows, and reset ``fresh`` optimizer slots to their initial values."""
        store = self._attached.rows
        n_rows = store.box.rows[1] - store.box.rows[0]
        first = float(self._attached.live.settings().get("initial_accumulator_value", 0.0))
        for name in sorted(store.columns.keys() & fresh):
            spec = store.columns[name].spec
            for begin in range(0, n_rows, _PIECE_ROWS):
                rows = np.arange(begin, min(begin + _PIECE_ROWS, n_rows))
                shape, dtype = (len(rows), *spec.shape), getattr(torch, spec.dtype)
                store.write(rows, {name: torch.full(shape, first, dtype=dtype, device="cpu")})

    def merge(self, ids: Int64s, values: Values, dtypes: Mapping[str, str]) -> int:
        return self.write_present(ids, values)

    def write_present(self, ids: Int64s, values: Values) -> int:
        """Write slots of rows in place. Rows in read-only memory are skipped: ``check_same`` has compared them."""
        if not self.is_read_only:
            rows, values = self._fitted(ids, values)
            self._attached.rows.write(rows, values)
        return len(ids)

    def check_same(self, ids: Int64s, values: Values) -> None:
        """Raise LiveTableError for rows that differ from the table's read-only memory."""
        rows, values = self._fitted(ids, values)
        for name, tensor in self._attached.live.tensors().items():
            if name in values and not torch.equal(tensor[torch.from_numpy(rows)].to(values[name].dtype), values[name]):
                raise LiveTableError(
                    f"table {self.table.name!r}: its memory is read-only, and its {name} differs from the "
                    f"checkpoint's: map the memory for writing, or leave it out with 'exclude': [{self.table.name!r}]"
                )

    def _fitted(self, ids: Int64s, values: Values) -> tuple[Int64s, Values]:
        store = self._attached.rows
        rows = ids - store.box.rows[0]
        if store.box.columns:  # values have all columns of a row: keep the columns of this rank
            part, (begin, end) = store.box.part, store.box.columns[store.box.part]
            has_columns = {name: bool(store.columns[name].spec.shape) for name in values}
            values = {name: each[:, begin:end] if has_columns[name] else each[:, part] for name, each in values.items()}
        return rows, fitted_to(store.columns, rows, values)

    def erase(self, ids: Int64s) -> None:
        """Do nothing, because a live table always has all its rows."""

    def finish(self, *, drops: bool = False) -> int:
        """Notify the owner, and record the current versions: the load must not count as an unannounced write."""
        self._attached.rows.wait()
        self._attached.live.finish({}, {})
        self._attached.look()
        return 0

    def undo(self, *, is_cleared: bool) -> None:
        """Do nothing, because the previous values are overwritten."""


class AttachedTable:
    """A live table whose changes are recorded as long as this object is referenced and not closed.

    ``rows`` is the store of the rows. ``is_by_id`` says whether ids are added and evicted; otherwise all rows exist
    from the start and the row number is the id. ``target_type`` is the class that fills the table in a load.
    ``most_ids`` is the number of ids that fit on all ranks, None if ids without room are dropped. ``says_what_changes``
    and ``audit`` are as for :class:`LiveStore`.
    """

    is_by_id: ClassVar[bool] = False
    target_type: ClassVar[type[LoadTarget]] = LiveTarget

    def __init__(
        self, live: LiveTable, *, is_announced: bool = True, says_what_changes: bool = True, audit: int = 0
    ) -> None:
        self.name, self.live = check_table_name(live.name), live
        self.most_ids: int | None = live.n_rows
        self.rows = LiveStore(live, is_announced=is_announced, says_what_changes=says_what_changes, audit=audit)
        # Hooks are removed in close(), not when this object is deleted: that may happen during a step, and hooks cannot
        # be removed while they are called. Hooks without a door do nothing.
        self._detach = live.attach(self.rows)
        self._is_closed = False

    @property
    def store(self) -> Store:
        return self.rows

    def close(self) -> None:
        """Remove the hooks; the table can no longer be saved or loaded."""
        if not self._is_closed:
            self._is_closed = True
            self._detach()

    def prepare(self) -> None:
        """Bring the memory up to date before it is read or written. Runs in the thread that calls the saver.

        Raises LiveTableError if this object is closed, or if the table cannot be read now.
        """
        if self._is_closed:
            raise LiveTableError(
                f"table {self.name!r}: it is closed, so changes are no longer recorded; call live_tables, and make a "
                "new saver"
            )
        self.live.prepare()

    def look(self) -> None:
        """Check for unannounced writes; after any, mark all rows as changed and fail open snapshots."""
        if isinstance(self.live, WatchedTable):
            self.live.look()

    def source(self, rows: Snapshot) -> TableSource:
        """Return the source from which a save reads rows, given the snapshot that the save has taken."""
        return rows

    @property
    def share(self) -> RowShare:
        return RowShare(*self.rows.box.own_rows, self.live.n_rows)

    @property
    def n_saved(self) -> int:
        begin, end = self.rows.box.own_rows
        return end - begin

    @property
    def specs(self) -> tuple[SlotSpec, ...]:
        """The slots of a whole row, in the order of a checkpoint."""
        specs = [whole_spec(column.spec, self.rows.box) for column in self.rows.saved_columns.values()]
        return in_order(specs)

    def __len__(self) -> int:
        return len(self.store)

    def ids(self) -> Tensor:
        return self.store.ids.to_tensor(len(self))

    def has_all_of(self, n_rows: int) -> bool:
        """Return whether loading a checkpoint with ``n_rows`` rows replaces every row of the table."""
        return n_rows == self.live.n_rows

    def embeddings(self) -> Tensor:
        return self.store.saved_columns[EMBEDDING].blocks[0]

    @property
    def slots(self) -> Mapping[str, Tensor]:
        return {name: column.blocks[0] for name, column in self.store.saved_columns.items() if name != EMBEDDING}

    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        self.write(ids, {EMBEDDING: embeddings, **(slots or {})})

    def write(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write slots of distinct ids' rows in place. Raises LiveTableError for a row of another rank. Thread-safe."""
        self.rows.write(ids.numpy() - self.rows.box.rows[0], values)

    def clear(self) -> None:
        """Raise LiveTableError, because the owner of the table decides how many rows it has."""
        raise LiveTableError(f"table {self.name!r}: its rows are not recckpt's to drop; load into it instead")


@dataclass(frozen=True)
class FoundTable:
    live: LiveTable
    path: str  # path of its module
    kind: str  # kind of module
    keys: tuple[str, ...]  # keys of its weight in the state dict of the model
    weights: Callable[[], tuple[Tensor, ...]]  # returns the parameters that hold its rows now
    # how changes are detected: ``"gradient"`` in the optimizer's step, ``"backward"`` in a kernel's step, ``OWN``
    # by an adapter's announcements, or ``FINGERPRINTS`` by reading all rows at a save
    marks: str
    is_announced: bool  # whether all changes of rows are announced; otherwise training waits while rows are copied
    optimizer: Optimizer | None = None  # trains the table; None if it is frozen, or updates itself
    why: str | None = None  # why ``marks`` is not the best kind; None if it is
    is_tensor: bool = True  # whether ``keys`` name exactly the tensor of its rows, not a larger or smaller tensor
    # sharded collection that contains this table, and loads all its tables or fails; None if there is none
    collection: nn.Module | None = None
    load_around: LoadAround | None = None  # loads a model without touching live tables of sharded collections
    # names of the dense tensor with its rows in a checkpoint without live tables
    tensors: tuple[str, ...] = ()
    companions: tuple[FoundTable, ...] = ()  # tables of other rows in the same memory
    attached: type[AttachedTable] = AttachedTable  # class of the table as a saver sees it


@dataclass(frozen=True)
class Candidate:
    path: str  # path of its module, as in ``names`` and ``exclude``
    name: str  # name of the table, unless ``names`` gives another
    n_rows: int  # over all ranks
    make: Callable[[str], FoundTable]  # makes the table with this name, or raises LiveTableError if it stays dense
    together: str | None = None  # module whose tables share one tensor: all of them are live, or none
    module: nn.Module | None = None  # torch's embedding; None for other kinds


def with_marks(tables: Sequence[FoundTable], marks: str | Mapping[str, str]) -> list[FoundTable]:
    """Return the tables with the requested ``marks``. Raises TypeError or ValueError for unknown marks or tables."""
    if not isinstance(marks, str | Mapping):
        expected = f"'auto' or {FINGERPRINTS!r}, or a dict, name of a table -> one of them"
        raise TypeError(f"marks must be {expected}, found {marks!r:.200}")
    by_name = dict.fromkeys((table.live.name for table in tables), marks) if isinstance(marks, str) else dict(marks)
    names = [table.live.name for table in tables]
    for name, kind in by_name.items():
        if name not in names:
            raise ValueError(f"marks: {name!r} is not a live table{nearest(name, names)}")
        if kind not in ("auto", FINGERPRINTS):
            raise ValueError(f"marks: found {kind!r}, expected 'auto' or {FINGERPRINTS!r}")
    printed = {name for name, kind in by_name.items() if kind == FINGERPRINTS}
    return [replace(table, marks=FINGERPRINTS) if table.live.name in printed else table for table in tables]
