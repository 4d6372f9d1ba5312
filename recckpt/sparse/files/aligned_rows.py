"""Rows in the order in which they are asked for, of all links of a chain (no torch here)."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from operator import index
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.format.dtypes import widened
from recckpt.sparse.files.once import Int64s, newest
from recckpt.sparse.files.row_index import RowIndex
from recckpt.types import SlotSpec


class AlignedRows(NamedTuple):
    """One row for each id that was asked for.

    Attributes:
        values: shape (ids, *slot_shape).
        found: shape (ids,): which ids the table has.
    """

    values: npt.NDArray[Any]
    found: npt.NDArray[np.bool_]


def aligned_rows(links: Iterable[RowIndex], table: str, ids: Int64s, slot: SlotSpec, default: Any) -> AlignedRows:
    """Return a slot of the rows of ids, in their order; asks a link only for ids that no newer one knows.

    Raises:
        ValueError: ``default`` is not a value or a row of the slot.
        CorruptCheckpointError: a file is damaged, or an id is twice in a link.
        CheckpointRemovedError: its writer removed it, and the storage has no maps.
    """
    is_bfloat16 = slot.dtype == "bfloat16"
    values = _filled(table, slot, default, len(ids), np.dtype("float32" if is_bfloat16 else slot.dtype))
    found = np.zeros(len(ids), np.bool_)
    for link, here, rows in newest(links, ids):
        read = link.values(rows, slot)
        values[here] = widened(read) if is_bfloat16 else read
        found[here] = True
    return AlignedRows(values, found)


def as_ids(ids: Any) -> Int64s:
    """Return ids as an array; refuses floats and strings, which numpy would convert, and True, which is a 1 to Python.

    Raises:
        TypeError: they are not int64 numbers in one dimension.
    """
    if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1:
        return ids
    try:
        numbers = ids if isinstance(ids, list) else list(ids)
        if bool in set(map(type, numbers)) or str(getattr(ids, "dtype", "")) in ("bool", "torch.bool"):
            raise TypeError("True and False are no ids")
        return np.fromiter(map(index, numbers), np.int64, len(numbers))
    except (TypeError, OverflowError) as error:
        raise TypeError(f"ids must be a sequence of int64 numbers, found {reprlib.repr(ids)}: {error}") from error


def _filled(table: str, slot: SlotSpec, default: Any, n_rows: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        row = np.asarray(default)
        if row.dtype.kind not in "iuf" or (dtype.kind in "iu" and not _is_whole(row, dtype)):
            raise ValueError(f"not of {slot.dtype}")
        with np.errstate(over="ignore"):  # refused below
            converted = row.astype(dtype)
        if dtype.kind == "f" and (np.isinf(converted) & np.isfinite(row)).any():
            raise ValueError(f"beyond {slot.dtype}")
        values: npt.NDArray[Any] = np.broadcast_to(converted, (n_rows, *slot.shape)).copy()
        return values
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"table {table!r}, slot {slot.name!r}: found default={reprlib.repr(default)}, expected a number or a row "
            f"of {slot.dtype} {slot.shape}: {error}"
        ) from error


def _is_whole(row: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return bool((row == np.floor(row)).all() and (row >= limits.min).all() and (row <= limits.max).all())
