"""Gives the saver the rows of a table, HashTable or foreign, in bucket order and unchanged while it reads them."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from recckpt.errors import StateMismatchError
from recckpt.format.buckets import N_BUCKETS, bucket_of, repeated
from recckpt.parallel.ranks import Meetings
from recckpt.sparse.files.arrow_format import ID_SPEC
from recckpt.sparse.files.part_writer import ColumnBytes, RowBatch, TableBytes, row_bytes
from recckpt.sparse.table.checks import check_slot_name, spec_of
from recckpt.sparse.table.column import BLOCK_BYTES, Column, aligned_bytes
from recckpt.sparse.table.kernels import count_buckets, first_repeat, place_rows
from recckpt.sparse.table.store import Ids, is_stored
from recckpt.types import EMBEDDING, ITEM_BYTES, SavableTable, SlotSpec, check_table_name

_UINT32_ROWS = 1 << 32
LEAST_BATCH_BYTES = 1 << 20  # batches of a delta shrink with the number of changed rows, but each batch has a cost
PIECE_BYTES = 512 << 10  # size of a piece of a column that is copied, hashed and written: fits the L2 cache of a core


class BucketOrder:
    """Sorts the rows of a table by bucket. Thread-safe.

    At most ``budget_rows`` rows are sorted at once, unless one bucket has more; a larger table takes several passes
    over all ids.
    """

    def __init__(self, ids: Ids, n_rows: int, budget_rows: int) -> None:
        self._ids, self._n_rows, self._budget_rows = ids, n_rows, budget_rows
        self._lock = threading.RLock()
        self._starts: npt.NDArray[np.int64] | None = None
        self._whole: weakref.ref[npt.NDArray[Any]] | None = None
        self._is_small = n_rows <= min(budget_rows, N_BUCKETS)  # counting per bucket would cost more than sorting

    def rows(self, begin: int, end: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows in buckets [begin, end) in bucket order, at most ``budget_rows`` at a time."""
        if self._n_rows <= self._budget_rows:
            with self._lock:  # threads that need the whole order at the same time share it; then it is freed
                rows = self._whole() if self._whole else None
                if rows is None and self._is_small:
                    buckets = bucket_of(self._ids.to_tensor(self._n_rows).numpy())
                    rows = np.argsort(buckets.astype(np.uint16), kind="stable").astype(np.uint32)
                elif rows is None:
                    rows = self._ordered(0, N_BUCKETS)
                self._whole = weakref.ref(rows)
            yield rows if (begin, end) == (0, N_BUCKETS) else rows[slice(*self.starts()[[begin, end]])]
            return
        starts = self.starts()
        while begin < end:
            last = int(np.searchsorted(starts, starts[begin] + self._budget_rows, side="right")) - 1
            begin, first = min(end, max(begin + 1, last)), begin
            if starts[first] < starts[begin]:
                yield self._ordered(first, begin)

    def starts(self) -> npt.NDArray[np.int64]:
        """Return the number of rows before each bucket; the last item is the number of all rows."""
        with self._lock:
            if self._starts is None:
                counts = np.zeros(N_BUCKETS, np.int64)
                for piece in self._ids.pieces(0, self._n_rows):
                    count_buckets(piece.numpy(), counts)
                self._starts = np.concatenate([[0], np.cumsum(counts)])
            return self._starts

    def _ordered(self, first: int, last: int) -> npt.NDArray[Any]:
        starts = self.starts()
        kind = np.uint32 if self._n_rows <= _UINT32_ROWS else np.int64
        order = np.empty(starts[last] - starts[first], kind)
        cursors = starts[:-1] - starts[first]
        row = 0
        for piece in self._ids.pieces(0, self._n_rows):
            place_rows(piece.numpy(), row, first, last, cursors, order)
            row += len(piece)
        if not np.array_equal(cursors[first:last], starts[first + 1 : last + 1] - starts[first]):
            raise RuntimeError(f"the ids of a table of {self._n_rows} rows changed while it was being saved")
        return order


class TableSource(Protocol):
    """Rows 0 to ``n_rows - 1`` to save of one table: all, or those changed since another checkpoint."""

    @property
    def name(self) -> str: ...

    @property
    def n_rows(self) -> int: ...

    @property
    def n_all(self) -> int:
        """Number of rows of the table, including unchanged ones."""

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """Slots in file order: ``embedding`` first, the others by name."""

    @property
    def ids(self) -> Ids: ...

    @property
    def n_kept(self) -> int:
        """Number of rows that were copied aside because training changed them during the save."""

    def deletes(self) -> npt.NDArray[np.int64]:
        """Return the distinct ids deleted since the other checkpoint."""

    def read_slots(
        self, rows: npt.NDArray[Any], targets: Mapping[str, npt.NDArray[np.uint8]], *, is_last: bool
    ) -> None:
        """Copy the bytes of some slots of ``rows`` to ``targets``, one target per slot. Thread-safe.

        ``is_last`` is set with the last slot; afterwards the rows may change and must not be read again.
        """

    def close(self) -> None: ...


class RowsInParts(ABC):
    """A :class:`TableSource` whose rows are split among ranks, e.g. by columns, and joined before they are written."""

    @abstractmethod
    def since(self, changed: Callable[[], npt.NDArray[np.uint8]]) -> TableSource:
        """Return the rows that changed on any rank that has a part of them; ``changed`` gives one bit per row."""

    @abstractmethod
    def share_of(self, n_changed: int) -> int:
        """Return about how many of the ``n_changed`` rows that changed on this rank are written by this rank."""

    @staticmethod
    @abstractmethod
    def join(sources: Sequence[Any], meetings: Meetings) -> None:
        """Join the parts of all ranks. Collective: all ranks pass the same tables in the same order."""


@dataclass(frozen=True)
class StillTable:
    """A table that does not change while it is read, or just ids, without slots, of a table with ``n_all`` rows."""

    name: str
    n_rows: int
    ids: Ids
    columns: dict[str, Column]
    n_all: int
    n_kept = 0

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return tuple(column.spec for column in self.columns.values())

    def deletes(self) -> npt.NDArray[np.int64]:
        return np.empty(0, np.int64)

    def read_slots(
        self, rows: npt.NDArray[Any], targets: Mapping[str, npt.NDArray[np.uint8]], *, is_last: bool
    ) -> None:
        for name, target in targets.items():
            self.columns[name].gather_into(rows, target)

    def close(self) -> None: ...


def source_of(table: SavableTable) -> StillTable:
    """Return the rows of a table without a copy, valid until the table changes.

    Raises:
        StateMismatchError: ids and slots of a foreign table differ in their number of rows.
        ValueError: the name of the table or of a slot is not allowed.
    """
    if is_stored(table):
        store = table.store
        return StillTable(table.name, len(store), store.ids, _in_order(store.saved_columns), len(store))
    ids = table.ids().detach().cpu()
    for name in table.slots:
        check_slot_name(table.name, name)
    tensors = {EMBEDDING: table.embeddings(), **table.slots}
    n_rows = len(ids)
    wrong = {
        name: (f"{tensor.dtype} {tuple(tensor.shape)}", f"a storable dtype and {n_rows} rows")
        for name, tensor in tensors.items()
        if tensor.dim() == 0
        or len(tensor) != n_rows
        or 0 in tensor.shape[1:]
        or spec_of(name, tensor).dtype not in ITEM_BYTES
    }
    if ids.dtype != torch.int64 or ids.dim() != 1:
        wrong["id"] = (f"{ids.dtype} {tuple(ids.shape)}", "int64 of one dimension")
    if wrong:
        raise StateMismatchError(f"table {table.name!r}", mismatched=wrong)
    columns = {name: Column.over(spec_of(name, tensor), tensor) for name, tensor in tensors.items()}
    return StillTable(check_table_name(table.name), n_rows, Column.over(ID_SPEC, ids), _in_order(columns), n_rows)


def deleted_from(source: TableSource) -> StillTable:
    ids = source.deletes()
    return StillTable(source.name, len(ids), Column.over(ID_SPEC, torch.from_numpy(ids)), {}, source.n_all)


def source_to_save(table: SavableTable, slots: Collection[str] | None = None, *, detached: bool) -> TableSource:
    """Return a snapshot of a HashTable, or the rows of a foreign table, copied if ``detached``.

    Raises:
        StateMismatchError, ValueError: as :func:`source_of` does; also if an id occurs twice in a foreign table.
    """
    if is_stored(table):
        return table.store.snapshot(table.name, slots)
    source = source_of(table)
    if slots is not None:
        source = replace(source, columns={name: column for name, column in source.columns.items() if name in slots})
    if len(twice := repeated(source.ids.to_tensor(source.n_rows).numpy())):
        raise StateMismatchError(
            f"table {table.name!r}", mismatched={"id": (f"{twice[0]} more than once", "every id once")}
        )
    if not detached:
        return source
    columns = {name: _copied(column, source.n_rows) for name, column in source.columns.items()}
    ids = Column.over(ID_SPEC, source.ids.to_tensor(source.n_rows).clone())
    return StillTable(source.name, source.n_rows, ids, columns, source.n_all)


def _copied(column: Column, n_rows: int) -> Column:
    """Return a copy on the CPU, made piece by piece, so that the device never holds a second copy."""
    copy = Column(column.spec, torch.device("cpu"))
    copy.reserve(n_rows)
    piece_rows = max(1, BLOCK_BYTES // max(column.spec.row_bytes, 1))
    for begin in range(0, n_rows, piece_rows):
        end = min(n_rows, begin + piece_rows)
        copy.write(begin, column.blocks[0][begin:end].cpu())
    return copy


def _in_order(columns: Mapping[str, Column]) -> dict[str, Column]:
    return {name: columns[name] for name in sorted(columns, key=lambda name: (name != EMBEDDING, name))}


def repeated_id(ids: npt.NDArray[np.int64], before: npt.NDArray[np.int64]) -> tuple[int | None, npt.NDArray[np.int64]]:
    """Return an id that occurs twice, or None, and the last bucket's ids, to pass as ``before`` to the next call."""
    ids = np.concatenate([before, ids])
    repeat, begin = first_repeat(ids)
    return None if repeat < 0 else int(ids[repeat]), ids[begin:].copy()


class PieceBuffers:
    """Buffers for pieces of columns, one per thread, reused because writing to fresh memory is slow."""

    def __init__(self) -> None:
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, row_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        n_bytes = max(PIECE_BYTES, row_bytes)
        with self._lock:
            buffer = self._spare.pop() if self._spare else None
        if buffer is None or len(buffer) < n_bytes:
            buffer = aligned_bytes(n_bytes)
        try:
            yield buffer
        finally:
            with self._lock:
                self._spare.append(buffer)


class OrderedRows:
    """Rows of a table to save, in bucket order; refuses ids that occur twice."""

    def __init__(self, source: TableSource, batch_bytes: int, order_rows: int, buffers: PieceBuffers) -> None:
        self._source, self._buffers, self._row_bytes = source, buffers, row_bytes(source.slots)
        self._order = BucketOrder(source.ids, source.n_rows, order_rows)
        # A batch of a delta has proportionally fewer rows, so that it spans as many buckets as a batch of a full save.
        share = min(source.n_rows, source.n_all) * batch_bytes // max(1, source.n_all)
        self._batch_rows = max(1, max(share, min(LEAST_BATCH_BYTES, batch_bytes)) // self._row_bytes)

    @property
    def size(self) -> TableBytes:
        source, size = self._source, self._row_bytes
        return TableBytes(source.name, source.slots, source.n_rows * size, lambda: self._order.starts()[1:] * size)

    def batches(self, begin: int, end: int) -> Iterator[RowBatch]:
        """Yield the rows in buckets [begin, end); slots are copied only when they are written."""
        before = np.empty(0, np.int64)  # ids so far in the last bucket
        with self._buffers.lent(self._row_bytes) as buffer:
            for ordered in self._order.rows(begin, end):
                for first in range(0, len(ordered), self._batch_rows):
                    rows = ordered[first : first + self._batch_rows]
                    ids = np.empty(len(rows), np.int64)
                    self._source.ids.gather_into(rows, ids.view(np.uint8))
                    id_, before = repeated_id(ids, before)
                    if id_ is not None:
                        raise StateMismatchError(
                            f"table {self._source.name!r}",
                            mismatched={"id": (f"{id_} more than once", "every id once")},
                            remedy="nothing was saved; restore the last checkpoint, because the rows of the table "
                            "are damaged",
                        )
                    slots = [ColumnBytes(s, len(rows), self._pieces(s, rows, buffer)) for s in self._source.slots]
                    yield RowBatch(self._source.name, ids, slots)

    def _pieces(
        self, slot: SlotSpec, rows: npt.NDArray[Any], buffer: npt.NDArray[np.uint8]
    ) -> Iterator[npt.NDArray[np.uint8]]:
        piece_rows = len(buffer) // slot.row_bytes
        is_last = slot == self._source.slots[-1]
        for begin in range(0, len(rows), piece_rows):
            some = rows[begin : begin + piece_rows]
            piece = buffer[: len(some) * slot.row_bytes]
            self._source.read_slots(some, {slot.name: piece}, is_last=is_last)
            yield piece
