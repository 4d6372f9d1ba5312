"""A table as a map from ids to rows: what users read of it and change, training apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt import types
from recckpt.format.buckets import Slice
from recckpt.sparse.average.followed import Averages
from recckpt.sparse.table import slots as slots_of
from recckpt.sparse.table.admission import Admission
from recckpt.sparse.table.checks import check_owned, check_values, checked_count, flat_ids
from recckpt.sparse.table.eviction import Eviction
from recckpt.sparse.table.first_values import embedding_reader
from recckpt.sparse.table.initializers import InitializerLike
from recckpt.sparse.table.nn_module import TableModule, erase_rows
from recckpt.sparse.table.opaque import opaque
from recckpt.sparse.table.padding import padding_row
from recckpt.sparse.table.tracking import Now, TableTime, Tracking, checked_event_time, checked_step, checked_track
from recckpt.types import EMBEDDING, SlotSpec

if TYPE_CHECKING:
    from typing_extensions import Self

Int64s = npt.NDArray[np.int64]


class RowTable(TableModule):
    """A table whose rows are read and changed by id.

    Attributes:
        tracking: what is kept of look-ups in training.
        eviction: what goes as the table is trained, and how far that is done.
        admission: what lets ids wait for their rows; None where all get them.
        averages: those of this table.
    """

    admission: Admission | None = None

    def __init__(
        self,
        embedding_shape: int | Sequence[int],
        *,
        name: str,
        dtype: torch.dtype,
        device: str | torch.device,
        initializer: InitializerLike | None,
        slice: Slice | None,
        track: Sequence[str],
    ) -> None:
        super().__init__(embedding_shape, name=name, dtype=dtype, device=device, initializer=initializer, slice=slice)
        self.time = TableTime()
        self.tracking = Tracking(checked_track(name, track), self.time)
        self.tracking.add_slots(self.store)
        self.eviction = Eviction(self.time)
        self.averages = Averages()

    @property
    def nbytes(self) -> int:
        """Bytes that the table holds: index, ids and slots, room for growth included."""
        return self.store.nbytes

    def __len__(self) -> int:
        return len(self.store)

    def __bool__(self) -> bool:
        return True  # an empty table is still a table

    @property
    def track(self) -> tuple[str, ...]:
        """What training look-ups keep in scalar slots of the rows."""
        return self.tracking.names

    @property
    def step(self) -> int:
        """The steps that training has made so far, as :class:`recckpt.CheckpointManager` says, or who sets this."""
        return self.time.step or 0

    @step.setter
    def step(self, step: int) -> None:
        self.tracking.set_step(self.store, checked_step(self.name, step))

    @property
    def event_time(self) -> float | None:
        """The time that counts as now, in seconds since 1970: that given to the manager last; None for the clock.

        Once it is set, rows that the clock has dated so far are dated with it.
        """
        return self.time.event_time

    @event_time.setter
    def event_time(self, event_time: float | None) -> None:
        self.tracking.set_event_time(self.store, checked_event_time(self.name, event_time))

    @property
    def now(self) -> Now:
        """The step and the time that a look-up of this moment leaves in its rows."""
        return self.time.now

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
        self.tracking.date_new_rows(self.store)
        self.averages.note_inserted(self.store, flat)
        with self.store.lock:
            self.store.insert(flat, values)
            if self.admission is not None:
                self.admission.forget(flat)

    @opaque
    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (embeddings, found) without inserting; unseen ids read as in eval mode.

        Returns:
            Embeddings of shape ``ids.shape + embedding_shape``, and a bool mask of ``ids.shape``.
        """
        read, flat = embedding_reader(self), flat_ids(ids)
        values, seen = self.store.look_up(
            flat, lambda columns, rows: (read(columns, rows), torch.from_numpy(rows >= 0))
        )
        if self.padding_id is not None:
            values[torch.from_numpy(flat == self.padding_id).to(values.device)] = padding_row(self)
        return values.view(*ids.shape, *values.shape[1:]), seen.to(ids.device).view(ids.shape)

    @opaque
    def erase(self, ids: Tensor) -> int:
        """Drop the rows of ``ids``, ignoring those that are absent, and return how many were dropped.

        Gradients that wait for the optimizer go with them.
        What was counted of ids that wait for a row is dropped too, where it is counted by id.
        """
        flat = flat_ids(ids)
        with self.store.lock:
            if self.admission is not None:
                self.admission.forget(flat)
            return erase_rows(self, flat)

    @opaque
    def clear(self) -> None:
        """Drop all rows and pending gradients."""
        self.store.clear()
        self.pending_gradients.clear()

    @opaque
    def reserve(self, n_rows: int) -> None:
        """Make room for ``n_rows`` rows in all, 0 or more, so that inserting them allocates nothing."""
        self.store.reserve(checked_count(self.name, n_rows))

    @opaque
    def ids(self) -> Tensor:
        """Return a copy of the ids, int64, shape (rows,), on the CPU."""
        with self.store.lock:
            return self.store.ids.to_tensor(len(self))

    @opaque
    def embeddings(self) -> Tensor:
        """Return a copy of the embeddings, shape (rows, *embedding_shape), in the order of :meth:`ids`."""
        with self.store.lock:
            return self.store.columns[EMBEDDING].to_tensor(len(self))

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """The slots but for the embedding, by name; reading one copies its rows, in the order of :meth:`ids`."""
        return slots_of.Slots(self.store)

    @opaque
    def add_slot(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        initial: float | None = None,
    ) -> None:
        """Declare a slot whose rows start at ``initial``; declaring the same slot again keeps its rows.

        Args:
            name: name in checkpoints, such as ``sparse_adamw_exp_avg``.
            shape: shape of one row; ``()`` is a scalar slot.
            dtype: any that a table may have.
            initial: what the rows of a new slot, and new rows of any, start at; None for 0, or for what was
                declared before.

        Raises:
            ValueError: the name is taken, ``initial`` is none of the dtype, or the slot exists with another shape or
                dtype.
        """
        slots_of.add_slot(self, name, shape, dtype, initial)

    @opaque
    def set_slot(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Set one slot of rows that are there; the last of equal ids wins.

        Args:
            name: of the slot; ``"embedding"`` for the embeddings.
            ids: int64, shape (n,); of a sharded table those that this rank holds.
            values: shape (n, *slot_shape), the slot's dtype.

        Raises:
            ValueError: a shape, dtype or name does not fit, or an id has no row. Nothing has been changed then.
        """
        flat = flat_ids(ids)
        check_values(self.name, self._spec_of(name), values, len(flat))
        slots_of.set_slot(self, name, flat, values)

    @opaque
    def resize(self, dim: int) -> None:
        """Give embeddings, and the slots of their shape, another last dimension; all other slots stay, as counters do.

        What is too long is cut. New columns of embeddings hold what the initializer gives the ids in the new width,
        those of slots their initial value. Where no initializer was given, that of the new width counts from now on.
        Gradients that wait are forgotten, all rows are in the next delta, and there is a second copy of the table until
        it is done. An optimizer goes on; where the rest of a model has the width, that is to be changed with it. Not
        collective: of a sharded table all ranks do this.

        Args:
            dim: the last dimension.

        Raises:
            ValueError: ``dim`` is not an int of at least 1, or a row would be too long. Nothing has been changed then.
        """
        with self.store.lock:
            self.initializer = slots_of.resize(self, dim)

    def _spec_of(self, name: str) -> SlotSpec:
        column = self.store.columns.get(name)
        if column is None:
            known = sorted(self.slots)
            raise ValueError(f"table {self.name!r} has no slot {name!r}, only {known}: declare it with add_slot")
        return column.spec

    def _own_tables(self) -> list[TableModule]:
        """Return what stands in state dicts: this table, its candidates and its averages."""
        candidates = None if self.admission is None else self.admission.candidates
        return [self, *([] if candidates is None else [candidates.table]), *self.averages.tables]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.admission is not None:
            self.admission.forget_present(self.store)

    def _copy_rows_of(self, other: types.SavableTable) -> None:
        """Become a copy of ``other``; where it does not fit, raise ValueError before anything changes."""
        with other.store.lock if isinstance(other, RowTable) else nullcontext():  # rows of one moment
            ids, embeddings, slots = other.ids(), other.embeddings(), dict(other.slots)
        check_owned(self.name, self.slice, flat_ids(ids))
        check_values(self.name, self.spec, embeddings, len(ids))
        specs, store = slots_of.specs_of(self, slots, len(ids)), self.store.emptied()
        for spec in specs:
            if spec.name not in store.columns:
                store.add_column(spec)
        store.insert(flat_ids(ids), {EMBEDDING: embeddings, **slots})
        self.store.adopt(store)
        if isinstance(other, RowTable):
            self.eviction.set_evicted_to(self.store, other.eviction.evicted_to(other.store))
            self.tracking.note_clock(self.store, other.tracking.clock_dates)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.averages.warn_of_copy(self, memo)
        return super().__deepcopy__(memo)
