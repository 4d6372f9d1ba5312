"""Ids and values of a source, held against what a table can have, before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np

from recckpt.convert.source import Array, Int64s, SourceRows, SourceTable
from recckpt.errors import ConversionError
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.types import check_table_name

_RESERVED = frozenset({"", "id", "table", "op"})  # part of the format
ID_REMEDY = "nothing was written; ids are int64: hash or number them first"


def check_table(table: SourceTable, source: str) -> None:
    """Refuse a table whose name, or whose slots' names, a checkpoint cannot have."""
    try:
        check_table_name(table.name)
    except ValueError as error:
        raise ConversionError(source, repr(table.name), found=str(error), expected="a table name") from error
    names = [slot.name for slot in table.slots]
    if len(set(names)) < len(names) or _RESERVED & set(names):
        expected = f"different names, none of them {', '.join(sorted(filter(None, _RESERVED)))}"
        raise ConversionError(source, f"table {table.name!r}", found=f"slots {names}", expected=expected)


def int64_ids(values: Array, path: str, where: str) -> Int64s:
    """Return ids as int64; ConversionError for floats, NaN, what is beyond int64, and anything but one dimension."""
    if values.ndim != 1:
        raise ConversionError(path, where, found=f"ids of shape {values.shape}", expected="one dimension")
    if values.dtype.kind not in "iu":
        nan = " with NaN among them" if values.dtype.kind == "f" and np.isnan(values).any() else ""
        found = f"ids of {values.dtype}{nan}"
        raise ConversionError(path, where, found=found, expected="integers of int64", remedy=ID_REMEDY)
    if values.dtype == np.uint64 and len(values) and values.max() > np.iinfo(np.int64).max:
        found = f"the id {values.max()}, beyond int64"
        raise ConversionError(path, where, found=found, expected="at most 2**63 - 1", remedy=ID_REMEDY)
    return np.ascontiguousarray(values, np.int64)


def checked(rows: SourceRows, table: SourceTable) -> SourceRows:
    """Return rows contiguous, held against the slots of their table."""
    for slot, column in zip(table.slots, rows.columns, strict=True):
        expected: tuple[Any, ...] = (NUMPY_DTYPES[slot.dtype], (len(rows.ids), *slot.shape))
        if (column.dtype, column.shape) != expected:
            found = f"{column.dtype} of shape {column.shape}"
            path, where = f"table {table.name!r}", f"slot {slot.name!r}"
            raise ConversionError(path, where, found=found, expected=f"{expected[0]} of shape {expected[1]}")
    return SourceRows(rows.ids, [np.ascontiguousarray(column) for column in rows.columns])
