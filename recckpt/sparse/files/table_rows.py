"""What the saver sees of a table, ours or foreign: rows that do not change while it reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.errors import StateMismatchError
from recckpt.sparse.files.bucket_order import Ids
from recckpt.sparse.table.checks import check_slot_name
from recckpt.sparse.table.column import BLOCK_BYTES, Column
from recckpt.sparse.table.table import HashTable
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec, check_table_name
from recckpt.types import HashTable as AnyTable

_ID_SPEC = SlotSpec("id", "int64", ())


class TableSource(Protocol):
    """Rows 0 to ``n_rows - 1`` of one table."""

    @property
    def name(self) -> str:
        """The table."""

    @property
    def n_rows(self) -> int:
        """Number of rows."""

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots, in the order of their columns in the file: ``embedding`` first, the others by name."""

    @property
    def ids(self) -> Ids:
        """The ids of the rows, on the CPU."""

    @property
    def n_kept(self) -> int:
        """Rows that were copied aside because training changed them meanwhile."""

    def read(self, rows: npt.NDArray[Any], targets: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy the bytes of rows, each asked for once, into a target for the ids and one for each slot. Thread-safe."""

    def close(self) -> None:
        """Let go of the rows; nothing may be read any more."""


@dataclass(frozen=True)
class StillTable:
    """A table that nobody changes while it is read."""

    name: str
    n_rows: int
    ids: Column
    columns: dict[str, Column]
    n_kept = 0

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        """The slots, in the order of their columns in the file."""
        return tuple(column.spec for column in self.columns.values())

    def read(self, rows: npt.NDArray[Any], targets: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy rows of all columns."""
        for column, target in zip((self.ids, *self.columns.values()), targets, strict=True):
            column.gather_into(rows, target)

    def close(self) -> None:
        """Do nothing: memory goes with the last reference."""


def source_of(table: AnyTable) -> StillTable:
    """Return the rows of a table as they are now, without copying them, for as long as it does not change.

    Raises:
        StateMismatchError: a foreign table whose ids and slots do not have one row each.
        ValueError: no table, or no slot, can have this name.
    """
    if isinstance(table, HashTable):
        return StillTable(table.name, len(table), table.store.ids, _in_order(table.store.columns))
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
    return StillTable(check_table_name(table.name), n_rows, Column.over(_ID_SPEC, ids), _in_order(columns))


def source_to_save(table: AnyTable, *, detached: bool) -> TableSource:
    """Return the rows of a table as they are now.

    Args:
        table: ours, of which a snapshot is taken, or foreign, whose ids are checked: its own code may break them.
        detached: whether a foreign table may change meanwhile; its rows are copied then.

    Raises:
        StateMismatchError, ValueError: as :func:`source_of`; or an id is there twice.
    """
    if isinstance(table, HashTable):
        return table.store.snapshot(table.name)
    source = source_of(table)
    ids = np.sort(source.ids.to_tensor(source.n_rows).numpy())
    repeats = ids[1:][ids[1:] == ids[:-1]]
    if len(repeats):
        raise StateMismatchError(
            f"table {table.name!r}", mismatched={"id": (f"{repeats[0]} more than once", "every id once")}
        )
    if not detached:
        return source
    columns = {name: _copied(column, source.n_rows) for name, column in source.columns.items()}
    return StillTable(source.name, source.n_rows, _copied(source.ids, source.n_rows), columns)


def _copied(column: Column, n_rows: int) -> Column:
    """Return a copy on the CPU, made in pieces, so that there is never a second whole one on a device."""
    copy = Column(column.spec, torch.device("cpu"))
    copy.reserve(n_rows)
    piece_rows = max(1, BLOCK_BYTES // max(column.spec.row_bytes, 1))
    for begin in range(0, n_rows, piece_rows):
        end = min(n_rows, begin + piece_rows)
        copy.write(begin, column.blocks[0][begin:end].cpu())
    return copy


def _in_order(columns: Mapping[str, Column]) -> dict[str, Column]:
    return {name: columns[name] for name in sorted(columns, key=lambda name: (name != EMBEDDING, name))}


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
