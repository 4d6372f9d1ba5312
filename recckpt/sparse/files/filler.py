"""Fills one table from the batches of a checkpoint chain, in several threads at once."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.errors import CorruptCheckpointError
from recckpt.format.catalog import Batch
from recckpt.format.tables import TableEntry
from recckpt.policies.evict import LAST_TIME
from recckpt.policies.row_filter import RowFilter, numbers
from recckpt.sparse.files.catalogs import count_error
from recckpt.sparse.files.owners import Owners
from recckpt.sparse.files.table_target import Ages, LoadTarget, RowsAside, chosen
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import compiled
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Ranges = tuple[tuple[int, int], ...]  # column ranges [begin, end), ordered, without gaps; () if a row has one value
_ALIGNMENT = 8


@dataclass(frozen=True)
class BatchRows:
    """All or some rows of a batch, read from a file or received from another rank.

    Attributes:
        table: the table's name in the checkpoint.
        values: slot -> the bytes of its values.
    """

    table: str
    shard: int
    path: str
    ids: Int64s
    values: Mapping[str, Bytes]

    @property
    def n_bytes(self) -> int:
        return self.ids.nbytes + sum(values.size for values in self.values.values())

    def tensor(self, spec: SlotSpec) -> Tensor:
        """Return a slot as a read-only tensor that shares memory with these rows, and is valid while they live."""
        values = self.values[spec.name]
        # torch.from_numpy warns of a read-only array; this array of the same memory counts as writable.
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * values.size).from_address(values.ctypes.data))
        return torch.from_numpy(memory).view(getattr(torch, spec.dtype)).view(len(self.ids), *spec.shape)

    def some(self, positions: Int64s, columns: Collection[str]) -> BatchRows:
        wide = {name: self.values[name].reshape(len(self.ids), -1) for name in sorted(columns)}
        values = {name: rows.take(positions, axis=0).reshape(-1) for name, rows in wide.items()}
        return BatchRows(self.table, self.shard, self.path, self.ids[positions], values)


def packed(pieces: Iterable[BatchRows]) -> Bytes:
    pieces = list(pieces)
    if not pieces:
        return np.empty(0, np.uint8)
    heads = [(p.table, p.shard, p.path, len(p.ids), [(name, v.size) for name, v in p.values.items()]) for p in pieces]
    head = np.frombuffer(pickle.dumps(heads), np.uint8)
    arrays = [np.array([len(head)], np.int64).view(np.uint8), head]
    for piece in pieces:
        arrays += [piece.ids.view(np.uint8), *piece.values.values()]
    return np.concatenate([each for array in arrays for each in (array, np.zeros(-array.size % _ALIGNMENT, np.uint8))])


def unpacked(data: Bytes) -> Iterator[BatchRows]:
    at = 0

    def take(n_bytes: int) -> Bytes:
        nonlocal at
        begin, at = at, at + n_bytes + -n_bytes % _ALIGNMENT
        return data[begin : begin + n_bytes]

    heads: list[Any] = pickle.loads(take(int(take(8).view(np.int64)[0])).data) if len(data) else []
    for table, shard, path, n_rows, columns in heads:
        ids = take(8 * n_rows).view(np.int64)
        yield BatchRows(table, shard, path, ids, {name: take(n_bytes) for name, n_bytes in columns})


def regrouped(values: Tensor, before: Ranges, after: Ranges) -> Tensor:
    """Convert row-wise Adagrad's sums (means of squares over column ranges) to other column ranges.

    The sum of a whole row is the mean of its ranges' sums, weighted by their widths. Each new range gets the sum of the
    whole row. ``values`` has shape (rows, ranges), or (rows,) for whole rows.
    """
    if before == after:
        return values
    if before:
        widths = torch.tensor([end - begin for begin, end in before], dtype=torch.float64, device="cpu")
        values = (values.to(torch.float64) @ (widths / widths.sum())).to(values.dtype)
    return values[:, None].expand(len(values), len(after)).contiguous() if after else values


class LinkRows:
    """Selects the ids of one link that no newer link has. Links must be read newest first. Not thread-safe."""

    def __init__(self, table: str, n_known: int) -> None:
        self._table, self._n_rows = table, n_known
        self._met = np.zeros(n_known, np.uint8)  # 1 where this link has an id that a newer link has, too

    def new(self, ids: Int64s, rows: Int64s, n_new: int, path: str) -> Int64s:
        """Return the positions in ``ids`` of the new ids. Raises CorruptCheckpointError if this link repeats an id.

        ``rows`` has the row of each id in the index, -1 if it has no row. The last ``n_new`` rows of the index are new.
        """
        before, self._n_rows = self._n_rows, self._n_rows + n_new
        if n_new == len(ids):
            return np.arange(len(ids))
        positions = np.empty(len(ids), np.int64)
        repeated, n_found = _new_rows(rows, self._met, before, positions)
        if repeated >= 0:
            found, where = f"id {ids[repeated]} twice", f"table {self._table!r}"
            raise CorruptCheckpointError(path, where, found=found, expected="every id once")
        return positions[:n_found]


class KnownIds:
    """The ids that links, newest first, have named as rows or deletes; batches may come in any order. Not thread-safe.

    For the sorted ids of files see :class:`recckpt.sparse.files.table_reader.NamedIds`.
    """

    def __init__(self, table: str) -> None:
        self._table, self._ids = table, IdIndex()
        self.n_rows = 0  # ids named as rows; after the last link, the number of rows of the chain
        self.begin_link()

    def begin_link(self) -> None:
        self._of_link = LinkRows(self._table, len(self._ids))

    def new_rows(self, ids: Int64s, path: str) -> Int64s:
        """Add ids. Return the positions of ids that no newer link has. Refuses an id that occurs twice in the link."""
        rows, new_ids = self._ids.find_or_add(ids)
        self.n_rows += len(new_ids)
        return self._of_link.new(ids, rows, len(new_ids), path)

    def without(self, ids: Int64s, path: str) -> Int64s:
        """Return the positions of unknown ids. Refuses a known id that occurs twice in the link."""
        return self._of_link.new(ids, self._ids.find(ids), 0, path) if len(self._ids) else np.arange(len(ids))

    def delete(self, ids: Int64s) -> Int64s:
        """Add this link's deletes, after its rows. Return the ids that neither this nor a newer link names as rows."""
        return self._ids.find_or_add(ids)[1]


@compiled
def _new_rows(rows: Any, met: Any, n_rows: int, positions: Any) -> tuple[int, int]:
    n_found, next_row = 0, n_rows
    for i in range(len(rows)):
        row = rows[i]
        if 0 <= row < len(met):
            if met[row]:
                return i, n_found
            met[row] = 1
            continue
        if row >= 0:
            if row < next_row:
                return i, n_found
            next_row += 1
        positions[n_found] = i
        n_found += 1
    return -1, n_found


@dataclass(eq=False)
class Filler:
    """Fills one table from the table ``entry`` of a checkpoint, reading the links of its chain newest first.

    Call ``expect`` for each link first. Between ``begin_link`` and ``end_link`` pass the rows of one link either to
    ``check`` or, after ``start``, to ``fill``. Several threads may call ``check`` and ``fill``.

    Attributes:
        slots: slot of the table -> slot of the checkpoint; all other slots of new rows get their initial values.
        with_rows: whether ids are loaded; otherwise only slots of ids that the table has.
        clear: whether only loaded rows remain; otherwise loaded rows are merged in and replace those of the same ids.
        where: filter of the rows to load.
        is_update: whether the table already has the rows of the older links, unchanged.
        ages: how dates of rows are converted.
        ranges: slot of the table -> the column ranges of its values in the checkpoint, and in the table.
        skips_outside: whether ids for which the table cannot have a row are skipped; otherwise they are refused.
        fresh: slots that no checkpoint fills, and that get initial values in a table that is emptied.
        drops: whether a table without room for all rows keeps the ids with the highest counts; otherwise it refuses.
        empties: whether the table is emptied first.
        columns: slots of the checkpoint to read.
        row_bytes: bytes per row in ``columns``, including the id.
        n_rows: rows that the table has received.
        n_filtered: rows that were left out.
    """

    target: LoadTarget
    entry: TableEntry
    slots: Mapping[str, str]
    with_rows: bool
    clear: bool
    where: RowFilter
    is_update: bool
    ages: Ages
    ranges: Mapping[str, tuple[Ranges, Ranges]] = field(default_factory=dict)
    skips_outside: bool = False
    fresh: frozenset[str] = frozenset()
    drops: bool = False

    def __post_init__(self) -> None:
        self.empties = self.with_rows and self.clear and not self.is_update
        self.columns = frozenset(self.slots.values()) | self.where.slots
        self._specs = {spec.name: spec for spec in self.entry.slots if spec.name in self.columns}
        self.row_bytes = 8 + sum(spec.row_bytes for spec in self._specs.values())
        self.n_rows = self.n_filtered = 0
        self._where = self.where.of([spec.name for spec in self.entry.slots])
        self._takes_all = self._where == RowFilter()
        reduced = self.entry.reduced.dtypes if self.entry.reduced else {}
        self._dtypes = {slot: reduced[there] for slot, there in self.slots.items() if there in reduced}  # when trained
        self._erases = self.with_rows and self.clear and self.is_update  # erase rows that are deleted or filtered out
        self._lock = self.target.lock
        self._known = KnownIds(self.entry.name)
        self._is_set = False  # whether the table itself identifies known rows; then ``_known`` has deletes only
        self._newest = ""
        self._initial: Mapping[str, float] = {}  # slot -> its initial value before the load, which the load replaces
        self._of_link = LinkRows(self.entry.name, 0)
        self._n_links = self._n_done = self._n_expected = 0
        self._is_started = self._touched = False

    @cached_property
    def _owners(self) -> Owners:
        return Owners({0: [self.target.owned_ids]})

    def share(self, batch: Batch) -> float:
        """Return about which share of a batch's rows the table owns; exactly 0.0 if it owns none."""
        return self._owners.shares(batch).get(0, 0.0)

    def check_ids(self, least: int, greatest: int) -> None:
        """Raise LiveTableError if the table cannot have rows of all ids in this range, and may not skip ids."""
        if not self.skips_outside:
            self.target.check_ids(least, greatest)

    def expect(self, directory: str, n_rows: int) -> None:
        self._newest = self._newest or directory
        self._n_links += 1
        self._n_expected += n_rows

    def start(self) -> None:
        """Before the first link, empty the table if asked, and reserve room, so that no row moves during writes."""
        if self._is_started:
            return
        self._is_started, self._known = True, KnownIds(self.entry.name)
        if not self.with_rows:
            return
        if self.empties:
            self._touched = True
            self.target.clear(self.fresh)
        n_rows = len(self.target) + min(self._n_expected, self.entry.rows) if self._takes_all else None
        self._initial = self.target.start(self.ages.missing, n_rows)
        is_aside = self.target.aside is not None
        self._is_set = is_aside and len(self.target) == 0 and (self._takes_all or self._n_links == 1)

    def begin_link(self) -> None:
        self._known.begin_link()
        self._of_link = LinkRows(self.entry.name, len(self.target))

    def end_link(self, deletes: Int64s) -> None:
        """Add the link's deletes. After the last link, check the number of rows."""
        owned = self._owned(deletes)
        gone = self._known.delete(deletes if owned is None else deletes[owned])
        if self._is_started:
            self._erase(gone)
        self._n_done += 1
        if self._n_done < self._n_links:
            return
        self._n_done, n_rows = 0, self.n_rows if self._is_set else self._known.n_rows
        self._known, entry = KnownIds(self.entry.name), self.entry
        is_whole_chain = not entry.is_whole and not self.is_update
        owns_all = self.target.owned_ids.is_everything  # how many rows a slice must have is unknown
        if is_whole_chain and owns_all and n_rows != entry.rows:
            raise count_error(self._newest, entry.name, entry.rows, n_rows)

    def end(self) -> None:
        """Restore the initial values that slots had before the load."""
        self.target.end(self._initial)

    def take_history(self) -> None:
        """Continue the checkpoint's evictions if the table is now the checkpoint's; take over the clock's dates."""
        evicts_next = self.empties and self.ages.is_resumed
        self.target.take_history(self.entry, evicts_next=evicts_next, has_dates=LAST_TIME in self.slots)

    def undo(self) -> bool:
        """Empty a table that was emptied, or was empty, before the load. Say whether it has lost rows or values."""
        if self.with_rows:
            self.target.undo(is_cleared=self.empties and self._touched)
        return self._touched and not self.target.was_empty

    def check(self, rows: BatchRows) -> int:
        """Refuse rows as :meth:`fill` would, before :meth:`start`, without a change. Return how many the table owns."""
        is_read_only = self.target.is_read_only
        ids, values = self._own_rows(rows, self._specs if is_read_only else {})
        n_own = len(ids)
        ids, values = self._new_rows(ids, values, rows.path)
        if is_read_only:
            ids, values = self._placed(ids, values)
            self.target.check_same(ids, self._as_here(values))
        return n_own

    def fill(self, rows: BatchRows) -> int:
        """Load the rows that the table owns, the filter keeps and no newer link names. Return how many it owns.

        Refuses an id that occurs twice in a link.
        """
        ids, values = self._own_rows(rows, self._specs)
        n_own = len(ids)
        if not self._is_set and (self.with_rows or self._n_links > 1):
            ids, values = self._new_rows(ids, values, rows.path)
        ids, values = self._placed(ids, values)
        if not self._takes_all:
            kept = np.flatnonzero(self._where.keeps(ids, {slot: numbers(values[slot]) for slot in self._where.slots}))
            with self._lock:
                self.n_filtered += len(ids) - len(kept)
            self._erase(np.delete(ids, kept))
            ids, values = _rows_of(ids, values, kept)
        self._touched = True
        values = self.ages.of_rows(self._as_here(values))
        if not self.with_rows:
            n_rows = self.target.write_present(ids, values)
        elif self.target.aside is not None:
            # With a filter the number of rows is unknown: columns grow, rows move, and no other thread may write.
            with nullcontext() if self._takes_all else self._lock:
                n_rows = self._fill_aside(self.target.aside, ids, values, rows.path)
        else:
            n_rows = self.target.merge(ids, values, self._dtypes)
        with self._lock:
            self.n_rows += n_rows
        return n_own

    def _owned(self, ids: Int64s) -> Int64s | None:  # positions of owned ids; None if all are owned
        owned_ids = self.target.owned_ids
        return None if owned_ids.is_everything else np.flatnonzero(owned_ids.owns(ids))

    def _own_rows(self, rows: BatchRows, specs: Mapping[str, SlotSpec]) -> tuple[Int64s, dict[str, Tensor]]:
        values, owned = {name: rows.tensor(spec) for name, spec in specs.items()}, self._owned(rows.ids)
        return (rows.ids, values) if owned is None else _rows_of(rows.ids, values, owned)

    def _as_here(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = {slot: rows[there] for slot, there in self.slots.items()}
        return values | {slot: regrouped(values[slot], *ranges) for slot, ranges in self.ranges.items()}

    def _new_rows(self, ids: Int64s, rows: dict[str, Tensor], path: str) -> tuple[Int64s, dict[str, Tensor]]:
        with self._lock:
            new = self._known.new_rows(ids, path)
        return _rows_of(ids, rows, new)

    def _placed(self, ids: Int64s, rows: dict[str, Tensor]) -> tuple[Int64s, dict[str, Tensor]]:
        """Return the rows that the table can have; the others are counted as filtered, or refused later."""
        placed = self.target.placed(ids) if self.skips_outside else None
        if placed is None:
            return ids, rows
        with self._lock:
            self.n_filtered += len(ids) - len(placed)
        return _rows_of(ids, rows, placed)

    def _erase(self, ids: Int64s) -> None:
        if self._erases and not self.target.was_empty and len(ids):
            self._touched = True
            self.target.erase(ids)

    def _fill_aside(self, aside: RowsAside, ids: Int64s, values: dict[str, Tensor], path: str) -> int:
        """Add new rows: claim rows for the ids under the lock, then write the values without it."""
        taken = np.arange(len(ids))
        with self._lock:
            if self._is_set:
                taken = self._known.without(ids, path)  # leaves out ids that newer links delete
            rows, claimed = aside.claim(ids if len(taken) == len(ids) else ids[taken])
            if self._is_set:
                new = self._of_link.new(ids[taken], rows, len(claimed[1]), path)
                rows, taken = rows[new], taken[new]
        aside.put(claimed, rows, values, None if len(taken) == len(ids) else taken)
        return len(rows)


def _rows_of(ids: Int64s, values: dict[str, Tensor], rows: Int64s) -> tuple[Int64s, dict[str, Tensor]]:
    return (ids, values) if len(rows) == len(ids) else (ids[rows], chosen(values, rows, len(ids)))


@dataclass(frozen=True)
class OtherRows:
    """Rows that come from no part file, as of a dense tensor; each rank reads its own rows, perhaps repeatedly."""

    filler: Filler
    read: Callable[[], Iterator[BatchRows]]

    @property
    def n_bytes(self) -> int:
        return self.filler.entry.rows * self.filler.row_bytes
