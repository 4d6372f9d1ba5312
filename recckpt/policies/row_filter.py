"""The option ``where``: which rows of a table to load or save."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from recckpt.format.buckets import is_among, mix64
from recckpt.format.tables import Where
from recckpt.types import is_list

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLE_SALT = np.uint64(0x9E3779B97F4A7C15)  # without it, a sample would be a range of buckets
_MOST = sys.float_info.max
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True)
class RowFilter:
    """Conditions on rows; a row is kept if it meets all of them."""

    minimum: tuple[tuple[str, int | float], ...] = ()  # (scalar slot, least value)
    ids: frozenset[int] | None = None  # None for all
    sample: float = 1.0  # share of all ids; a hash chooses the ids, so they are always the same ones

    @property
    def slots(self) -> frozenset[str]:
        return frozenset(slot for slot, _ in self.minimum)

    def of(self, slots: Collection[str]) -> RowFilter:
        """Return a filter without the conditions on slots that are not in ``slots``."""
        return replace(self, minimum=tuple(condition for condition in self.minimum if condition[0] in slots))

    def keeps(self, ids: npt.NDArray[np.int64], values: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that meet all conditions; ``values`` has :func:`numbers` of all :attr:`slots`."""
        kept = np.ones(len(ids), np.bool_)
        for slot, least in self.minimum:
            kept &= _at_least(values[slot], least)
        if self.ids is not None:
            kept &= is_among(ids, self._ids)
        if self.sample < 1.0:
            kept &= mix64(ids.view(np.uint64) ^ _SAMPLE_SALT) < np.uint64(self.sample * 2**64)
        return kept

    @property
    def record(self) -> Where:
        minimum = dict(sorted(self.minimum))
        if self.ids is None:
            return Where(minimum, self.sample)
        return Where(minimum, self.sample, len(self.ids), xxhash.xxh3_64_intdigest(self._ids.tobytes()))

    @cached_property
    def _ids(self) -> npt.NDArray[np.int64]:
        return np.array(sorted(self.ids or ()), np.int64)


def numbers(values: Tensor) -> npt.NDArray[Any]:
    """Return the values of a scalar slot as float64 or int64, without rounding."""
    exact = values.double() if values.is_floating_point() else values.long()
    column: npt.NDArray[Any] = exact.view(-1).numpy()
    return column


def _at_least(values: npt.NDArray[Any], least: int | float) -> npt.NDArray[np.bool_]:
    """Return ``values >= least`` without rounding, because float64 cannot hold int64 times in nanoseconds."""
    if values.dtype.kind == "f":
        rounded = float(least)
        return np.asarray(values >= (rounded if rounded >= least else math.nextafter(rounded, math.inf)))
    whole = math.ceil(least)
    return np.asarray(values >= max(whole, _INT64.min)) if whole <= _INT64.max else np.zeros(len(values), np.bool_)


def parse_row_filter(value: Any) -> RowFilter:
    """Return the filter of a ``where`` value.

    Raises:
        ValueError: ``value`` is neither a list of ids nor a dict with entries ``"<slot>": {"min": number}``,
            ``"ids": [...]`` and ``"sample": share``.
    """
    if is_list(value):
        return RowFilter(ids=_ids(value))
    if not isinstance(value, Mapping):
        raise ValueError(f"found {value!r}, expected a dict such as {{'frequency': {{'min': 5}}}}")
    minimum, ids, sample = [], None, 1.0
    for key, condition in value.items():
        if key == "ids":
            ids = _ids(condition)
        elif key == "sample":
            if type(condition) not in (int, float) or not 0 <= condition <= 1:
                raise ValueError(f"'sample': found {condition!r}, expected a share from 0 to 1")
            sample = float(condition)
        elif not (
            isinstance(condition, Mapping)
            and list(condition) == ["min"]
            and type(condition["min"]) in (int, float)
            and abs(condition["min"]) <= _MOST  # refuses NaN
        ):
            raise ValueError(f"{key!r}: found {condition!r}, expected {{'min': number}}, or the keys 'ids' or 'sample'")
        else:
            minimum.append((str(key), condition["min"]))
    return RowFilter(tuple(minimum), ids, sample)


def _ids(value: Any) -> frozenset[int]:
    if not is_list(value) or not all(type(i) is int and -(2**63) <= i < 2**63 for i in value):
        raise ValueError(f"'ids': found {str(value)[:80]}, expected a list of int64 ids")
    return frozenset(value)
