"""Stores the ids and slots of a table, and makes all changes of rows visible to snapshots and marks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.format.buckets import distinct
from recckpt.sparse.table.column import BLOCK_BYTES, Column
from recckpt.sparse.table.id_index import begin_renumbering
from recckpt.sparse.table.rows import MIN_ROWS, Rows, Visit, last_occurrence
from recckpt.sparse.table.snapshot import Snapshot
from recckpt.sparse.table.store import HasMarkSets, Observers, Store
from recckpt.types import EMBEDDING, SlotSpec

Int64s = npt.NDArray[np.int64]
T = TypeVar("T")
Take = Callable[[Mapping[str, Column], Int64s], T]
FirstValues = Callable[[Int64s], Tensor]

_TRIES = 3  # attempts of a look-up without the lock


class RowStore(Store):
    """The rows of a table; any number of threads may look up and change them.

    Only ``visit``, ``insert``, ``write``, ``erase``, ``clear`` and ``adopt`` change rows. Each holds the lock and
    notifies snapshots and marks before it changes a row; after an exception the change is either complete or not begun.
    Look-ups do not wait: they are repeated if an erase renumbered rows at the same time, and take the lock after a few
    tries. A caller whose change depends on rows that it has read must hold the ``lock``.

    Attributes:
        rows: change them directly only if nothing else uses this store.
    """

    def __init__(self, device: torch.device, rows: Rows | None = None) -> None:
        self.lock = threading.RLock()
        self.rows = Rows(device) if rows is None else rows
        self._observers = Observers()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def columns(self) -> Mapping[str, Column]:
        return self.rows.columns

    @property
    def further_columns(self) -> Mapping[str, Column]:  # all slots except the embedding
        return {name: column for name, column in self.columns.items() if name != EMBEDDING}

    @property
    def ids(self) -> Column:
        return self.rows.ids

    def snapshot(self, name: str, slots: Collection[str] | None = None) -> Snapshot:
        with self.lock:
            rows = self.rows
            return self._observers.snapshot(name, len(rows), rows.ids, rows.columns, slots)

    def track(self, marks: HasMarkSets) -> None:
        with self.lock:
            self._observers.track(marks)

    def wait(self) -> None:
        """Wait for all work on the device of the rows, in any CUDA stream."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def add_column(self, spec: SlotSpec, initial: float = 0.0) -> None:
        with self.lock:
            self._observers.replaced()
            self._settled().add_column(spec, initial)

    def reserve(self, n_rows: int) -> None:
        with self.lock:
            self._settled().reserve(n_rows)

    def read(self, columns: Mapping[str, Column], rows: Int64s, unseen: float) -> Tensor:
        """Return a copy of the embeddings of ``rows``; row -1 gives ``unseen``."""
        return columns[EMBEDDING].gather_or(rows, unseen)

    def embeddings(self) -> Tensor:
        """Return a copy of all embeddings in row order. The caller holds the lock."""
        return self.columns[EMBEDDING].to_tensor(len(self))

    def filled_by(self, slots: Mapping[str, str]) -> Mapping[str, str]:
        """Return which columns a load fills (column here -> slot of the checkpoint), given the slots it has."""
        return slots

    def find(self, ids: Int64s) -> Int64s:
        return self.look_up(ids, lambda columns, rows: rows)

    def look_up(self, ids: Int64s, take: Take[T]) -> T:
        """Return ``take(columns, rows)``, where absent ids have row -1. ``take`` may be called several times."""
        for _ in range(_TRIES):
            rows = self.rows
            version = rows.index.version
            taken = take(rows.columns, rows.index.find(ids))
            if rows.is_still(version):
                return taken
        with self.lock:
            rows = self.rows
            return take(rows.columns, rows.index.find(ids))

    def look_up_or_add(self, ids: Int64s, take: Take[T], embeddings: FirstValues) -> T:
        """As :meth:`look_up`, but first add rows with these embeddings for absent ids, under the lock."""
        rows = self.rows
        version = rows.index.version
        at = rows.index.find(ids)
        new = np.flatnonzero(at < 0)
        if len(new) == 0:
            taken = take(rows.columns, at)
            if rows.is_still(version):
                return taken
        with self.lock:
            self._settled()
            if self.rows is rows and rows.is_still(version):
                at[new] = self.insert(ids[new], {}, embeddings)
            else:
                at = self.insert(ids, {}, embeddings)
            return take(self.rows.columns, at)

    def visit(self, ids: Int64s, visit: Visit, take: Take[T], embeddings: FirstValues) -> T:
        """Add missing rows of ``ids``, count and stamp all their rows; return ``take(columns, rows)``."""
        with self.lock:
            at, _ = self._claim(ids, frozenset(), embeddings)
            self._announce(distinct(at) if self._observers.has_snapshot else at, with_ids=False)  # needs distinct rows
            self.rows.visit(at, visit)
            return take(self.rows.columns, at)

    def insert(self, ids: Int64s, values: Mapping[str, Tensor], embeddings: FirstValues | None = None) -> Int64s:
        """Set rows to ``values``, one tensor per slot, and return the row of each id; the last of equal ids wins.

        New rows get ``embeddings(ids)``; if ``embeddings`` is None, they get their ``values``, or the initial value.
        """
        with self.lock:
            at, n_new = self._claim(ids, frozenset(values), embeddings)
            rows = self.rows
            written = at
            if n_new == len(ids):
                rows.put(at, values)
                written, values = at[:0], {}
            elif values and (last := last_occurrence(at)) is not None:
                written = at[last]
                values = {name: tensor[torch.from_numpy(last)] for name, tensor in values.items()}
            if values:
                self._announce(written, with_ids=False)
            rows.write(written, values)
            return at

    def write(self, rows: Int64s, values: Mapping[str, Tensor], flag: Int64s | None = None) -> None:
        """Set distinct ``rows`` to one tensor per slot, and ``flag[0]`` to 1, either all or nothing.

        Row numbers must be looked up under the lock, or while nothing is erased.
        """
        with self.lock:
            present = self._settled()
            self._announce(rows, with_ids=False)
            present.write(rows, values, flag)

    def erase(self, ids: Int64s) -> int:
        """Drop the rows of present ids and return how many; the last rows move into the gaps.

        Memory is released once half of the rows are gone and no snapshot or look-up reads the old rows.
        """
        with self.lock:
            rows = self._settled()
            erasure = rows.find_erasure(ids)
            self._observers.keep(erasure.holes, with_ids=True)
            for marks in self._observers.mark_sets():
                marks.erase(erasure.ids, erasure.rows, len(rows))
            rows.erase(erasure)
            for marks in self._observers.mark_sets():
                marks.move(erasure)
            if rows.most > MIN_ROWS and 2 * len(rows) <= rows.most:
                fitted = rows.fitted()
                begin_renumbering(rows.index.counts)  # repeats look-ups that still read the old rows
                self.rows = fitted
            return len(erasure.ids)

    def clear(self) -> None:
        """Drop all rows. Snapshots keep the old memory alive."""
        with self.lock:
            self.adopt(self.emptied())

    def emptied(self) -> RowStore:
        return RowStore(self.device, self.rows.emptied())

    def adopt(self, other: RowStore) -> None:
        """Replace all rows and slots by those of ``other``, which must not be used afterwards."""
        with self.lock:
            self._observers.replaced()
            self.rows = other.rows
            self._observers.forget_snapshots()  # the rows that they read do not change any more

    def to(self, device: torch.device) -> RowStore:
        with self.lock:
            return RowStore(device, self.rows.to(device))

    def resized(self, dim: int, first_embeddings: Callable[[Int64s, SlotSpec], Tensor]) -> RowStore:
        """Return a copy where embeddings, and slots of the same shape, have ``dim`` as last dimension. Under the lock.

        Longer rows are cut. New columns get values of ``first_embeddings`` in embeddings, and the initial value in
        slots. Gradients that wait for the optimizer are not copied.
        """
        rows, columns = self.rows, {}
        shape = rows.columns[EMBEDDING].spec.shape
        for name, column in rows.columns.items():
            if column.spec.shape != shape:
                columns[name] = column.to(rows.device)
                continue
            spec = SlotSpec(name, column.spec.dtype, (*shape[:-1], dim))
            twin = columns[name] = Column(spec, rows.device)
            twin.reserve(rows.ids.capacity)
            n_piece = max(1, BLOCK_BYTES // max(spec.row_bytes, column.spec.row_bytes))
            for begin in range(0, len(rows), n_piece):
                at = np.arange(begin, min(len(rows), begin + n_piece))
                if name == EMBEDDING:
                    values = first_embeddings(rows.ids.gather(at).numpy(), spec).to(rows.device, copy=True)
                else:
                    values = torch.full(
                        (len(at), *spec.shape), rows.initial[name], dtype=twin.dtype, device=rows.device
                    )
                values[..., : min(dim, shape[-1])] = column.gather(at)[..., :dim]
                twin.write(begin, values)
        return RowStore(rows.device, rows.with_columns(rows.device, columns))

    def _settled(self) -> Rows:
        """Return the rows to change, after repairing what an exception left half done. Call it under the lock."""
        # Not for reads: a signal handler may read while its own thread is in the middle of a change.
        self.rows.index.settle()
        return self.rows

    def _claim(self, ids: Int64s, preset: frozenset[str], embeddings: FirstValues | None) -> tuple[Int64s, int]:
        """Return the row of each id and the number of new rows, which are initialized, except ``preset`` slots."""
        rows = self._settled()
        first = len(rows)
        at, new_ids = rows.claim(ids)
        end = first + len(new_ids)
        made = embeddings(new_ids) if embeddings is not None and len(new_ids) else None  # may run a user's code
        if rows.index.n_claimed != end or len(rows) != first or self.rows is not rows:
            raise RuntimeError("an initializer has changed the table whose new rows it initializes")
        # A snapshot may still need the erased rows whose places the new rows take.
        self._announce(np.arange(first, end), with_ids=True)
        rows.ids.write(first, torch.from_numpy(new_ids))
        rows.initialize(first, end, without=preset | ({EMBEDDING} if made is not None else set()))
        if made is not None:
            rows.columns[EMBEDDING].write(first, made)
        return at, len(new_ids)

    def _announce(self, rows: Int64s, *, with_ids: bool) -> None:
        self._observers.announce(rows, self.rows.index.n_claimed, with_ids=with_ids)
