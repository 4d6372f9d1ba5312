"""Dense tensors as numbers, a slab at a time (no torch here)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from recckpt.dense.tensors import DenseTensors, Read, StoredTensor
from recckpt.format.dtypes import NUMPY_DTYPES, widened

_SLAB_BYTES = 4 << 20  # read at once; more where a single row of a tensor has more


def slabs_of(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Cut a tensor along its first dimension, and yield [begin, end) of each slab; a scalar is one row."""
    if not math.prod(tensor.shape):
        return
    n_rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, _SLAB_BYTES * n_rows // max(1, tensor.nbytes))
    yield from ((begin, min(begin + step, n_rows)) for begin in range(0, n_rows, step))


def numbers_between(dense: DenseTensors, tensor: StoredTensor, begin: int, end: int) -> npt.NDArray[Any]:
    """Read some rows of a tensor as numbers; of dtypes that numpy lacks, but for bfloat16, their bits.

    Raises:
        CorruptCheckpointError: bytes are not those that were saved.
    """
    values = _rows(dense, tensor, begin, end)
    return widened(values) if tensor.dtype == "bfloat16" else values


def is_number(dtype: str) -> bool:
    """Say whether values of a dtype come as the numbers that they are."""
    return dtype == "bfloat16" or NUMPY_DTYPES[dtype].name == dtype


def _rows(dense: DenseTensors, tensor: StoredTensor, begin: int, end: int) -> npt.NDArray[Any]:
    if not tensor.shape:
        return dense.read(tensor)
    reads = []
    for number, (_, chunk) in enumerate(tensor.chunks):
        first, last = max(begin, chunk.offsets[0]), min(end, chunk.offsets[0] + chunk.sizes[0])
        if first < last:
            at = (first - chunk.offsets[0], *(0 for _ in chunk.sizes[1:]))
            to = (first - begin, *chunk.offsets[1:])
            reads.append(Read(number, at, to, (last - first, *chunk.sizes[1:])))
    return np.asarray(dense.read_box(tensor, (end - begin, *tensor.shape[1:]), reads))
