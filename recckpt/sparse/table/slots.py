"""The slots of a table: declared once, and read as a mapping of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from recckpt.sparse.table.bags import PooledTable
from recckpt.sparse.table.checks import check_slot_name, checked_shape, dtype_name
from recckpt.sparse.table.nn_module import opaque
from recckpt.sparse.table.row_store import RowStore
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
            ValueError: the name is taken, or the slot exists with another shape or dtype.
        """
        check_slot_name(self.name, name)
        spec = SlotSpec(name, dtype_name(dtype), checked_shape(shape, scalar=True))
        with self._store.lock:
            self._check_spec(spec)
            if name not in self._store.columns:
                self._store.add_column(spec, initial or 0.0)
            elif initial is not None:
                self._store.set_initial(name, initial)

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
