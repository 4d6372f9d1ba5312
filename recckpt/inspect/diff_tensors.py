"""Compares dense tensors of two checkpoints, a slab of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from recckpt.dense.tensors import DenseTensors, Read, StoredTensor
from recckpt.format.tensor_index import NUMPY_DTYPES, widened
from recckpt.inspect.diff_result import Status, TensorDiff

_SLAB_BYTES = 4 << 20  # bytes to read at once; more if a single row of a tensor is larger

Array = npt.NDArray[Any]


class Comparable(NamedTuple):
    """A tensor of one side. ``read(begin, end)`` returns rows as numbers; as bits for dtypes that numpy lacks."""

    of: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, int], Array]

    @property
    def kind(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


def comparable(dense: DenseTensors) -> list[Comparable]:
    return [
        Comparable(one.of, one.name, one.dtype, one.shape, partial(_numbers, dense, one))
        for one in dense.tensors.values()
    ]


def compare_tensors(
    before: Iterable[Comparable], after: Iterable[Comparable], tolerance: float, advance: Callable[[int], object]
) -> Iterator[TensorDiff]:
    old, new = ({(each.of, each.name): each for each in side} for side in (before, after))
    for key in {**old, **new}:
        one, other = old.get(key), new.get(key)
        if one is None or other is None:
            kinds = None if one is None else one.kind, None if other is None else other.kind
            yield TensorDiff(key[1], key[0], "added" if one is None else "gone", *kinds)
        elif one.shape != other.shape:
            yield TensorDiff(key[1], key[0], "changed", one.kind, other.kind)
        else:
            yield _compared(one, other, tolerance)
        advance(sum(side.nbytes for side in (one, other) if side is not None))


def _compared(one: Comparable, other: Comparable, tolerance: float) -> TensorDiff:
    moved = size = 0.0  # sums of squares
    largest = 0.0
    at: tuple[int, ...] | None = None  # index of the largest difference
    n_rows = one.shape[0] if one.shape else 1
    step_rows = max(1, _SLAB_BYTES * n_rows // max(1, one.nbytes))
    for begin in range(0, n_rows if math.prod(one.shape) else 0, step_rows):
        end = min(begin + step_rows, n_rows)
        values, others = one.read(begin, end), other.read(begin, end)
        with np.errstate(all="ignore"):
            same, step = _steps(values, others)
            stays = same & ~np.isfinite(values)  # such as -inf in a mask, next to which all else would be nothing
            size += float(np.square(np.abs(np.where(stays, 0, _wide(values)))).sum())
            moved += float(np.square(step).sum())
        if same.all():
            continue
        place = int(np.where(np.isnan(step), np.inf, step).argmax())
        farthest = float(step.reshape(-1)[place])
        if at is None or not (math.isnan(largest) or farthest <= largest):
            largest = farthest
            where = [int(index) for index in np.unravel_index(place, values.shape or (1,))]
            at = (where[0] + begin, *where[1:]) if one.shape else ()
    is_near = largest <= tolerance if tolerance > 0 and _is_number(one.dtype) else at is None
    status: Status = "same" if is_near and one.dtype == other.dtype else "changed"
    known = (one.name, one.of, status, one.kind, other.kind)
    if at is None:
        return TensorDiff(*known, 0.0, 0.0)
    if not (_is_number(one.dtype) and _is_number(other.dtype)):
        return TensorDiff(*known)
    return TensorDiff(*known, math.sqrt(moved) / math.sqrt(size) if size else math.inf, largest, at)


def _steps(before: Array, after: Array) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Return a mask of equal values (NaN equals NaN), and each value's difference."""
    same = np.asarray(before == after)
    if before.dtype.kind in "fc" and after.dtype.kind in "fc":
        same = same | (np.isnan(before) & np.isnan(after))
    if before.dtype == after.dtype and before.dtype.kind in "iu":  # float64 could not tell close int64 values apart
        unsigned = f"u{before.dtype.itemsize}"
        step = np.maximum(before, after).view(unsigned) - np.minimum(before, after).view(unsigned)
        return same, np.asarray(step, np.float64)
    return same, np.where(same, 0.0, np.abs(_wide(after) - _wide(before)))


def _wide(values: Array) -> Array:
    wide: Array = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
    return wide


def _is_number(dtype: str) -> bool:
    return dtype == "bfloat16" or NUMPY_DTYPES[dtype].name == dtype


def _numbers(dense: DenseTensors, tensor: StoredTensor, begin: int, end: int) -> Array:
    """Read rows of a tensor as numbers; as bits if numpy lacks the dtype, bfloat16 excepted."""
    if not tensor.shape:
        values = dense.read(tensor)  # a scalar counts as one row
    else:
        reads = []
        for number, (_, chunk) in enumerate(tensor.chunks):
            first, last = max(begin, chunk.offsets[0]), min(end, chunk.offsets[0] + chunk.sizes[0])
            if first < last:
                at = (first - chunk.offsets[0], *(0 for _ in chunk.sizes[1:]))
                to = (first - begin, *chunk.offsets[1:])
                reads.append(Read(number, at, to, (last - first, *chunk.sizes[1:])))
        values = np.asarray(dense.read_box(tensor, (end - begin, *tensor.shape[1:]), reads))
    return widened(values) if tensor.dtype == "bfloat16" else values
