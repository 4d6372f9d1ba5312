"""A table as a map from ids to rows: methods that read and change rows without training them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt import types
from recckpt.format.buckets import Slice
from recckpt.sparse.table.admission import Admission
from recckpt.sparse.table.checks import (
    check_owned,
    check_slot_name,
    check_values,
    checked_initial,
    checked_shape,
    dtype_name,
    flat_ids,
    opaque,
)
from recckpt.sparse.table.eviction import (
    TRACKED,
    Eviction,
    Now,
    TableTime,
    Tracking,
    checked_event_time,
)
from recckpt.sparse.table.initializers import InitializerLike, default_initializer
from recckpt.sparse.table.nn_module import (
    TableModule,
    check_copy,
    embedding_reader,
    erase_rows,
    padding_row,
)
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.rows import last_occurrence
from recckpt.types import EMBEDDING, SlotSpec

if TYPE_CHECKING:
    from typing_extensions import Self

Int64s = npt.NDArray[np.int64]


class Slots(Mapping[str, Tensor]):
    def __init__(self, store: RowStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> Tensor:
        with self._store.lock:
            return self._store.further_columns[name].to_tensor(len(self._store))

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.further_columns)

    def __len__(self) -> int:
        return len(self._store.further_columns)


class RowTable(TableModule):
    """A table whose rows are read and changed by id.

    Attributes:
        tracking: writes counts and times of training look-ups to slots of the rows.
        eviction: evicts rows during training.
        admission: decides when an id gets a row; None if all ids get rows immediately.
        companions: tables derived from this table, such as averages; state dicts and checkpoints include them.
    """

    admission: Admission | None = None
    _is_showing = False  # True while the table shows the rows of its average

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
        tracked = [track] if isinstance(track, str) else list(track)
        if not TRACKED.keys() >= {*tracked} or len({*tracked}) < len(tracked):
            raise ValueError(f"table {name!r}: found track={track!r}, expected some of {tuple(TRACKED)}, each once")
        self.tracking = Tracking(tuple(each for each in TRACKED if each in tracked), self.time)
        for track_name in self.track:
            self.store.add_column(TRACKED[track_name])
        self.tracking.date_new_rows(self.store)
        self.eviction = Eviction(self.time)
        self.companions: list[TableModule] = []

    @property
    def nbytes(self) -> int:
        """Bytes that the index, ids and slots take, including room for growth."""
        return self.store.rows.nbytes

    def __len__(self) -> int:
        return len(self.store)

    def __bool__(self) -> bool:
        return True  # an empty table is still a table

    @property
    def track(self) -> tuple[str, ...]:
        """Which of ``"count"``, ``"step"`` and ``"time"`` training look-ups write to scalar slots of the rows."""
        return self.tracking.names

    @property
    def step(self) -> int:
        """The number of steps that training has made; set by :class:`recckpt.CheckpointManager`, or by you."""
        return self.time.step or 0

    @step.setter
    def step(self, step: int) -> None:
        if not isinstance(step, int | np.integer) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            raise ValueError(f"table {self.name!r}: step must be an int of at least 0, found {step!r}")
        self.time.reach(int(step))
        self.tracking.date_new_rows(self.store)

    @property
    def event_time(self) -> float | None:
        """The current event time in seconds since 1970, as last given to the manager; None to use the clock.

        When an event time is first set, rows that the clock has dated get this time.
        """
        return self.time.event_time

    @event_time.setter
    def event_time(self, event_time: float | None) -> None:
        self.tracking.set_event_time(self.store, checked_event_time(self.name, event_time))

    @property
    def now(self) -> Now:
        """The step and the time that a look-up would write to its rows now."""
        return self.time.now

    @opaque
    def insert(self, ids: Tensor, embeddings: Tensor, slots: Mapping[str, Tensor] | None = None) -> None:
        """Set the rows of ``ids``, adding new ids; the last of equal ids wins.

        Args:
            ids: int64, shape (n,).
            embeddings: shape (n, *embedding_shape), the table's dtype.
            slots: slot name -> values of shape (n, *slot_shape). Slots that are not listed keep their values, and get
                their initial value in new rows.

        Raises:
            ValueError: a shape, dtype or slot name does not fit, or an id is outside the slice. Nothing has been
                changed.
        """
        self._refuse_shown("insert()")
        flat = flat_ids(ids)
        values = {EMBEDDING: embeddings, **(slots or {})}
        for name, tensor in values.items():
            check_values(self.name, self._spec_of(name), tensor, len(flat))
        check_owned(self.name, self.slice, flat)
        self.tracking.date_new_rows(self.store)
        if self.followers:
            new = flat[self.store.find(flat) < 0]
            for reference in self.followers:
                if (follower := reference()) is not None:
                    follower.note_inserted(new)
        with self.store.lock:
            self.store.insert(flat, values)
            if self.admission is not None:
                self.admission.forget(flat)

    @opaque
    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (embeddings, found) without inserting; unseen ids give the same values as in eval mode.

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
        """Drop the rows of ``ids``, ignoring absent ids, and return how many rows were dropped.

        Also drops the gradients of these ids that wait for the optimizer, and exact counts of ids that wait for a row.
        """
        self._refuse_shown("erase()")
        flat = flat_ids(ids)
        with self.store.lock:
            if self.admission is not None:
                self.admission.forget(flat)
            return erase_rows(self, flat)

    @opaque
    def clear(self) -> None:
        """Drop all rows and pending gradients."""
        self._refuse_shown("clear()")
        self.store.clear()
        self.pending_gradients.clear()

    @opaque
    def reserve(self, n_rows: int) -> None:
        """Reserve room for ``n_rows`` rows in total, so that inserting up to that many allocates no memory."""
        if not isinstance(n_rows, int | np.integer) or isinstance(n_rows, bool) or n_rows < 0:
            raise ValueError(f"table {self.name!r}: n_rows must be an int of at least 0, found {n_rows!r}")
        self.store.reserve(int(n_rows))

    @opaque
    def ids(self) -> Tensor:
        """Return a copy of the ids, int64, shape (rows,), on the CPU."""
        with self.store.lock:
            return self.store.ids.to_tensor(len(self))

    @opaque
    def embeddings(self) -> Tensor:
        """Return a copy of the embeddings, shape (rows, *embedding_shape), in the order of :meth:`ids`."""
        with self.store.lock:
            return self.store.embeddings()

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """The slots except the embedding, by name; reading a slot copies its rows, in the order of :meth:`ids`."""
        return Slots(self.store)

    @opaque
    def add_slot(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        initial: float | None = None,
    ) -> None:
        """Add a slot whose rows start at ``initial``; adding the same slot again keeps its rows.

        Args:
            name: name in checkpoints, such as ``sparse_adamw_exp_avg``.
            shape: shape of one row; ``()`` is a scalar slot.
            dtype: any dtype that a table may have.
            initial: the value of a new slot in all rows, and in rows added later; None for 0, or for the value that an
                earlier call gave.

        Raises:
            ValueError: the name is reserved, ``initial`` does not fit the dtype, the slot exists with another shape or
                dtype, or the table is an average.
        """
        self._refuse_untrained(f"cannot have a slot {name!r}")
        check_slot_name(self.name, name)
        spec = SlotSpec(name, dtype_name(dtype), checked_shape(shape, scalar=True))
        value = None if initial is None else checked_initial(self.name, spec, initial)
        with self.store.lock:
            self._check_spec(spec)
            if name not in self.store.columns:
                self.store.add_column(spec, value or 0.0)
            elif value is not None:
                self.store.rows.initial[name] = value

    @opaque
    def set_slot(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Set one slot of existing rows; the last of equal ids wins.

        Args:
            name: the slot; ``"embedding"`` for the embeddings.
            ids: int64, shape (n,); in a sharded table, ids that this rank holds.
            values: shape (n, *slot_shape), the slot's dtype.

        Raises:
            ValueError: a shape, dtype or name does not fit, or an id has no row. Nothing has been changed.
        """
        self._refuse_shown("set_slot()")
        flat = flat_ids(ids)
        check_values(self.name, self._spec_of(name), values, len(flat))
        with self.store.lock:
            rows = self.store.find(flat)
            absent = flat[rows < 0]
            if len(absent):
                what = f"{len(absent)} of {len(flat)} ids have no row, the first is {absent[0]}"
                raise ValueError(f"table {self.name!r}, {name!r}: {what}: insert(ids, embeddings, slots) adds rows")
            last, values = last_occurrence(rows), values.detach()
            if last is not None:
                rows, values = rows[last], values[torch.from_numpy(last).to(values.device)]
            self.store.write(rows, {name: values.to(self.device)})

    @opaque
    def resize(self, dim: int) -> None:
        """Change the last dimension of embeddings, and of slots of the same shape; keep other slots, such as counters.

        Longer rows are cut. New columns get the initializer's values for the new width in embeddings, and the initial
        value in slots. A default initializer becomes the default of the new width. Waiting gradients are dropped, the
        next delta holds all rows, and memory holds two copies of the table during the call. Optimizers continue; layers
        of the model that depend on the width must be changed too. Not collective: call this on all ranks of a sharded
        table.

        Args:
            dim: the new last dimension.

        Raises:
            ValueError: ``dim`` is not an int of at least 1, a row would be too long, or the table is an average.
                Nothing has been changed.
        """
        with self.store.lock:
            self._refuse_untrained("cannot be resized")
            before, initializer = self.embedding_shape, self.initializer
            shape = checked_shape((*before[:-1], dim))
            if shape == before:
                return
            if initializer == default_initializer(self.dtype, before):
                initializer = default_initializer(self.dtype, shape)
            self.store.adopt(self.store.resized(shape[-1], lambda ids, spec: initializer.values(ids, self.seed, spec)))
            self.pending_gradients.clear()
            self.initializer = initializer

    @contextmanager
    def _showing(self, store: RowStore) -> Iterator[None]:
        """Inside ``with``, read, save and copy the rows of another store instead of the table's own; copies no row."""
        own = {name: getattr(self, name) for name in ("store", "trained_by", "tracking")}
        self.store, self.trained_by, self.tracking = store, object(), Tracking((), self.time)
        self.is_trained, self._is_showing = False, True
        try:
            yield
        finally:
            del self.is_trained, self._is_showing  # the class attributes apply again
            for name, value in own.items():
                setattr(self, name, value)

    def _refuse_shown(self, what: str) -> None:
        """Raise RuntimeError if the table currently shows the rows of its average."""
        if self._is_showing:
            raise RuntimeError(
                f"table {self.name!r}: found {what} inside RowAverage.swap(), where the table shows its average: "
                "change rows before or after the swap"
            )

    def _refuse_untrained(self, what: str) -> None:
        if not self.is_trained:
            raise ValueError(
                f"table {self.name!r} is an average, or holds counts, and {what}: do that to the table whose rows it "
                "averages or counts"
            )

    def _check_spec(self, spec: SlotSpec) -> None:
        present = self.store.columns.get(spec.name)
        if present is not None and present.spec != spec:
            raise ValueError(
                f"table {self.name!r} has slot {spec.name!r} of {present.spec.dtype} {present.spec.shape}, "
                f"which cannot also be {spec.dtype} {spec.shape}; use another slot name"
            )

    def _spec_of(self, name: str) -> SlotSpec:
        column = self.store.columns.get(name)
        if column is None:
            known = sorted(self.slots)
            raise ValueError(f"table {self.name!r} has no slot {name!r}, only {known}: declare it with add_slot")
        return column.spec

    def _own_tables(self) -> list[TableModule]:
        candidates = None if self.admission is None else self.admission.candidates
        return [self, *([] if candidates is None else [candidates.table]), *self.companions]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.admission is not None:
            self.admission.forget_present(self.store)

    def _copy_rows_of(self, other: types.SavableTable) -> None:
        self._refuse_shown("load_state_dict()")
        with other.store.lock if isinstance(other, RowTable) else nullcontext():  # so that all rows are of one time
            ids, embeddings, slots = other.ids(), other.embeddings(), dict(other.slots)
        check_owned(self.name, self.slice, flat_ids(ids))
        check_values(self.name, self.spec, embeddings, len(ids))
        store = self.store.emptied()
        for name, tensor in slots.items():
            check_slot_name(self.name, name)
            spec = SlotSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape[1:]))
            self._check_spec(spec)
            check_values(self.name, spec, tensor, len(ids))
            if name not in store.columns:
                store.add_column(spec)
        store.insert(flat_ids(ids), {EMBEDDING: embeddings, **slots})
        self.store.adopt(store)
        if isinstance(other, RowTable):
            self.eviction.set_evicted_to(self.store, other.eviction.evicted_to(other.store))
            self.tracking.note_clock(self.store, other.tracking.clock_dates)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        check_copy(self, memo)
        twin = super().__deepcopy__(memo)
        twin.__dict__.pop("_is_showing", None)
        twin.followers.clear()  # followers belong to the original table
        return twin
