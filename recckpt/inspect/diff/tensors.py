"""Dense tensors of two checkpoints, compared a slab at a time (no torch here)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.dense.tensors import DenseTensors, StoredTensor
from recckpt.inspect.diff.result import Status, TensorDiff
from recckpt.inspect.slabs import is_number, numbers_between, slabs_of


def compare_tensors(
    before: DenseTensors, after: DenseTensors, tolerance: float, advance: Callable[[int], object]
) -> Iterator[TensorDiff]:
    """Yield what became of each dense tensor, of the model and of registered objects that are sharded.

    Raises:
        CorruptCheckpointError: bytes are not those that were saved.
    """
    for key in {**before.tensors, **after.tensors}:
        one, other = before.tensors.get(key), after.tensors.get(key)
        if one is None or other is None:
            yield TensorDiff(key[1], key[0], "added" if one is None else "gone", _kind(one), _kind(other))
        elif one.shape != other.shape:
            yield TensorDiff(key[1], key[0], "changed", _kind(one), _kind(other))
        else:
            yield _compared(before, one, after, other, tolerance)
        advance(sum(side.nbytes for side in (one, other) if side is not None))


def _compared(
    before: DenseTensors, one: StoredTensor, after: DenseTensors, other: StoredTensor, tolerance: float
) -> TensorDiff:
    sums = _Sums(one.shape)
    for begin, end in slabs_of(one):
        sums.add(begin, numbers_between(before, one, begin, end), numbers_between(after, other, begin, end))
    is_near = sums.largest <= tolerance if tolerance > 0 and is_number(one.dtype) else not sums.differs
    status: Status = "same" if is_near and one.dtype == other.dtype else "changed"
    known = TensorDiff(one.name, one.of, status, _kind(one), _kind(other), 0.0, 0.0, None)
    if not sums.differs:
        return known
    if not (is_number(one.dtype) and is_number(other.dtype)):
        return replace(known, relative=None, largest=None)
    return replace(known, relative=sums.relative, largest=sums.largest, at=sums.at)


def _kind(tensor: StoredTensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


@dataclass
class _Sums:
    """What is known of the slabs so far."""

    shape: tuple[int, ...]
    moved: float = 0.0
    size: float = 0.0
    largest: float = 0.0
    at: tuple[int, ...] | None = None
    differs: bool = False

    @property
    def relative(self) -> float:
        """Norm of the change over the norm before."""
        return math.sqrt(self.moved) / math.sqrt(self.size) if self.size else math.inf

    def add(self, begin: int, before: npt.NDArray[Any], after: npt.NDArray[Any]) -> None:
        with np.errstate(all="ignore"):
            same, step = _steps(before, after)
            stays = same & ~np.isfinite(before)  # such as the -inf of a mask, beside which all else would be nothing
            self.size += float(np.square(np.abs(np.where(stays, 0, _wide(before)))).sum())
            self.moved += float(np.square(step).sum())
        if same.all():
            return
        self.differs = True
        ranked = np.where(np.isnan(step), np.inf, step).reshape(-1)
        place = int(ranked.argmax())
        largest = float(step.reshape(-1)[place])
        if self.at is None or not (math.isnan(self.largest) or largest <= self.largest):
            self.largest = largest
            inside = np.unravel_index(place, (before.shape or (1,)))
            where = [int(index) for index in inside]
            self.at = (where[0] + begin, *where[1:]) if self.shape else ()


def _steps(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Return which values are the same, two NaN too, and by how much each differs."""
    same = np.asarray(before == after)
    if before.dtype.kind in "fc" and after.dtype.kind in "fc":
        same = same | (np.isnan(before) & np.isnan(after))
    if before.dtype == after.dtype and before.dtype.kind in "iu":  # int64 may be too close for float64
        unsigned = f"u{before.dtype.itemsize}"
        step = np.maximum(before, after).view(unsigned) - np.minimum(before, after).view(unsigned)
        return same, np.asarray(step, np.float64)
    return same, np.where(same, 0.0, np.abs(_wide(after) - _wide(before)))


def _wide(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    wide: npt.NDArray[Any] = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
    return wide
