"""Distances between rows, L2 and cosine, computed in float64 where float32 is not exact enough.

Two NaN at the same place are equal. NaN against a number makes the distance NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.format.tensor_index import widened
from recckpt.inspect.spread import Floats
from recckpt.types import SlotSpec

Array = npt.NDArray[Any]
_SAFE = (1e-30, 1e30)  # float32 squares within this range are as exact as float32 is
_ACROSS = 1e-2  # least component of a squared step across its row that float32 represents well
_LEAST = 1e-30  # larger sums of squares are as exact as float32 is
_WITHIN = (1e-240, 1e300)  # sums that float64 cannot represent are clipped to this range


class SlotComparer:
    """Compares rows of one slot, by their bytes first as long as few rows change. Not thread-safe."""

    def __init__(self, before: SlotSpec, after: SlotSpec, tolerance: float) -> None:
        self._before, self._after, self._tolerance = before, after, tolerance
        self._most_changed = False
        # Kept for reuse: the first access to new memory costs more than the work in it.
        self._steps, self._flags = np.empty(0, np.float32), np.empty(0, np.bool_)

    def differing(self, before: Array, after: Array) -> npt.NDArray[np.int64]:
        """Return the indices of rows in which any byte differs; both sides have the same dtype."""
        n_bytes = before.dtype.itemsize
        words = np.dtype(next(f"u{width}" for width in (8, 4, 2, 1) if n_bytes % width == 0))
        n_words = before.nbytes // words.itemsize
        if len(self._flags) < n_words:
            self._flags = np.empty(n_words, np.bool_)
        flags = np.not_equal(before.view(words), after.view(words), out=self._flags[:n_words])
        if n_words // max(1, len(before)) % 8 == 0:
            flags = flags.view(np.uint64)
        rows = np.flatnonzero(flags) // max(1, len(flags) // max(1, len(before)))
        return rows[np.concatenate([[True], rows[1:] != rows[:-1]])] if len(rows) else rows

    def moves(self, before: Array, after: Array) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """Return the indices of rows in which any value changed by more than the tolerance, and their distances.

        Distances are L2 and cosine; the cosine distance is NaN if a side is a single value, all zeros, or not finite.
        """
        n_rows = len(before)
        rows = np.arange(n_rows)
        if not self._most_changed and self._before.dtype == self._after.dtype:
            rows = self.differing(before, after)
            before, after = (before, after) if len(rows) == n_rows else (before[rows], after[rows])
        if not len(rows):
            return rows, np.empty(0), np.empty(0)
        before, after = numbers(before, self._before), numbers(after, self._after)
        if before.dtype.kind not in "f" or after.dtype != before.dtype or before.dtype == np.float64:
            l2, cosine, largest = _exact(before, after)
        else:
            if len(self._steps) < before.size:
                self._steps = np.empty(before.size, np.float32)
            step = self._steps[: before.size].reshape(before.shape)
            l2, cosine, largest = _quick(before, after, step, want_largest=self._tolerance > 0)
        changed = ~(largest <= self._tolerance) if self._tolerance > 0 else ~(l2 == 0)
        if not changed.all():
            rows, l2, cosine = rows[changed], l2[changed], cosine[changed]
        self._most_changed = len(rows) > 0.9 * n_rows
        return rows, l2, cosine


def numbers(rows: Array, slot: SlotSpec) -> Array:
    """Return bytes of rows as numbers, shape (rows, values); as float32 where that is exact."""
    values: Array
    if slot.dtype == "bfloat16":
        values = widened(rows.view(np.uint16))
    elif slot.dtype == "float16":
        values = rows.view(np.float16).astype(np.float32)
    else:
        values = rows.view(slot.dtype)
    return values.reshape(len(rows), -1)


def _quick(before: Array, after: Array, step: Array, *, want_largest: bool) -> tuple[Floats, Floats, Floats]:
    """Return L2, cosine distance and largest difference of float32 rows; uses :func:`_exact` where float32 fails."""
    with np.errstate(all="ignore"):
        np.subtract(after, before, out=step)
        moved, along, size = (
            np.einsum("ij,ij->i", one, other).astype(np.float64)
            for one, other in ((step, step), (step, before), (before, before))
        )
        l2 = np.sqrt(moved)
        # With a and b as lengths: |b - a|^2 and (b - a)a give the cosine also for small steps.
        grown = 2 * along + moved
        size_after = size + grown
        norm, norm_after = np.sqrt(size), np.sqrt(np.maximum(size_after, 0))
        across = moved - np.square(grown / (norm + norm_after))
        cosine = np.clip(across / (2 * norm * norm_after), 0, 2)
        largest = np.abs(step).max(axis=1).astype(np.float64) if want_largest else l2
        least, most = _SAFE
        is_safe = (np.minimum(moved, size) > least) & (np.maximum(moved, size) < most)
        is_safe &= (size_after > 1e-4 * size) & (size_after < most)
        is_along = is_safe & (across <= _ACROSS * moved)
    shrunk, rest = np.flatnonzero(is_along), np.flatnonzero(~is_safe)
    if len(shrunk) and before.shape[1] > 1:
        cosine[shrunk] = _cosine_along(before[shrunk], after[shrunk])
    if len(rest):
        l2[rest], cosine[rest], exact = _exact(before[rest], after[rest])
        largest[rest] = exact if want_largest else l2[rest]
    return l2, (cosine if before.shape[1] > 1 else np.full(len(l2), np.nan)), largest


def _cosine_along(before: Array, after: Array) -> Floats:
    one, other = before.astype(np.float64), after.astype(np.float64)
    size, along, size_after = (np.einsum("ij,ij->i", a, b) for a, b in ((one, one), (one, other), (other, other)))
    across = other - (along / size)[:, None] * one
    norms = np.sqrt(size * size_after)
    small = np.einsum("ij,ij->i", across, across) * size / (norms * (norms + np.maximum(along, 0)))
    distances: Floats = np.where(along > 0, small, 1 - along / norms)
    return distances


def _exact(before: Array, after: Array) -> tuple[Floats, Floats, Floats]:
    """Return L2, cosine distance and largest difference in float64, scaled so that no square over- or underflows."""
    with np.errstate(all="ignore"):
        same = before == after
        if before.dtype.kind == "f" and after.dtype.kind == "f":
            same |= np.isnan(before) & np.isnan(after)
        one, other = before.astype(np.float64), after.astype(np.float64)
        step = np.where(same, 0.0, other - one)
        if before.dtype.kind in "iu" and after.dtype.kind in "iu":  # float64 could not tell close int64 values apart
            low, high = (pick(before, after).astype(np.int64).view(np.uint64) for pick in (np.minimum, np.maximum))
            step = (high - low).astype(np.float64)
        largest = np.abs(step).max(axis=1)
        scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
        l2 = scale * np.sqrt(np.square(step / scale[:, None]).sum(axis=1))
        if before.shape[1] == 1:
            return l2, np.full(len(l2), np.nan), largest
        one, other = (side / np.abs(side).max(axis=1, keepdims=True) for side in (one, other))
        one, other = (side / np.sqrt(np.square(side).sum(axis=1, keepdims=True)) for side in (one, other))
        cosine = np.square(other - one).sum(axis=1) / 2  # ``one`` and ``other`` are unit vectors
    return l2, cosine, largest


def squares(values: Array) -> Array:
    """Return the sum of squares of each row: exactly 0 for all zeros, NaN for rows with a non-finite value.

    ``values`` has the shape (rows, values) and at least one row.
    """
    if values.dtype.kind != "f":
        values = values.astype(np.float64)
    elif values.dtype == np.float16:
        values = values.astype(np.float32)
    with np.errstate(all="ignore"):
        sums: Array = np.einsum("ij,ij->i", values, values)
        if sums.min() > _LEAST and sums.max() < np.inf:
            return sums
        # Rows whose squares over- or underflow although their values are finite and not all zero.
        sums = sums.astype(np.float64)
        rest = np.flatnonzero(~((sums > _LEAST) & (sums < np.inf)))
        exact = values[rest].astype(np.float64)
        of_rest = np.clip(np.square(exact).sum(axis=1), *_WITHIN)
        of_rest[(exact == 0).all(axis=1)] = 0.0
        of_rest[~np.isfinite(exact).all(axis=1)] = np.nan
        sums[rest] = of_rest
    return sums
