"""The rows of a live table as a store, the counterpart of :class:`recckpt.sparse.table.row_store.RowStore`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from recckpt.errors import LiveTableError
from recckpt.format.buckets import distinct
from recckpt.live.boxes import misfit_of
from recckpt.live.writes import NotedRows, is_capturing, runs_apart, wait_for_devices
from recckpt.sparse.table.checks import spec_of
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.sparse.table.store import HasMarkSets, Observers, Store
from recckpt.types import EMBEDDING, ITEM_BYTES, LiveTable, SlotSpec

Int64s = npt.NDArray[np.int64]
_RANGE_ROWS = 1 << 17  # ids made at a time: 1 MiB
log = logging.getLogger("recckpt")
_DEVICES = ("cpu", "cuda")  # for other devices, the order of reads and writes is unknown
_RESIZED = "close() the live tables, call live_tables once more, and make another saver"
_EXCLUDE = "leave it dense by exclude="
_PIECE_ROWS = 1 << 20  # rows announced at a time if any row may change


class RowRange:
    """Ids ``first`` to ``first + n - 1`` for the rows 0 to ``n - 1``. Thread-safe."""

    def __init__(self, first: int, n: int) -> None:
        self.first, self.n = first, n

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        for first in range(begin, end, _RANGE_ROWS):
            yield torch.arange(self.first + first, self.first + min(end, first + _RANGE_ROWS), device="cpu")

    def gather(self, rows: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64) + self.first)

    def gather_into(self, rows: npt.NDArray[Any], target: npt.NDArray[np.uint8]) -> None:
        np.add(rows, self.first, out=target.view(np.int64), casting="unsafe")

    def to_tensor(self, n_rows: int) -> Tensor:
        return torch.arange(self.first, self.first + n_rows, device="cpu")


class LiveStore(Store):
    """Holds the rows of a live table that this rank saves, in their owner's memory; the door for announced changes.

    Thread-safe. Threads that train call the methods of the door, which never raise.

    ``is_announced``: whether all changes of rows are announced; otherwise each snapshot is a copy.
    ``says_what_changes``: whether announcements name the changed rows; otherwise fingerprints find them. ``audit``:
    fingerprints check every ``audit``-th save, 0 for never. ``box`` is this rank's part of the table: each replica
    saves a share of it, and a load fills all of it. ``lock`` is held while rows are announced and snapshots are taken.
    """

    def __init__(
        self, table: LiveTable, *, is_announced: bool = True, says_what_changes: bool = True, audit: int = 0
    ) -> None:
        self.lock, self.says_what_changes, self.audit = threading.RLock(), says_what_changes, audit
        self._table, self._is_announced, self._observers = table, is_announced, Observers()
        self._is_distrusted = False
        self.box = table.box()
        # If columns are divided, a rank has its columns of all rows, and sends them to the ranks that save the rows.
        first, end = self.box.rows if self.box.columns else self.box.own_rows
        self._begin = first - self.box.rows[0]  # relative to the box
        self._ids = RowRange(first, end - first)
        self._noted = NotedRows(self._begin, len(self))
        self._failure: Exception | None = None
        self._is_in_graph = False
        # Slot -> (spec, address, storage) at the last snapshot. The reference to the storage keeps its address from
        # being reused, but not its memory alive.
        self._memory: dict[str, tuple[SlotSpec, int, StorageWeakRef]] = {}
        self._noted_columns()

    def __len__(self) -> int:
        return self._ids.n

    @property
    def ids(self) -> RowRange:
        return self._ids

    @property
    def columns(self) -> Mapping[str, Column]:
        """The slots in their current memory, with all rows of the box. Raises LiveTableError if one cannot be saved."""
        return self._columns(0, self.box.rows[1] - self.box.rows[0])

    @property
    def saved_columns(self) -> Mapping[str, Column]:
        """As ``columns``, but only the rows that this rank saves; with divided columns, all rows of the box."""
        return self._columns(self._begin, len(self))

    def snapshot(self, name: str, slots: Collection[str] | None = None) -> Snapshot:
        """Return the current rows; later changes do not affect them.

        Raises LiveTableError if a tensor cannot be saved, or if the adapter has failed since the last snapshot.
        """
        with self.lock:
            if self._is_in_graph:
                raise LiveTableError(
                    f"table {self._table.name!r}: a step that changes it was captured in a CUDA graph, whose replays "
                    "announce nothing: keep the table out of the graph, or out of live_tables by exclude="
                )
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise LiveTableError(f"table {self._table.name!r}: changes were missed: {failure!r}") from failure
            columns = self._noted_columns()
            self._is_announced &= not self._is_distrusted  # only now, because earlier snapshots are not copies
            if not self._is_announced:
                self._observers.replaced()
                columns = {slot: column.to(torch.device("cpu")) for slot, column in columns.items()}
            return self._observers.snapshot(name, len(self), self._ids, columns, slots)

    def distrust(self) -> None:
        """From now on, assume that rows change without announcements, so that each snapshot is a copy."""
        super().distrust()
        self._is_distrusted = True

    def track(self, marks: HasMarkSets) -> None:
        with self.lock:
            self._observers.track(marks)

    def mark_noted(self) -> None:
        """Mark as changed the rows that were noted on a device. Waits for the device."""
        with self.lock:
            self._observers.mark(self._noted.take(), len(self))

    def write(self, rows: Int64s, values: Mapping[str, Tensor]) -> None:
        """Write slots of distinct rows of the box in place. Raises LiveTableError for rows outside the box."""
        n_rows = self.box.rows[1] - self.box.rows[0]
        if len(rows) and not 0 <= rows.min() <= rows.max() < n_rows:
            first, end = self.box.rows
            found = f"rows {first + rows.min()} to {first + rows.max()}"
            raise LiveTableError(f"table {self._table.name!r}: found {found}, expected rows {first} to {end - 1}")
        with self.lock:
            self._noted_columns()
            columns = self.columns
            self._observers.announce(self._own(rows), len(self), with_ids=False)
            for name, tensor in values.items():
                columns[name].scatter(rows, tensor)

    def announce(self, rows: Tensor) -> None:
        """Before rows of the box change, have snapshots copy them, and mark them as changed."""
        try:
            if self._is_captured():
                return
            rows = rows.detach()
            with self.lock:  # rows stay on their device until marks are read, so that training does not wait
                is_late = runs_apart(rows) and not self._observers.has_snapshot
                if is_late and (not self._observers.has_marks or self._noted.note(rows)):
                    return
            numbers = rows.nonzero() if rows.dtype == torch.bool else rows
            own = self._own(numbers.to("cpu", torch.int64).numpy().reshape(-1))
            with self.lock:
                if self._observers.has_snapshot:  # snapshots need distinct rows
                    own = distinct(own)
                self._observers.announce(own, len(self), with_ids=False)
        except Exception as error:
            self.failed(error)

    def announce_all(self) -> None:
        """Have snapshots copy all rows that they have not written yet, and mark all rows as changed."""
        try:
            if self._is_captured():
                return
            with self.lock:
                n_rows = len(self) if self._is_announced and self._observers.has_snapshot else 0
                for begin in range(0, n_rows, _PIECE_ROWS):
                    self._observers.keep(np.arange(begin, min(begin + _PIECE_ROWS, n_rows)), with_ids=False)
                self._observers.replaced()
        except Exception as error:
            self.failed(error)

    def replaced(self) -> None:
        """Mark all rows as changed, and fail open snapshots, because their rows may have been overwritten."""
        with self.lock:
            self._observers.replaced()
            if not self._is_announced:  # then snapshots are copies, which stay valid
                return
            self._observers.fail_snapshots(
                LiveTableError(
                    f"table {self._table.name!r}: its rows were changed while they were being saved, by code that "
                    "recckpt does not notice, not by the optimizer passed to live_tables: call saver.settle() "
                    "before such a change, or pass the optimizer that makes the change to live_tables"
                )
            )

    def failed(self, error: Exception) -> None:
        """Mark all rows as changed and log the error; the next snapshot raises it."""
        log.error("table %r: changes were missed, so the next save fails: %r", self._table.name, error)
        self.replaced()
        self._failure = error

    def _is_captured(self) -> bool:
        """Return whether a CUDA graph captures a change, where rows cannot be copied; then later saves fail."""
        if is_capturing():
            self._is_in_graph = True
            self.replaced()
        return self._is_in_graph

    def _noted_columns(self) -> Mapping[str, Column]:
        """Return the current columns; if their memory differs from before, mark all rows as changed."""
        columns = self.saved_columns
        memory = {}
        for slot, column in columns.items():
            [tensor] = column.blocks
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch's has no types
            memory[slot] = column.spec, tensor.data_ptr(), storage
        if self._memory != memory:
            self._observers.replaced()
            self._memory = memory
        return columns

    def _own(self, rows: Int64s) -> Int64s:
        """Return those of ``rows`` that this rank saves, relative to the first row that it saves."""
        own = rows - self._begin
        return own[(own >= 0) & (own < len(self))]

    def _columns(self, begin: int, n_rows: int) -> Mapping[str, Column]:
        tensors = self._table.tensors()
        problems = [problem for name, tensor in tensors.items() if (problem := self._problem(name, tensor))]
        if EMBEDDING not in tensors:
            problems.append(f"found the slots {sorted(tensors)}, expected {EMBEDDING!r} among them")
        if problems:
            raise LiveTableError(f"table {self._table.name!r}: {'; '.join(problems)}")
        return {  # ``data`` shares no version counter, so that announced writes of a load do not count as unannounced
            name: Column.over(spec_of(name, tensor), tensor.data[begin : begin + n_rows])
            for name, tensor in tensors.items()
        }

    def wait(self) -> None:
        wait_for_devices(self._table.tensors().values())

    def _problem(self, name: str, tensor: Tensor) -> str | None:
        """Return why a tensor cannot be saved; None if it can be read in place."""
        n_rows, spec = self.box.rows[1] - self.box.rows[0], spec_of(name, tensor)
        expected, place = misfit_of(spec, self.box), tensor.device.type
        if spec.dtype not in ITEM_BYTES or tensor.dim() == 0 or 0 in tensor.shape[1:]:
            problem = f", expected one of the dtypes {', '.join(ITEM_BYTES)}, and values in each row: {_EXCLUDE}"
        elif len(tensor) != n_rows:
            problem = f", expected {n_rows} rows, as live_tables found them: {_RESIZED}"
        elif expected is not None:
            problem = f", expected {expected}, the part of this rank"
        elif place == "meta":
            problem = ", expected memory: materialize it first"
        elif place not in _DEVICES:
            problem = f", expected one of the devices {', '.join(_DEVICES)}: move it there, or {_EXCLUDE}"
        elif tensor.numel() and not tensor.untyped_storage().nbytes():
            problem = ", whose memory is freed at the moment: save and load when it is allocated, such as between steps"
        elif not tensor.is_contiguous():
            problem = " and not contiguous, but recckpt reads it in place: make it contiguous, or exclude it"
        else:
            return None
        return f"{name} is {spec.dtype} {tuple(tensor.shape)} on {tensor.device}{problem}"
