"""Changes the rows of a table, one thread at a time, in compiled calls that no exception can interrupt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from recckpt.format.buckets import distinct
from recckpt.sparse.table.column import Addresses, Column
from recckpt.sparse.table.id_index import N_CLAIMED, N_ROWS, VERSION, IdIndex, begin_renumbering, erase_ids
from recckpt.sparse.table.kernels import compiled, copy_rows_within, fence, mark_rows, prefetch, scatter_rows
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_CPU = torch.device("cpu")
_ID_SPEC = SlotSpec("id", "int64", ())
MIN_ROWS = 64  # the memory of fewer rows is not worth releasing
_AHEAD = 16  # rows are at random addresses, so later ones are prefetched


class Erasure(NamedTuple):
    """Rows to erase: ``rows`` with these ``ids``. The last rows, ``movers`` with ``moved_ids``, fill the ``holes``."""

    rows: Int64s
    ids: Int64s
    moved_ids: Int64s
    movers: Int64s
    holes: Int64s


def write_rows(
    index: IdIndex, rows: Int64s, columns: Sequence[Column], values: Sequence[Tensor], flag: Int64s | None = None
) -> None:
    """Set ``rows`` of CPU columns, publish claims, and set ``flag[0]`` to 1, either all or nothing."""
    fitting = [column.fitting(tensor) for column, tensor in zip(columns, values, strict=True)]
    sources = np.array([tensor.data_ptr() for tensor in fitting], np.int64)
    _write(Addresses.of(columns), rows, sources, index.counts, np.zeros(1, np.int64) if flag is None else flag)


def erase_rows(index: IdIndex, erasure: Erasure, columns: Sequence[Column]) -> None:
    _erase(Addresses.of(columns), index.cells, index.counts, *erasure[1:])


@compiled
def _write(places: Any, rows: Any, sources: Any, counts: Any, flag: Any) -> None:
    for i in range(len(sources)):
        addresses = places.blocks[places.starts[i] : places.starts[i + 1]]
        scatter_rows(addresses, places.shifts[i], places.row_bytes[i], rows, sources[i])
    fence()
    counts[N_ROWS] = counts[N_CLAIMED]
    flag[0] = 1


@compiled
def _erase(  # noqa: PLR0917  # compiled functions take positions only
    places: Any, cells: Any, counts: Any, ids: Any, moved_ids: Any, movers: Any, holes: Any
) -> None:
    counts[VERSION] |= 1
    fence()
    for i in range(len(places.shifts)):
        addresses = places.blocks[places.starts[i] : places.starts[i + 1]]
        copy_rows_within(addresses, places.shifts[i], places.row_bytes[i], movers, holes)
    erase_ids(cells, counts, ids, moved_ids, holes)


@compiled
def keep_rows(counts: Any, rows: Any, marks: Any) -> None:
    """Mark ``rows`` and publish claims, either both or nothing."""
    mark_rows(rows, marks)
    counts[N_ROWS] = counts[N_CLAIMED]


class Rows:
    """Rows 0 to ``len - 1``, with one id each and one column per slot.

    Claimed rows follow, invisible until they are published. A change of published rows is one compiled call, so after
    an exception it is either complete or not begun; slots on another device are restored.
    """

    def __init__(
        self,
        device: torch.device,
        columns: Mapping[str, Column] | None = None,
        initial: Mapping[str, float] | None = None,
    ) -> None:
        self.device = device
        self.columns: Mapping[str, Column] = columns or {}  # the mapping is replaced, never changed in place
        self.initial: dict[str, float] = dict(initial or {})
        self.ids = Column(_ID_SPEC, _CPU)
        self.index = IdIndex()
        self.era = object()  # replaced when all rows are dropped or replaced; gradients of an earlier era are ignored
        self.most = 0  # the most rows before an erase since the memory was last shrunk

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        return self.index.cells.nbytes + self.ids.nbytes + sum(c.nbytes for c in self.columns.values())

    def is_still(self, version: int) -> bool:
        """Return whether no row has been renumbered since the index had this version."""
        return version % 2 == 0 and self.index.version == version

    def emptied(self) -> Rows:
        columns = {name: Column(column.spec, self.device) for name, column in self.columns.items()}
        return Rows(self.device, columns, self.initial)

    def to(self, device: torch.device) -> Rows:
        twin = self.with_columns(device, {name: column.to(device) for name, column in self.columns.items()})
        twin.era = self.era
        return twin

    def with_columns(self, device: torch.device, columns: Mapping[str, Column]) -> Rows:
        """Return a copy with the same ids and the given columns, in a new era."""
        twin = Rows(device, columns, self.initial)
        twin.ids, twin.index = self.ids.to(_CPU), self.index.copy()
        twin.index.settle()
        return twin

    def fitted(self) -> Rows:
        """Return the same rows without spare memory; whole blocks are shared with this object."""
        columns = {name: column.fitted(len(self)) for name, column in self.columns.items()}
        twin = Rows(self.device, columns, self.initial)
        twin.ids, twin.index, twin.era = self.ids.fitted(len(self)), self.index.fitted(), self.era
        return twin

    def add_column(self, spec: SlotSpec, initial: float) -> None:
        column = Column(spec, self.device)
        column.reserve(self.ids.capacity)
        for piece in column.pieces(0, len(self)):
            piece.fill_(initial)
        self.initial[spec.name] = initial
        self.columns = {**self.columns, spec.name: column}

    def reserve(self, n_rows: int) -> None:
        self.index.reserve(n_rows)
        for column in (self.ids, *self.columns.values()):
            column.reserve(n_rows)

    def claim(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Return the row of each id, and the new ids; new rows are numbered last, in this order.

        New rows are invisible until :meth:`write` or the index publishes them; their slots are uninitialized.
        """
        at, new_ids = self.index.claim(ids)
        if len(new_ids):
            for column in (self.ids, *self.columns.values()):
                column.reserve(len(self) + len(new_ids))
        return at, new_ids

    def initialize(self, begin: int, end: int, without: frozenset[str] = frozenset()) -> None:
        """Set all slots but ``without`` of unpublished rows [begin, end) to their initial values."""
        for name, column in self.columns.items():
            if name not in without:
                for piece in column.pieces(begin, end):
                    piece.fill_(self.initial[name])

    def put(self, rows: Int64s, values: Mapping[str, Tensor]) -> None:
        """Set distinct unpublished rows; several threads may set different rows at once."""
        in_sequence = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all())
        for name, tensor in values.items():
            if in_sequence:
                self.columns[name].write(int(rows[0]), tensor)
            else:
                self.columns[name].scatter(rows, tensor)

    def write(self, rows: Int64s, values: Mapping[str, Tensor], flag: Int64s | None = None) -> None:
        """Set distinct ``rows``, publish claims, and set ``flag[0]`` to 1, either all or nothing."""
        columns = [self.columns[name] for name in values]
        if self.device == _CPU:
            write_rows(self.index, rows, columns, list(values.values()), flag)
            return
        before = [column.gather(rows) for column in columns]
        done = np.zeros(1, np.int64) if flag is None else flag
        try:
            for column, tensor in zip(columns, values.values(), strict=True):
                column.scatter(rows, tensor)
            write_rows(self.index, rows, [], [], done)
        except BaseException:
            if not done[0]:
                for column, old in zip(columns, before, strict=True):
                    column.scatter(rows, old)
            raise

    def visit(self, rows: Int64s, visit: Visit) -> None:
        """Count and stamp ``rows``, which may repeat, and publish claims, either all or nothing."""
        if self.device == _CPU:
            counters = [self.columns[visit.counter]] if visit.counter else []
            stamped = [self.columns[name] for name in visit.stamps]
            values_of = zip(visit.stamps.values(), stamped, strict=True)
            stamps = [np.array(value, column.spec.dtype).view(np.int64) for value, column in values_of]
            places = Addresses.of([*counters, *stamped])
            _visit(places, rows, visit.occurrences, len(counters), np.array(stamps, np.int64), self.index.counts)
            return
        different, groups = np.unique(rows, return_inverse=True)
        n_rows, columns = (len(different),), self.columns
        dtypes = {name: columns[name].dtype for name in visit.stamps}
        values = {n: torch.full(n_rows, v, dtype=dtypes[n], device="cpu") for n, v in visit.stamps.items()}
        if visit.counter:
            sums = np.zeros(len(different), np.int64)
            np.add.at(sums, groups, visit.occurrences)
            column = self.columns[visit.counter]
            values[visit.counter] = column.gather(different) + torch.from_numpy(sums).to(column.device)
        self.write(different, values)

    def find_erasure(self, ids: Int64s) -> Erasure:
        """Return a plan to drop those of ``ids`` that are present; the last rows move into the gaps."""
        at = self.index.find(ids)
        rows = at[at >= 0]
        if 32 * len(rows) < len(self):
            rows = distinct(rows)
        else:  # for many rows a mask is faster than sorting
            is_one = np.zeros(len(self), np.bool_)
            is_one[rows] = True
            rows = np.flatnonzero(is_one)
        n_left = len(self) - len(rows)
        n_holes = int(np.searchsorted(rows, n_left))
        stays = np.ones(len(rows), np.bool_)  # for the last len(rows) rows: whether each stays, and so moves
        stays[rows[n_holes:] - n_left] = False
        movers = n_left + np.flatnonzero(stays)
        gone, moved = self.ids.gather(rows).numpy(), self.ids.gather(movers).numpy()
        return Erasure(rows, gone, moved, movers, rows[:n_holes])

    def erase(self, erasure: Erasure) -> None:
        self.most = max(self.most, len(self))
        slots = list(self.columns.values())
        if self.device == _CPU:
            erase_rows(self.index, erasure, [self.ids, *slots])
            return
        before = [column.gather(erasure.holes) for column in slots]
        try:
            begin_renumbering(self.index.counts)  # before a row moves, or a look-up could read another id's row
            for column in slots:
                column.scatter(erasure.holes, column.gather(erasure.movers))
            erase_rows(self.index, erasure, [self.ids])
        except BaseException:
            if self.index.version % 2:  # the renumbering was begun but not completed
                for column, old in zip(slots, before, strict=True):
                    column.scatter(erasure.holes, old)
                self.index.settle()
            raise


def last_occurrence(rows: Int64s) -> Int64s | None:
    """Return the position of the last occurrence of each distinct row; None if all rows are distinct."""
    _, last = np.unique(rows[::-1], return_index=True)
    if len(last) == len(rows):
        return None
    positions: Int64s = np.sort(len(rows) - 1 - last)
    return positions


class Visit(NamedTuple):
    """What a training look-up writes to its rows: a counter slot ("" for none), and stamps (slot -> value)."""

    occurrences: Int64s
    counter: str
    stamps: Mapping[str, int | float]


@intrinsic
def _int64_at(typing_context: Any, address: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(64))))

    return types.int64(types.int64), generate


@intrinsic
def _set_int64_at(typing_context: Any, address: Any, value: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(64))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@compiled
def _count(blocks: Any, shift: int, rows: Any, amounts: Any) -> None:
    mask = (1 << shift) - 1
    last = len(rows) - 1
    for i in range(len(rows)):
        ahead = rows[min(i + _AHEAD, last)]
        prefetch(blocks[ahead >> shift] + (ahead & mask) * 8)
        address = blocks[rows[i] >> shift] + (rows[i] & mask) * 8
        _set_int64_at(address, _int64_at(address) + amounts[i])


@compiled
def _stamp(blocks: Any, shift: int, rows: Any, stamp: int) -> None:
    mask = (1 << shift) - 1
    last = len(rows) - 1
    for i in range(len(rows)):
        ahead = rows[min(i + _AHEAD, last)]
        prefetch(blocks[ahead >> shift] + (ahead & mask) * 8)
        _set_int64_at(blocks[rows[i] >> shift] + (rows[i] & mask) * 8, stamp)


@compiled
def _visit(  # noqa: PLR0917  # compiled functions take positions only
    places: Any, rows: Any, occurrences: Any, n_counters: int, stamps: Any, counts: Any
) -> None:
    for i in range(len(places.shifts)):
        blocks = places.blocks[places.starts[i] : places.starts[i + 1]]
        if i < n_counters:
            _count(blocks, places.shifts[i], rows, occurrences)
        else:
            _stamp(blocks, places.shifts[i], rows, stamps[i - n_counters])
    fence()
    counts[N_ROWS] = counts[N_CLAIMED]
