"""The hashtable embedding: an ``nn.Module`` that grows a row for every id it is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from recckpt import types
from recckpt.format.buckets import N_BUCKETS, Slice
from recckpt.policies.admit import Admit, AdmitFunction
from recckpt.sparse.average.followed import FollowedTable
from recckpt.sparse.average.models import average_tables_too
from recckpt.sparse.table.admission import AdmittingTable, Fetched, admission_of, fetched_again
from recckpt.sparse.table.checks import (
    asked_ids,
    check_owned,
    check_values,
    checked_count,
    checked_device,
    checked_shape,
    dtype_name,
    flat_ids,
)
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.eviction import EvictingTable
from recckpt.sparse.table.eviction_plan import Policy
from recckpt.sparse.table.gradients import Gradients
from recckpt.sparse.table.initializers import InitializerLike, as_initializer
from recckpt.sparse.table.nn_module import lookup_with_grad
from recckpt.sparse.table.opaque import opaque
from recckpt.sparse.table.recomputation import is_in_backward
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.torch_embedding import Embedding, torch_rows
from recckpt.types import EMBEDDING, SlotSpec, check_table_name

if TYPE_CHECKING:
    from typing_extensions import Self

Int64s = npt.NDArray[np.int64]


class HashTable(FollowedTable, AdmittingTable, EvictingTable):
    """A growing map from int64 ids to embeddings of one shape, with optimizer slots.

    Every int64 value is a legal id. In ``state_dict()`` the table stands as itself, under its name: such a
    state dict can be deep-copied (which copies the rows) and given to ``load_state_dict``; it is written to
    disk by :class:`recckpt.Saver`, not by pickle. Thread-safe (docs/safety.md), not collective.

    Args:
        embedding_shape: shape of one embedding, such as ``(64,)``; an int is short for one dimension.
        name: name in checkpoints, unique in a model, up to 1,024 bytes of UTF-8.
        dtype: float32, float16, bfloat16, float64, or an integer type.
        device: where the slots live; ids and index are always on the CPU.
        initializer: gives new rows their values: one of :mod:`recckpt.sparse.table.initializers`, or a callable like
            those of ``torch.nn.init``; None for ``Normal(std=1 / sqrt(values in a row))``, and for zeros in a table
            of integers. ``Constant(0)`` asks for zeros.
        slice: part of the id space that this table may hold; None for all of it.
        track: what training look-ups keep in scalar slots of the rows, some of ``"count"`` (slot ``count``),
            ``"step"`` (``last_step``) and ``"time"`` (``last_time``); see docs/rows.md.
        admit: which unseen ids training look-ups insert: a policy of :mod:`recckpt.policies.admit`, or a callable
            ``(ids, step) -> mask``; None for all. Other ids read their initial values and get no gradients.
        evict: policies of :mod:`recckpt.policies.evict`, by any of which rows go as the table is trained.
        evict_every: in so many steps all rows are looked at once, a part of the ids at each; see docs/rows.md.
        budget_ms: a warning says so once where that takes longer, and what ``evict_every`` would do; None says nothing.

    Raises:
        TypeError: ``admit`` is no policy.
        ValueError: another argument is not one that a table can have, or ``evict`` goes by what is not tracked.
    """

    def __init__(
        self,
        embedding_shape: int | Sequence[int],
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        initializer: InitializerLike | None = None,
        slice: Slice | None = None,
        track: Sequence[str] = (),
        admit: Admit | AdmitFunction | None = None,
        evict: Policy | Sequence[Policy] = (),
        evict_every: int | None = None,
        budget_ms: float | None = None,
    ) -> None:
        super().__init__()
        self.name = check_table_name(name)
        self.dtype = dtype
        self.slice = slice or Slice(0, N_BUCKETS)
        self.seed = xxhash.xxh3_64_intdigest(name.encode("utf-8"))
        spec = SlotSpec(EMBEDDING, dtype_name(dtype), checked_shape(embedding_shape))
        self.initializer = as_initializer(initializer, dtype, spec.shape)
        self._store = RowStore(checked_device(name, device))
        self._store.add_column(spec)
        self._add_anchor(dtype, self.device)
        self._begin_tracking(track)
        self._begin_evicting(evict, evict_every, budget_ms)
        self._gradients = Gradients()
        self._admission = admission_of(admit, self._made_candidates)

    @classmethod
    def from_embedding(cls, module: Embedding, *, name: str, ids: Tensor | None = None, **options: Any) -> Self:
        """Return a table with the rows of an ``nn.Embedding`` or ``nn.EmbeddingBag``, which trains on as that would.

        ``padding_idx`` becomes ``padding_id``, whose row is not trained, and left out of bags. A frozen weight gives a
        frozen table. A sharded table takes the rows that its rank owns.

        Args:
            module: its weight is copied.
            name: name in checkpoints.
            ids: int64, one for each row; None for 0 to n - 1.
            options: further arguments of the table.

        Raises:
            TypeError, ValueError: no such module; one that has an option, hooks, parametrizations or a ``forward`` that
                tables do not have; or ids that do not fit.
        """
        rows = torch_rows(module, name, ids)
        table = cls(rows.weight.shape[1], name=name, **{**rows.options, **options})
        table.insert(*rows.within(table.slice, table.device))
        table.padding_id, table.requires_grad = rows.padding_id, rows.requires_grad
        return table

    @property
    def nbytes(self) -> int:
        """Bytes that the table holds: index, ids and slots, room for growth included."""
        return self._store.nbytes

    def __len__(self) -> int:
        return len(self._store)

    def __bool__(self) -> bool:
        return True  # an empty table is still a table

    @opaque
    def forward(self, ids: Tensor, *, admit: bool | None = None) -> Tensor:
        """Return the embeddings of ``ids``.

        In training mode unseen ids are inserted with the initializer, if they are admitted; those that are not read the
        same values. In eval mode nothing is inserted and an unseen id reads the initializer's constant, or zeros where
        the initializer is random.

        Args:
            ids: int64 or int32, any shape.
            admit: False inserts nothing, and counts nothing, in training mode too; an unseen id reads as in eval mode.
                True inserts and counts in training mode in a frozen table too. None for True unless it is frozen.

        Returns:
            Tensor of shape ``ids.shape + embedding_shape``, differentiable unless the table is frozen; the gradients of
            an id that occurs several times add up.

        Raises:
            ValueError: an unseen id lies outside the slice of this table, or there are more ids than its capacity.
        """
        flat, inserts = asked_ids(ids), self.inserts(admit)
        if inserts:
            self.evict_due()
        if torch.is_grad_enabled() and self.dtype.is_floating_point:
            owned = flat.copy()  # the caller may reuse the memory of its ids before the backward pass
            fetch = partial(self.fetch, owned, admit=inserts)
            out = lookup_with_grad(self.anchor, fetch, self.add_gradients, owned)
        else:
            out = self.fetch(flat, admit=inserts).rows
        return out.view(*ids.shape, *out.shape[1:])

    def fetch(self, ids: Int64s, occurrences: Int64s | None = None, *, admit: bool) -> Fetched:
        """Return the embeddings of ``ids`` as :meth:`forward` does, but not differentiable, and which have rows.

        Without ``occurrences`` each of the ids counts for one.
        """
        if not self.training:
            return Fetched(self._store.look_up(ids, self.read), None)
        if not admit:
            return Fetched(*self._store.look_up(ids, lambda some, at: (self.read(some, at), np.flatnonzero(at >= 0))))
        if is_in_backward() and (again := fetched_again(self, ids)) is not None:
            return again
        given = np.ones(len(ids), np.int64) if occurrences is None and (self.track or self._admission) else occurrences
        if self._admission is not None and given is not None:
            return self._admission.fetch(self, ids, given)
        return Fetched(self.fetch_all(ids, given), None)

    def fetch_all(self, ids: Int64s, occurrences: Int64s | None) -> Tensor:
        """Return the embeddings of ``ids``, which all get rows, counted and dated if that is tracked."""
        self._check_batch(ids)
        if self.track and occurrences is not None:
            with self._store.lock:  # an event time may come meanwhile
                return self._store.visit(ids, self._visit(occurrences), self.read, self.first_embeddings)
        return self._store.look_up_or_add(ids, self.read, self.first_embeddings)

    @opaque
    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        """Set the rows of ``ids``, adding those that are new; the last of equal ids wins.

        Args:
            ids: int64, shape (n,).
            embeddings: shape (n, *embedding_shape), the table's dtype.
            slots: slot name -> (n, *slot_shape). Slots that are not named keep their values, and start at
                their initial value in new rows.

        Raises:
            ValueError: a shape, dtype or slot name does not fit; an id lies outside the slice. Nothing has
                been changed then.
        """
        flat = flat_ids(ids)
        values = {EMBEDDING: embeddings, **(slots or {})}
        for name, tensor in values.items():
            check_values(self.name, self._spec_of(name), tensor, len(flat))
        check_owned(self.name, self.slice, flat)
        self._date_new_rows()
        self._note_inserted(flat)
        with self._store.lock:
            self._store.insert(flat, values)
            self._forget_counts(flat)

    @opaque
    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (embeddings, found) without inserting; unseen ids read as in eval mode.

        Returns:
            Embeddings of shape ``ids.shape + embedding_shape``, and a bool mask of ``ids.shape``.
        """
        values, seen = self._store.look_up(
            flat_ids(ids), lambda columns, rows: (self.read(columns, rows), torch.from_numpy(rows >= 0))
        )
        return values.view(*ids.shape, *values.shape[1:]), seen.to(ids.device).view(ids.shape)

    @opaque
    def erase(self, ids: Tensor) -> int:
        """Drop the rows of ``ids``, ignoring those that are absent, and return how many were dropped.

        Gradients that wait for the optimizer go with them.
        What was counted of ids that wait for a row is dropped too, where it is counted by id.
        """
        flat = flat_ids(ids)
        with self._store.lock:
            self._forget_counts(flat)
            return self._erase(flat)

    @opaque
    def clear(self) -> None:
        """Drop all rows and pending gradients."""
        self._store.clear()
        self._gradients.clear()

    @opaque
    def reserve(self, n_rows: int) -> None:
        """Make room for ``n_rows`` rows in all, 0 or more, so that inserting them allocates nothing."""
        self._store.reserve(checked_count(self.name, n_rows))

    @opaque
    def ids(self) -> Tensor:
        """Return a copy of the ids, int64, shape (rows,), on the CPU."""
        with self._store.lock:
            return self._store.ids.to_tensor(len(self))

    @opaque
    def embeddings(self) -> Tensor:
        """Return a copy of the embeddings, shape (rows, *embedding_shape), in the order of :meth:`ids`."""
        with self._store.lock:
            return self._store.columns[EMBEDDING].to_tensor(len(self))

    def first_embeddings(self, new_ids: Int64s) -> Tensor:
        """Return what different new ids start with, shape (n, *embedding_shape)."""
        check_owned(self.name, self.slice, new_ids)
        return self.initializer.values(new_ids, self.seed, self._spec)

    def read(self, columns: Mapping[str, Column], rows: Int64s) -> Tensor:
        """Return a copy of the embeddings of ``rows``; row -1 reads as an unseen id."""
        return columns[EMBEDDING].gather_or(rows, self.initializer.unseen)

    def _made_candidates(self, n_values: int, dtype: torch.dtype, name: str) -> HashTable:
        """Return an empty table for counts of ids that have no row, in this slice and on the CPU."""
        return HashTable(n_values, name=f"{self.name}.{name}", dtype=dtype, device="cpu", slice=self.slice)

    def _copy_rows_of(self, other: types.SavableTable) -> None:
        """Become a copy of ``other``; where it does not fit, raise ValueError before anything changes."""
        with other.store.lock if isinstance(other, HashTable) else nullcontext():  # rows of one moment
            ids, embeddings, slots = other.ids(), other.embeddings(), dict(other.slots)
        check_owned(self.name, self.slice, flat_ids(ids))
        check_values(self.name, self._spec, embeddings, len(ids))
        specs, store = self._specs_of(slots, len(ids)), self._store.emptied()
        for spec in specs:
            if spec.name not in store.columns:
                store.add_column(spec)
        store.insert(flat_ids(ids), {EMBEDDING: embeddings, **slots})
        self._store.adopt(store)
        self.evicted_to = other.evicted_to if isinstance(other, HashTable) else None
        self.note_clock(getattr(other, "clock_dates", None))


average_tables_too()
