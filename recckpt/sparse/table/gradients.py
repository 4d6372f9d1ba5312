"""Gradients of a table: which ids a backward pass reached, and with what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import add_rows
from recckpt.sparse.table.row_store import RowStore

Int64s = npt.NDArray[np.int64]

_MAX_ENTRIES = 64


@dataclass(frozen=True)
class _Merged:
    """The sums of several gradients of ids when they were added up, and the sums of their squares."""

    sums: Tensor
    squares: Tensor

    def squares_at(self, grads: Tensor) -> Tensor:
        """Return the squares for ``grads``, which are the sums unless a scaler or clipping has changed them since."""
        before = self.sums.norm()
        overall = grads.norm() / before if before > 0 else torch.ones_like(before)
        return self.squares * torch.where(self.sums == 0, overall, grads / self.sums).square()

    def at(self, kept: Int64s) -> _Merged:
        """Return those at some places."""
        places = torch.from_numpy(kept).to(self.sums.device)
        return _Merged(self.sums[places], self.squares[places])


@dataclass(frozen=True)
class _Entry:
    """The gradients of different ids, which end with the era of the store; a step that uses them sets ``used[0]``."""

    ids: Int64s
    grads: Tensor
    era: object
    used: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    merged: _Merged | None = None

    @property
    def squares(self) -> Tensor:
        """The sum of the squares of the gradients that were added up, as they are scaled and clipped by now."""
        return self.grads.square() if self.merged is None else self.merged.squares_at(self.grads)

    def without(self, ids: IdIndex) -> _Entry:
        """Return those of other ids."""
        kept = np.flatnonzero(ids.find(self.ids) < 0)
        return self if len(kept) == len(self.ids) else self.at(kept)

    def at(self, kept: Int64s) -> _Entry:
        """Return those at some places."""
        grads = self.grads[torch.from_numpy(kept).to(self.grads.device)]
        return replace(self, ids=self.ids[kept], grads=grads, merged=self.merged and self.merged.at(kept))


@dataclass(frozen=True)
class RowGradients:
    """Different rows and their summed gradients; whoever sets ``used[0]`` to 1 forgets them in the table.

    ``squares`` returns the sums of the squared gradients, of a table that keeps them.
    """

    rows: Int64s
    grads: Tensor
    used: Int64s
    squares: Callable[[], Tensor]


class Gradients:
    """The gradients of a table since its optimizer last used them, one entry a backward pass. Thread-safe.

    An entry keeps ids, not rows: rows may be renumbered before the optimizer comes. Entries that no optimizer uses are
    merged by id from time to time, so that they take no more memory than the embeddings of the table, in float32 at
    least.

    Attributes:
        keeps_squares: whether the sums of the squares of entries stay known when they are merged.
    """

    def __init__(self, *, keeps_squares: bool = False) -> None:
        self.keeps_squares = keeps_squares
        self._entries: list[_Entry] = []  # replaced, never changed
        self._n_passes = 0  # backward passes since the gradients were last used or forgotten
        self._lock = threading.RLock()

    def add(self, ids: Int64s, grads: Tensor, store: RowStore) -> None:
        """Remember the gradients of ``ids``, of which some may be equal."""
        # Summed now and not when used: the memory of ``grads`` is autograd's, which may reuse it.
        entry = _Entry(*_sum_by_id(ids, grads), store.era)
        with self._lock:
            waiting = self._pending(store)
            self._n_passes = self._n_passes + 1 if waiting else 1
            self._entries = [*waiting, entry]
            is_full = len(self._entries) >= _MAX_ENTRIES
        if is_full:  # of a table that no optimizer steps, they would only pile up
            self.values(store)

    def clear(self, set_to_none: bool = True) -> None:
        """Forget all gradients; those of no rows stay where there were any and ``set_to_none`` is False."""
        with self._lock:
            self._n_passes = 0
            kept = [] if set_to_none else self._entries[:1]
            self._entries = [_Entry(entry.ids[:0], entry.grads[:0], entry.era) for entry in kept]

    def keep_squares(self) -> None:
        """Keep the sums of the squares of entries from now on, for an optimizer that needs them."""
        self.keeps_squares = True

    def twin(self) -> Gradients:
        """Return one without gradients for a copy of the table."""
        return Gradients(keeps_squares=self.keeps_squares)

    def forget(self, ids: Int64s, store: RowStore) -> None:
        """Forget those of ids whose rows have been erased; the caller has the lock of the store."""
        with self._lock:
            self._entries = self._pending(store)
            if self._entries:
                gone = IdIndex()
                gone.find_or_add(ids)
                self._entries = [entry.without(gone) for entry in self._entries]

    def passes_waiting(self, store: RowStore) -> int:
        """Return of how many backward passes gradients wait."""
        with self._lock:
            return self._n_passes if self._pending(store) else 0

    def values(self, store: RowStore) -> Tensor | None:
        """Return the gradients that wait, one row a different id; changed in place, they stay so."""
        with store.lock, self._lock:  # not while a step uses them: merged anew, they would be used a second time
            entry = self._merged(store)
        return None if entry is None else entry.grads

    def of_rows(self, store: RowStore) -> RowGradients | None:
        """Return the gradients of rows, None where there was no backward pass; ids without a row drop out.

        The rows are those of now: hold the lock of the store for as long as they count.
        """
        with self._lock:
            entry = self._merged(store)
        if entry is None:
            return None
        rows = store.find(entry.ids)
        present = np.flatnonzero(rows >= 0)
        if len(present) < len(rows):
            rows, entry = rows[present], entry.at(present)
        return RowGradients(rows, entry.grads.to(store.device), entry.used, lambda: entry.squares.to(store.device))

    def _pending(self, store: RowStore) -> list[_Entry]:
        """Return the entries that count."""
        era = store.era
        return [entry for entry in self._entries if entry.era is era and not entry.used[0]]

    def _merged(self, store: RowStore) -> _Entry | None:
        """Make one entry of all, in the same order of additions."""
        entries = self._pending(store)
        if len(entries) > 1:
            ids = np.concatenate([e.ids for e in entries])
            different, sums = _sum_by_id(ids, torch.cat([e.grads for e in entries]))
            merged = None
            if self.keeps_squares:
                merged = _Merged(sums.clone(), _sum_by_id(ids, torch.cat([e.squares for e in entries]))[1])
            entries = [_Entry(different, sums, store.era, merged=merged)]
        self._entries = entries
        return entries[0] if entries else None


def _sum_by_id(ids: Int64s, grads: Tensor) -> tuple[Int64s, Tensor]:
    """Return the different ids and the sum of the gradients of each, at least in float32."""
    index = IdIndex()
    index.reserve(len(ids))
    groups, different = index.find_or_add(ids)
    dtype = torch.promote_types(grads.dtype, torch.float32)
    sums = torch.zeros((len(different), *grads.shape[1:]), dtype=dtype, device=grads.device)
    add_by_group(groups, grads, sums)
    return different, sums


def add_by_group(groups: Int64s, grads: Tensor, sums: Tensor) -> None:
    """Add each row of ``grads`` to the row of ``sums``, which is contiguous, that its group names, in order."""
    grads = grads.detach().to(sums.dtype).contiguous()
    if sums.device.type == "cpu":
        add_rows(groups, grads.flatten(1).numpy(), sums.flatten(1).numpy())
    else:
        sums.index_add_(0, torch.from_numpy(groups).to(sums.device), grads)
