"""Collects gradients of a table by id from backward passes, and makes look-ups nodes of torch's graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.checks import opaque
from recckpt.sparse.table.id_index import IdIndex
from recckpt.sparse.table.kernels import add_rows
from recckpt.sparse.table.row_store import RowStore

Int64s = npt.NDArray[np.int64]
Give = Callable[[Int64s, Tensor], object]
Read = Callable[[], tuple[Tensor, Int64s | None]]

_MAX_ENTRIES = 64
_graph_task_id = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # torch.utils.checkpoint uses this, too
_will_execute: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda node: True)


def is_in_backward() -> bool:  # whether this thread runs a backward pass, or a recomputation in one
    return _graph_task_id() != -1


def captured(node: Any) -> Tensor | None:
    """Return an empty gradient if ``torch.autograd.grad``, which accumulates none, requests the anchor's; else None."""
    try:
        _will_execute(node)
    except RuntimeError as error:  # raised for leaves only
        if "autograd.grad" in str(error):
            return torch.empty_like(node.variable)
    return None


def is_reached(node: Any) -> bool:
    """Return whether the running backward pass, which may be limited to some ``inputs``, reaches an anchor."""
    try:
        return _will_execute(node)
    except RuntimeError:  # raised if the anchor's gradient is requested, or outside of autograd's engine
        return True


class Lookup(torch.autograd.Function):
    """Calls ``read`` for embeddings; its backward pass calls ``give`` with the gradients of ids that have rows."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, read: Read, give: Give, ids: Int64s) -> Tensor:
        rows, present = read()
        ctx.give, ctx.ids, ctx.present = give, ids, present
        return rows

    @staticmethod
    @opaque
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_anchor = captured(ctx.next_functions[0][0])
        if of_anchor is None:
            ctx.give(*of_present(ctx.ids, grad, ctx.present))
        return of_anchor, None, None, None


def of_present(ids: Int64s, grads: Tensor, present: Int64s | None) -> tuple[Int64s, Tensor]:
    if present is None:
        return ids, grads
    return ids[present], grads.index_select(0, torch.from_numpy(present).to(grads.device))


@dataclass(frozen=True)
class _Entry:
    """Gradients of distinct ids, valid in one era of the store; an optimizer step that uses them sets ``used[0]``.

    ``merged`` is set if several entries were added up: the summed gradients at that time, and the sums of squares.
    """

    ids: Int64s
    grads: Tensor
    era: object
    used: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    merged: tuple[Tensor, Tensor] | None = None

    @property
    def squares(self) -> Tensor:
        """The sums of squared gradients, scaled as a GradScaler or clipping has scaled the summed gradients since."""
        if self.merged is None:
            return self.grads.square()
        sums, squares = self.merged
        before = sums.norm()
        overall = self.grads.norm() / before if before > 0 else torch.ones_like(before)
        return squares * torch.where(sums == 0, overall, self.grads / sums).square()

    def at(self, kept: Int64s) -> _Entry:
        places = torch.from_numpy(kept).to(self.grads.device)
        merged = self.merged and (self.merged[0][places], self.merged[1][places])
        return replace(self, ids=self.ids[kept], grads=self.grads[places], merged=merged)


@dataclass(frozen=True)
class RowGradients:
    """Distinct rows and their summed gradients. Setting ``used[0]`` to 1 removes the gradients from the table.

    ``squares`` returns the sums of squared gradients, if the table keeps them. ``n_lost`` counts ids without a row.
    """

    rows: Int64s
    grads: Tensor
    used: Int64s
    squares: Callable[[], Tensor]
    n_lost: int


class Gradients:
    """Gradients since an optimizer last used them, one entry per backward pass. Thread-safe.

    Entries hold ids, not row numbers, because rows may be renumbered before the step. Unused entries are merged by id
    at intervals, so that all entries together need no more memory than the embeddings in float32.

    Attributes:
        keeps_squares: whether merging also sums squares, for an optimizer that needs them.
    """

    def __init__(self, *, keeps_squares: bool = False) -> None:
        self.keeps_squares = keeps_squares
        self._entries: list[_Entry] = []  # the list is replaced, never changed in place
        self._n_passes = 0  # backward passes since the gradients were last used or forgotten
        self._lock = threading.RLock()

    def add(self, ids: Int64s, grads: Tensor, store: RowStore) -> None:
        # Sum now, not at the step, because autograd may reuse the memory of ``grads``.
        entry = _Entry(*_sum_by_id(ids, grads), store.rows.era)
        with self._lock:
            waiting = self._pending(store)
            self._n_passes = self._n_passes + 1 if waiting else 1
            self._entries = [*waiting, entry]
            is_full = len(self._entries) >= _MAX_ENTRIES
        if is_full:  # merges them; without an optimizer entries would accumulate
            self.values(store)

    def clear(self, set_to_none: bool = True) -> None:
        """Drop all gradients; if ``set_to_none`` is False and there were some, an empty entry stays."""
        with self._lock:
            self._n_passes = 0
            kept = [] if set_to_none else self._entries[:1]
            self._entries = [_Entry(entry.ids[:0], entry.grads[:0], entry.era) for entry in kept]

    def keep_squares(self) -> None:
        self.keeps_squares = True

    def forget(self, ids: Int64s, store: RowStore) -> None:
        """Drop the gradients of erased ids. The caller holds the lock of the store."""
        with self._lock:
            self._entries = self._pending(store)
            if self._entries:
                gone = IdIndex()
                gone.find_or_add(ids)
                kept = [np.flatnonzero(gone.find(entry.ids) < 0) for entry in self._entries]
                pairs = zip(self._entries, kept, strict=True)
                self._entries = [entry if len(at) == len(entry.ids) else entry.at(at) for entry, at in pairs]

    def passes_waiting(self, store: RowStore) -> int:
        with self._lock:
            return self._n_passes if self._pending(store) else 0

    def values(self, store: RowStore) -> Tensor | None:
        """Return the waiting gradients, one row per distinct id; in-place changes affect the next step."""
        with store.lock, self._lock:  # not during a step: gradients merged again would be used twice
            entry = self._merged(store)
        return None if entry is None else entry.grads

    def of_rows(self, store: RowStore) -> RowGradients | None:
        """Return the gradients of rows; None if there was no backward pass. Ids without a row are left out.

        The caller must hold the lock of the store as long as it uses the row numbers.
        """
        with self._lock:
            entry = self._merged(store)
        if entry is None:
            return None
        rows = store.find(entry.ids)
        present = np.flatnonzero(rows >= 0)
        if n_lost := len(rows) - len(present):
            rows, entry = rows[present], entry.at(present)
        device = store.device
        return RowGradients(rows, entry.grads.to(device), entry.used, lambda: entry.squares.to(device), n_lost)

    def _pending(self, store: RowStore) -> list[_Entry]:
        era = store.rows.era
        return [entry for entry in self._entries if entry.era is era and not entry.used[0]]

    def _merged(self, store: RowStore) -> _Entry | None:
        """Merge all entries into one, adding gradients in the order of the backward passes."""
        entries = self._pending(store)
        if len(entries) > 1:
            ids = np.concatenate([e.ids for e in entries])
            different, sums = _sum_by_id(ids, torch.cat([e.grads for e in entries]))
            merged = None
            if self.keeps_squares:
                merged = sums.clone(), _sum_by_id(ids, torch.cat([e.squares for e in entries]))[1]
            entries = [_Entry(different, sums, store.rows.era, merged=merged)]
        self._entries = entries
        return entries[0] if entries else None


def _sum_by_id(ids: Int64s, grads: Tensor) -> tuple[Int64s, Tensor]:
    index = IdIndex()
    index.reserve(len(ids))
    groups, different = index.find_or_add(ids)
    dtype = torch.promote_types(grads.dtype, torch.float32)
    sums = torch.zeros((len(different), *grads.shape[1:]), dtype=dtype, device=grads.device)
    add_by_group(groups, grads, sums)
    return different, sums


def add_by_group(groups: Int64s, grads: Tensor, sums: Tensor) -> None:
    """Add row i of ``grads`` to row ``groups[i]`` of ``sums``, in order; ``sums`` must be contiguous."""
    grads = grads.detach().to(sums.dtype).contiguous()
    if sums.device.type == "cpu":
        add_rows(groups, grads.flatten(1).numpy(), sums.flatten(1).numpy())
    else:
        sums.index_add_(0, torch.from_numpy(groups).to(sums.device), grads)
