"""The slots of a table: declared once, and read as a mapping of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.sparse.table.checks import check_slot_name, check_values, checked_initial, checked_shape, dtype_name
from recckpt.sparse.table.initializers import Initializer, default_initializer
from recckpt.sparse.table.nn_module import TableModule
from recckpt.sparse.table.row_store import RowStore
from recckpt.sparse.table.widths import resized
from recckpt.types import EMBEDDING, SlotSpec

Int64s = npt.NDArray[np.int64]


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


def add_slot(table: TableModule, name: str, shape: Sequence[int], dtype: torch.dtype, initial: Any) -> None:
    """Declare a slot, or let new rows of one that is there start at another value; None for the value of now."""
    check_slot_name(table.name, name)
    spec = SlotSpec(name, dtype_name(dtype), checked_shape(shape, scalar=True))
    value = None if initial is None else checked_initial(table.name, spec, initial)
    store = table.store
    with store.lock:
        _check_spec(table, spec)
        if name not in store.columns:
            store.add_column(spec, value or 0.0)
        elif value is not None:
            store.set_initial(name, value)


def resize(table: TableModule, dim: int) -> Initializer:
    """Give embeddings, and the slots of their shape, another last dimension; return the initializer of that width."""
    before = table.embedding_shape
    shape = checked_shape((*before[:-1], dim))
    initializer = table.initializer
    if shape == before:
        return initializer
    if initializer == default_initializer(table.dtype, before):
        initializer = default_initializer(table.dtype, shape)
    with table.store.lock:
        twin = resized(table.store, shape[-1], lambda ids, spec: initializer.values(ids, table.seed, spec))
        table.store.adopt(twin)
    table.pending_gradients.clear()
    return initializer


def set_slot(table: TableModule, name: str, ids: Int64s, values: Tensor) -> None:
    """Set one slot of rows that are there to values that fit it; the last of equal ids wins."""
    store = table.store
    with store.lock:
        rows = store.find(ids)
        absent = ids[rows < 0]
        if len(absent):
            what = f"{len(absent)} of {len(ids)} ids have no row, the first is {absent[0]}"
            raise ValueError(f"table {table.name!r}, {name!r}: {what}: insert(ids, embeddings, slots) adds rows")
        different, from_end = np.unique(rows[::-1], return_index=True)
        last = torch.from_numpy(len(rows) - 1 - from_end).to(values.device)
        store.write(different, {name: values.detach()[last].to(table.device)})


def specs_of(table: TableModule, slots: Mapping[str, Tensor], n_rows: int) -> list[SlotSpec]:
    """Return what slots with so many rows are, or raise ValueError where they cannot be those of a table."""
    specs = []
    for name, tensor in slots.items():
        check_slot_name(table.name, name)
        spec = SlotSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape[1:]))
        _check_spec(table, spec)
        check_values(table.name, spec, tensor, n_rows)
        specs.append(spec)
    return specs


def _check_spec(table: TableModule, spec: SlotSpec) -> None:
    """Raise ValueError where the slot exists with another dtype or shape."""
    present = table.store.columns.get(spec.name)
    if present is not None and present.spec != spec:
        raise ValueError(
            f"table {table.name!r} has slot {spec.name!r} of {present.spec.dtype} {present.spec.shape}, "
            f"cannot also be {spec.dtype} {spec.shape}; use another slot name"
        )
