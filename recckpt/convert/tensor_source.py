"""A source that is a bag of named tensors: dense state, but for those that are wished for as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from recckpt.convert.row_checks import ID_REMEDY, int64_ids
from recckpt.convert.source import ImportOptions, SourceContents, SourceRows, SourceTable, SourceTensor
from recckpt.errors import ConversionError
from recckpt.text import nearest
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec

STEP_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorTable:
    """A table made of tensors: the ids, None for 0 to n - 1, and a tensor for each slot."""

    name: str
    ids: SourceTensor | None
    slots: Mapping[str, SourceTensor]


class TensorSource:
    """Reads tables and dense state of named tensors.

    Args:
        contents: what is not rows; :attr:`contents` has the tables too.
        tables: made of tensors.
        path: of the source, for messages.

    Raises:
        ConversionError: the tensors of a table do not belong together.
    """

    def __init__(self, contents: SourceContents, tables: list[TensorTable], path: str) -> None:
        self._path = path
        self._tables = {table.name: table for table in tables}
        listed = tuple(self._listed(table) for table in tables)
        self.contents = replace(contents, tables=(*contents.tables, *listed))

    def rows(self, table: SourceTable) -> Iterator[SourceRows]:
        """Yield the rows of a table in the order of its tensors."""
        made_of = self._tables[table.name]
        step = max(1, STEP_BYTES // table.row_bytes)
        for begin in range(0, table.n_rows, step):
            end = min(begin + step, table.n_rows)
            if made_of.ids is None:
                ids = np.arange(begin, end, dtype=np.int64)
            else:
                ids = int64_ids(made_of.ids.read(begin, end), self._path, f"tensor {made_of.ids.name!r}")
            yield SourceRows(ids, [made_of.slots[slot.name].read(begin, end) for slot in table.slots])

    def close(self) -> None:
        """Do nothing: tensors open files only to read them."""

    def _listed(self, table: TensorTable) -> SourceTable:
        of_ids = [table.ids] if table.ids else []
        n_rows = {tensor.name: tensor.shape[:1] for tensor in (*of_ids, *table.slots.values())}
        if len(set(n_rows.values())) > 1 or () in n_rows.values():
            found = ", ".join(f"{name!r} of {shape}" for name, shape in n_rows.items())
            raise ConversionError(self._path, f"table {table.name!r}", found=found, expected="one row an id in each")
        for tensor in of_ids:
            where = f"tensor {tensor.name!r}"
            if not tensor.dtype.startswith(("int", "uint")):
                found, expected = f"ids of {tensor.dtype}", "integers of int64"
                raise ConversionError(self._path, where, found=found, expected=expected, remedy=ID_REMEDY)
            if len(tensor.shape) != 1:
                found = f"ids of shape {tensor.shape}"
                raise ConversionError(self._path, where, found=found, expected="one dimension")
        slots = tuple(slot_of(name, tensor, self._path) for name, tensor in table.slots.items())
        return SourceTable(table.name, next(iter(n_rows.values()))[0], slots)


def slot_of(name: str, tensor: SourceTensor, path: str) -> SlotSpec:
    """Return the slot that holds a tensor; ConversionError for a dtype or shape that none can have."""
    if tensor.dtype not in ITEM_BYTES or 0 in tensor.shape[1:]:
        found, expected = f"{tensor.dtype} {tensor.shape}", f"values of {', '.join(ITEM_BYTES)}, at least one a row"
        raise ConversionError(path, f"tensor {tensor.name!r}", found=found, expected=expected, remedy="cast it first")
    if ITEM_BYTES[tensor.dtype] * math.prod(tensor.shape[1:]) >= 2**31:
        raise ConversionError(path, f"tensor {tensor.name!r}", found=f"{tensor.shape}", expected="rows below 2 GiB")
    return SlotSpec(name, tensor.dtype, tensor.shape[1:])


def wished_tables(tensors: Mapping[str, SourceTensor], options: ImportOptions, path: str) -> list[TensorTable]:
    """Return the tables that are wished for; ConversionError where a tensor is not there, or has less than two dims."""
    tables = []
    for name, ids in options.as_table.items():
        for pattern in filter(None, (name, ids)):
            if pattern not in tensors:
                close = nearest(pattern, tensors).strip("; ")
                raise ConversionError(path, "", found=f"no tensor {pattern!r}", expected="one of its own", remedy=close)
        if len(tensors[name].shape) < 2:
            found_shape = f"{name!r} of {tensors[name].shape}"
            raise ConversionError(path, "", found=found_shape, expected="a tensor of two dimensions or more")
        tables.append(TensorTable(name, tensors[ids] if ids else None, {EMBEDDING: tensors[name]}))
    return tables


def used(tables: list[TensorTable]) -> set[str]:
    """Return the names of the tensors that tables are made of."""
    of_ids = {table.ids.name for table in tables if table.ids}
    return of_ids | {tensor.name for table in tables for tensor in table.slots.values()}
