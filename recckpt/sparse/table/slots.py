"""The slots of a table: declared once, and read as a mapping of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from recckpt.sparse.table.bags import PooledTable
from recckpt.sparse.table.checks import check_slot_name, checked_initial, checked_shape, dtype_name
from recckpt.sparse.table.initializers import default_initializer
from recckpt.sparse.table.nn_module import opaque
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
