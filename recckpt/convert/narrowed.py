"""Vectors in fewer bits, and the largest error that this makes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from recckpt.convert.source import Array, Int64s
from recckpt.errors import ConversionError
from recckpt.format.dtypes import widened
from recckpt.types import SlotSpec

DTYPES = ("float16", "bfloat16", "int8")
SCALE = "_scale"  # part of the format: after the name of a slot in int8: the slot of the factors of its rows
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
Floats = npt.NDArray[np.floating[npt.NBitBase]]


def narrowed_slots(slot: SlotSpec, dtype: str) -> tuple[SlotSpec, ...]:
    """Return what a slot becomes: of int8 a scale a row beside it; a slot that is not of floats stays as it is."""
    if slot.dtype not in _FLOATS:
        return (slot,)
    narrow = SlotSpec(slot.name, dtype, slot.shape)
    return (narrow, SlotSpec(slot.name + SCALE, "float32", ())) if dtype == "int8" else (narrow,)


def narrowed(values: Array, ids: Int64s, slot: SlotSpec, dtype: str, path: str) -> tuple[list[Array], float]:
    """Return the columns of :func:`narrowed_slots` for some rows, and how far the worst finite value is off.

    Raises:
        ConversionError: a value is beyond the range of the dtype; of int8 also where it is not finite.
    """
    if slot.dtype not in _FLOATS:
        return [values], 0.0
    exact = widened(values) if slot.dtype == "bfloat16" else values
    exact = exact.astype(np.float64 if slot.dtype == "float64" else np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        columns, back = _int8(exact) if dtype == "int8" else _float(exact, dtype)
        is_finite = np.isfinite(exact)
        lost = ~np.isfinite(back) if dtype == "int8" else is_finite & ~np.isfinite(back)
        if lost.any():
            row = int(np.argwhere(lost)[0][0])
            lost_values = exact[row][lost[row]]
            found, expected = f"{lost_values[np.argmax(np.abs(lost_values))]} in id {ids[row]}", f"what {dtype} holds"
            raise ConversionError(path, f"slot {slot.name!r}", found=found, expected=expected, remedy="keep the dtype")
        off = np.abs(back.astype(np.float64) - exact)[is_finite]
    return columns, float(off.max(initial=0.0))


def _float(exact: Array, dtype: str) -> tuple[list[Array], Array]:
    if dtype == "float16":
        narrow = exact.astype(np.float16)
        return [narrow], narrow
    bits = np.ascontiguousarray(exact, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # a NaN stays one
    patterns = np.where(np.isnan(exact), quiet, rounded).astype(np.uint16)
    return [patterns], widened(patterns)


def _int8(exact: Array) -> tuple[list[Array], Array]:
    flat = exact.reshape(len(exact), -1)
    scales = (np.abs(flat).max(axis=1, initial=0.0) / 127).astype(np.float32)
    divisors = np.where(scales > 0, scales, 1).astype(np.float32)
    steps = np.clip(np.rint(flat / divisors[:, None]), -127, 127).astype(np.int8)
    back = steps.astype(np.float64) * scales[:, None].astype(np.float64)
    return [steps.reshape(exact.shape), scales], back.reshape(exact.shape)
