"""What the saver sees of a table, ours or foreign: columns of rows and their number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from recckpt.errors import StateMismatchError
from recckpt.sparse.checks import check_slot_name
from recckpt.sparse.column import Column
from recckpt.sparse.store import RowStore
from recckpt.sparse.table import HashTable
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec, check_table_name
from recckpt.types import HashTable as AnyTable


@dataclass(frozen=True)
class TableSource:
    """Rows 0 to ``n_rows - 1`` of one table.

    Attributes:
        name: the table.
        n_rows: number of rows.
        ids: their ids, on the CPU.
        columns: slot name -> values, ``embedding`` first, the others by name.
    """

    name: str
    n_rows: int
    ids: Column
    columns: dict[str, Column]

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots, in the order of their columns in the file."""
        return tuple(column.spec for column in self.columns.values())


def source_of(table: AnyTable) -> TableSource:
    """Return the rows of a table as they are now, without copying them.

    Raises:
        StateMismatchError: a foreign table whose ids and slots do not have one row each.
        ValueError: no table, or no slot, can have this name.
    """
    if isinstance(table, HashTable):
        store: RowStore = table.store
        return TableSource(table.name, len(store), store.ids, _in_order(store.columns))
    ids = table.ids().detach().cpu()
    for name in table.slots:
        check_slot_name(table.name, name)
    tensors = {EMBEDDING: table.embeddings(), **table.slots}
    n_rows = len(ids)
    wrong = {
        name: (f"{tensor.dtype} {tuple(tensor.shape)}", f"a storable dtype and {n_rows} rows")
        for name, tensor in tensors.items()
        if tensor.dim() == 0 or len(tensor) != n_rows or 0 in tensor.shape[1:] or _dtype_name(tensor) not in ITEM_BYTES
    }
    if ids.dtype != torch.int64 or ids.dim() != 1:
        wrong["id"] = (f"{ids.dtype} {tuple(ids.shape)}", "int64 of one dimension")
    if wrong:
        raise StateMismatchError(f"table {table.name!r}", mismatched=wrong)
    columns = {
        name: Column.over(SlotSpec(name, _dtype_name(tensor), tuple(tensor.shape[1:])), tensor)
        for name, tensor in tensors.items()
    }
    id_column = Column.over(SlotSpec("id", "int64", ()), ids)
    return TableSource(check_table_name(table.name), n_rows, id_column, _in_order(columns))


def source_to_save(table: AnyTable) -> TableSource:
    """Return the rows of a table, of which every id is there once: others may break that, our own index cannot.

    Raises:
        StateMismatchError, ValueError: as :func:`source_of`; or an id is there twice.
    """
    source = source_of(table)
    if not isinstance(table, HashTable):
        ids = np.sort(table.ids().detach().cpu().numpy())
        repeats = ids[1:][ids[1:] == ids[:-1]]
        if len(repeats):
            raise StateMismatchError(
                f"table {table.name!r}", mismatched={"id": (f"{repeats[0]} more than once", "every id once")}
            )
    return source


def _in_order(columns: dict[str, Column]) -> dict[str, Column]:
    return {name: columns[name] for name in sorted(columns, key=lambda name: (name != EMBEDDING, name))}


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
