"""The slots of a table: declared once, and read as a mapping of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from recckpt.sparse.table.bags import PooledTable
from recckpt.sparse.table.checks import (
    check_slot_name,
    check_values,
    checked_initial,
    checked_shape,
    dtype_name,
    flat_ids,
)
from recckpt.sparse.table.initializers import default_initializer
from recckpt.sparse.table.opaque import opaque
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.widths import resized
from recckpt.types import EMBEDDING, SlotSpec


class Slots(Mapping[str, Tensor]):
    """The slots of a store but for the embedding, by name; reading one copies the live rows."""

    def __init__(self, store: RowStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> Tensor:
        if name == EMBEDDING:
            raise KeyError(name)
        with self._store.lock:
            return self._store.columns[name].to_tensor(len(self._store))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._store.columns if name != EMBEDDING)

    def __len__(self) -> int:
        return len(self._store.columns) - 1


class SlottedTable(PooledTable):
    """A table whose rows have slots beside the embedding: of optimizers, of users, and what the table tracks."""

    seed: int

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """The slots but for the embedding, by name; reading one copies its rows, in the order of :meth:`ids`."""
        return Slots(self._store)

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
        check_slot_name(self.name, name)
        spec = SlotSpec(name, dtype_name(dtype), checked_shape(shape, scalar=True))
        initial = None if initial is None else checked_initial(self.name, spec, initial)
        with self._store.lock:
            self._check_spec(spec)
            if name not in self._store.columns:
                self._store.add_column(spec, initial or 0.0)
            elif initial is not None:
                self._store.set_initial(name, initial)

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
        before = self.embedding_shape
        shape = checked_shape((*before[:-1], dim))
        if shape == before:
            return
        initializer = self.initializer
        if initializer == default_initializer(self.dtype, before):
            initializer = default_initializer(self.dtype, shape)
        with self._store.lock:
            self._store.adopt(
                resized(self._store, shape[-1], lambda ids, spec: initializer.values(ids, self.seed, spec))
            )
            self.initializer = initializer
        self._gradients.clear()

    def _specs_of(self, slots: Mapping[str, Tensor], n_rows: int) -> list[SlotSpec]:
        """Return what slots with so many rows are, or raise ValueError where they cannot be those of this table."""
        specs = []
        for name, tensor in slots.items():
            check_slot_name(self.name, name)
            spec = SlotSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape[1:]))
            self._check_spec(spec)
            check_values(self.name, spec, tensor, n_rows)
            specs.append(spec)
        return specs

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
        with self._store.lock:
            rows = self._store.find(flat)
            absent = flat[rows < 0]
            if len(absent):
                what = f"{len(absent)} of {len(flat)} ids have no row, the first is {absent[0]}"
                raise ValueError(f"table {self.name!r}, {name!r}: {what}: insert(ids, embeddings, slots) adds rows")
            different, from_end = np.unique(rows[::-1], return_index=True)
            last = torch.from_numpy(len(rows) - 1 - from_end).to(values.device)
            self._store.write(different, {name: values.detach()[last].to(self.device)})

    @property
    def keeps_squares(self) -> bool:
        """Whether gradients come with the sums of their squares, one square a rank and look-up."""
        return self._gradients.keeps_squares

    def keep_squares(self) -> None:
        """Keep them from now on, for an optimizer that needs them."""
        self._gradients.keeps_squares = True

    def _spec_of(self, name: str) -> SlotSpec:
        column = self._store.columns.get(name)
        if column is None:
            known = sorted(self.slots)
            raise ValueError(f"table {self.name!r} has no slot {name!r}, only {known}: declare it with add_slot")
        return column.spec

    def _check_spec(self, spec: SlotSpec) -> None:
        """Raise ValueError where the slot exists with another dtype or shape."""
        present = self._store.columns.get(spec.name)
        if present is not None and present.spec != spec:
            raise ValueError(
                f"table {self.name!r} has slot {spec.name!r} of {present.spec.dtype} {present.spec.shape}, "
                f"cannot also be {spec.dtype} {spec.shape}; use another slot name"
            )
