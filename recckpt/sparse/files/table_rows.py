"""The rows of a table, ours or foreign, that do not change while the saver reads them in bucket order."""

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
from recckpt.sparse.files.part_writer import ColumnBytes, RowBatch, TableBytes, row_bytes
from recckpt.sparse.table.checks import check_slot_name, spec_of
from recckpt.sparse.table.column import BLOCK_BYTES, Column, aligned_bytes
from recckpt.sparse.table.kernels import count_buckets, first_repeat, place_rows
from recckpt.sparse.table.store import Ids, is_stored
from recckpt.types import EMBEDDING, ITEM_BYTES, SavableTable, SlotSpec, check_table_name

_UINT32_ROWS = 1 << 32
_ID_SPEC = SlotSpec("id", "int64", ())
LEAST_BATCH_BYTES = 1 << 20  # of a delta, whose batches are the smaller the fewer rows have changed: each has its cost
PIECE_BYTES = 512 << 10  # of a column, copied, hashed and written: it stays in the second cache of a core meanwhile


class BucketOrder:
    """The rows of each bucket. Thread-safe.

    At most ``budget_rows`` are ordered at a time, unless one bucket has more: a table with more is ordered in passes,
    each of which looks at all ids.
    """

    def __init__(self, ids: Ids, n_rows: int, budget_rows: int) -> None:
        self._ids, self._n_rows, self._budget_rows = ids, n_rows, budget_rows
        self._lock = threading.RLock()
        self._starts: npt.NDArray[np.int64] | None = None
        self._whole: weakref.ref[npt.NDArray[Any]] | None = None
        self._is_small = n_rows <= min(budget_rows, N_BUCKETS)  # counting would cost more than the rows themselves

    def rows(self, begin: int, end: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows in buckets [begin, end), in the order of the buckets, at most ``budget_rows`` at a time."""
        if self._n_rows <= self._budget_rows:
            with self._lock:  # threads that need it now share the whole order, which is kept no longer
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
        """Return how many rows lie in the buckets before each, and before the end of all."""
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
    """Rows 0 to ``n_rows - 1`` of one table: all, or those that have changed since another checkpoint."""

    @property
    def name(self) -> str:
        """The table."""

    @property
    def n_rows(self) -> int:
        """Number of rows."""

    @property
    def n_all(self) -> int:
        """Rows of the table, those that have not changed included."""

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots, in the order of their columns in the file: ``embedding`` first, the others by name."""

    @property
    def ids(self) -> Ids:
        """The ids of the rows, on the CPU."""

    @property
    def n_kept(self) -> int:
        """Rows that were copied aside because training changed them meanwhile."""

    def deletes(self) -> npt.NDArray[np.int64]:
        """Return the ids, all different, that were deleted since that other checkpoint."""

    def read_slots(
        self, rows: npt.NDArray[Any], targets: Mapping[str, npt.NDArray[np.uint8]], *, is_last: bool
    ) -> None:
        """Copy the bytes of some slots of rows, a target each. Thread-safe.

        After ``is_last``, which comes with their last slot, the rows may change, and are not read again.
        """

    def close(self) -> None:
        """Drop the rows; nothing may be read any more."""


class RowsInParts(ABC):
    """A :class:`TableSource` of which ranks have parts of rows, such as columns, that they join before they write."""

    @abstractmethod
    def since(self, changed: Callable[[], npt.NDArray[np.uint8]]) -> TableSource:
        """Return the rows that have changed on any rank which has parts of them; ``changed`` gives a bit a row."""

    @abstractmethod
    def share_of(self, n_changed: int) -> int:
        """Return about how many of the rows that changed here are written here."""

    @staticmethod
    @abstractmethod
    def join(sources: Sequence[Any], meetings: Meetings) -> None:
        """Make whole rows of what the ranks have of tables; all have the same tables, in one order. Collective."""


@dataclass(frozen=True)
class StillTable:
    """A table that does not change while it is read; or ids without slots, of a table of ``n_all`` rows."""

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

    def close(self) -> None:
        """Do nothing: memory goes with the last reference."""


def source_of(table: SavableTable) -> StillTable:
    """Return the rows of a table as they are now, without copying them, for as long as it does not change.

    Raises:
        StateMismatchError: a foreign table whose ids and slots do not have one row each.
        ValueError: no table, or no slot, can have this name.
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
    return StillTable(check_table_name(table.name), n_rows, Column.over(_ID_SPEC, ids), _in_order(columns), n_rows)


def deleted_from(source: TableSource) -> StillTable:
    """Return the ids that a delta has to name as deleted, as rows without slots."""
    ids = source.deletes()
    return StillTable(source.name, len(ids), Column.over(_ID_SPEC, torch.from_numpy(ids)), {}, source.n_all)


def source_to_save(table: SavableTable, slots: Collection[str] | None = None, *, detached: bool) -> TableSource:
    """Return a snapshot of a table of ours, or the rows of a foreign one, copied where it is to be ``detached``.

    ``slots`` are those that are read; None for all.

    Raises:
        StateMismatchError, ValueError: as :func:`source_of`; or an id is there twice in a foreign table.
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
    ids = Column.over(_ID_SPEC, source.ids.to_tensor(source.n_rows).clone())
    return StillTable(source.name, source.n_rows, ids, columns, source.n_all)


def _copied(column: Column, n_rows: int) -> Column:
    """Return a copy on the CPU, made in pieces, so that there is never a second whole one on a device."""
    copy = Column(column.spec, torch.device("cpu"))
    copy.reserve(n_rows)
    piece_rows = max(1, BLOCK_BYTES // max(column.spec.row_bytes, 1))
    for begin in range(0, n_rows, piece_rows):
        end = min(n_rows, begin + piece_rows)
        copy.write(begin, column.blocks[0][begin:end].cpu())
    return copy


def _in_order(columns: Mapping[str, Column]) -> dict[str, Column]:
    return {name: columns[name] for name in sorted(columns, key=lambda name: (name != EMBEDDING, name))}


class RepeatFinder:
    """Looks for equal ids among those that it is given piece by piece, in bucket order."""

    def __init__(self) -> None:
        self._open = np.empty(0, np.int64)  # of the bucket in which the last piece ended

    def find(self, ids: npt.NDArray[np.int64]) -> int | None:
        """Return an id that came before, None where there is not one."""
        ids = np.concatenate([self._open, ids])
        repeat, begin = first_repeat(ids)
        self._open = ids[begin:].copy()
        return None if repeat < 0 else int(ids[repeat])


class PieceBuffers:
    """Memory for pieces of columns, one buffer a thread; they are kept, since the first touch of memory is slow."""

    def __init__(self) -> None:
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, row_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Lend a buffer that has room for a piece of rows of so many bytes."""
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
    """The rows of a table that is saved, in the order of their buckets; each id is looked for twice."""

    def __init__(self, source: TableSource, batch_bytes: int, order_rows: int, buffers: PieceBuffers) -> None:
        self._source, self._buffers, self._row_bytes = source, buffers, row_bytes(source.slots)
        self._order = BucketOrder(source.ids, source.n_rows, order_rows)
        # Of a delta a batch has as many fewer rows as rows have changed, so it has as many buckets.
        share = min(source.n_rows, source.n_all) * batch_bytes // max(1, source.n_all)
        self._batch_rows = max(1, max(share, min(LEAST_BATCH_BYTES, batch_bytes)) // self._row_bytes)

    @property
    def size(self) -> TableBytes:
        source, size = self._source, self._row_bytes
        return TableBytes(source.name, source.slots, source.n_rows * size, lambda: self._order.starts()[1:] * size)

    def batches(self, begin: int, end: int) -> Iterator[RowBatch]:
        """Yield the rows in buckets [begin, end); the slots are copied when they are written.

        Raises:
            StateMismatchError: an id is there twice: nothing could load what would be written.
        """
        repeats = RepeatFinder()
        with self._buffers.lent(self._row_bytes) as buffer:
            for ordered in self._order.rows(begin, end):
                for first in range(0, len(ordered), self._batch_rows):
                    rows = ordered[first : first + self._batch_rows]
                    ids = np.empty(len(rows), np.int64)
                    self._source.ids.gather_into(rows, ids.view(np.uint8))
                    if (id_ := repeats.find(ids)) is not None:
                        raise StateMismatchError(
                            f"table {self._source.name!r}",
                            mismatched={"id": (f"{id_} more than once", "every id once")},
                            remedy="nothing was saved; restore the last checkpoint, since the rows of the table are "
                            "not what they were",
                        )
                    slots = [ColumnBytes(s, len(rows), self._pieces(s, rows, buffer)) for s in self._source.slots]
                    yield RowBatch(self._source.name, ids, slots)

    def _pieces(
        self, slot: SlotSpec, rows: npt.NDArray[Any], buffer: npt.NDArray[np.uint8]
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Copy rows of one slot into the buffer, as many at a time as fit."""
        piece_rows = len(buffer) // slot.row_bytes
        is_last = slot == self._source.slots[-1]
        for begin in range(0, len(rows), piece_rows):
            some = rows[begin : begin + piece_rows]
            piece = buffer[: len(some) * slot.row_bytes]
            self._source.read_slots(some, {slot.name: piece}, is_last=is_last)
            yield piece
