"""Assigns ids to ranks, and orders ids in files, by hash. Imports numpy only."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

N_BUCKETS = 65536  # part of the format
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
M1, M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix64(z: Any) -> Any:
    """Hash uint64 values: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014). Part of the format.

    Works on numpy arrays, and on scalars when compiled by numba.
    """
    z = (z ^ (z >> _S30)) * M1
    z = (z ^ (z >> _S27)) * M2
    return z ^ (z >> _S31)


def bucket_of(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bucket, 0 to 65535, of each id: the upper 16 bits of its hash. Part of the format."""
    buckets: npt.NDArray[np.int64] = (mix64(ids.view(np.uint64)) >> np.uint64(48)).astype(np.int64)
    return buckets


@lru_cache(maxsize=64)
def random_odds(first: int, n: int) -> npt.NDArray[np.uint64]:
    """Return ``n`` random 64-bit numbers, from index ``first`` on; all odd, because odd factors lose no bits."""
    odds: npt.NDArray[np.uint64] = mix64(np.arange(first + 1, first + n + 1, dtype=np.uint64)) | np.uint64(1)
    return odds


@dataclass(frozen=True)
class Slice:
    """The parts [begin, end) of the hashed id space, which is divided into ``size`` equal parts."""

    begin: int  # first part inside
    end: int  # first part behind
    size: int = N_BUCKETS  # number of parts of the whole space

    def __post_init__(self) -> None:
        if not (1 <= self.size <= N_BUCKETS and 0 <= self.begin <= self.end <= self.size):
            raise ValueError(
                f"a slice needs 0 <= begin <= end <= size <= {N_BUCKETS}, found begin={self.begin}, "
                f"end={self.end}, size={self.size}"
            )

    @property
    def is_everything(self) -> bool:
        """Whether the slice contains every id."""
        return self.begin == 0 and self.end == self.size

    @overload
    def owns(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]: ...
    @overload
    def owns(self, ids: Tensor) -> Tensor: ...
    def owns(self, ids: Any) -> Any:
        """Return a bool mask of the shape of ``ids``: True for ids in this slice."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(ids, torch.Tensor):
            return torch.from_numpy(self.owns(ids.cpu().contiguous().numpy())).to(ids.device)
        part = bucket_of(np.ascontiguousarray(ids, dtype=np.int64)) * self.size // N_BUCKETS
        return (part >= self.begin) & (part < self.end)

    @property
    def buckets(self) -> tuple[int, int]:
        """The range [begin, end) of buckets in this slice."""
        return -(-self.begin * N_BUCKETS // self.size), -(-self.end * N_BUCKETS // self.size)

    def meets(self, begin: int, end: int) -> bool:
        """Return whether any bucket of [begin, end) lies in this slice."""
        first, last = begin * self.size // N_BUCKETS, (end - 1) * self.size // N_BUCKETS
        return begin < end and first < self.end and last >= self.begin


def gen_slice(shard_index: int, shard_num: int, slice_size: int = N_BUCKETS) -> Slice:
    """Return the slice of one shard; the slices of all shards tile the id space.

    Args:
        shard_index: 0 to ``shard_num - 1``.
        shard_num: number of shards.
        slice_size: number of parts of the id space, at most 65536 and at least ``shard_num``.
    """
    if not 1 <= shard_num <= slice_size:
        raise ValueError(f"shard_num must be 1 to slice_size={slice_size}, found {shard_num}")
    if not 0 <= shard_index < shard_num:
        raise ValueError(f"shard_index must be 0 to {shard_num - 1}, found {shard_index}")
    begin, end = (slice_size * i // shard_num for i in (shard_index, shard_index + 1))
    return Slice(begin, end, slice_size)


def distinct(*values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    ordered = np.sort(values[0] if len(values) == 1 else np.concatenate(values))
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


def repeated(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the duplicated values, each once, ascending."""
    ordered = np.sort(values)
    return distinct(ordered[1:][ordered[1:] == ordered[:-1]])


def is_among(values: npt.NDArray[Any], ordered: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    mask: npt.NDArray[np.bool_] = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return mask
