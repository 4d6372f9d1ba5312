"""Compiled loops over rows: copy them by address, count and order them by bucket (numba, all without the GIL)."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from recckpt.sparse.buckets import mix64 as _mix64

mix64 = njit(inline="always")(_mix64)
_S48 = np.uint64(48)


@intrinsic
def _copy_bytes(typing_context: Any, target: Any, source: Any, n_bytes: Any) -> Any:
    """Copy ``n_bytes`` from one address to another (memcpy)."""
    signature = types.void(types.int64, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, n_bytes = arguments
        pointer = ir.PointerType(ir.IntType(8))
        cgutils.raw_memcpy(
            builder, builder.inttoptr(target, pointer), builder.inttoptr(source, pointer), n_bytes, 1
        )
        return context.get_dummy_value()

    return signature, generate


@njit(nogil=True, cache=True)
def gather_rows(blocks: Any, shift: int, row_bytes: int, rows: Any, target: int) -> None:
    """Copy ``rows`` out of blocks of ``1 << shift`` rows at the addresses ``blocks`` to address ``target``."""
    mask = (1 << shift) - 1
    for i in range(len(rows)):
        row = np.int64(rows[i])
        _copy_bytes(target + i * row_bytes, blocks[row >> shift] + (row & mask) * row_bytes, row_bytes)


@njit(nogil=True, cache=True)
def scatter_rows(blocks: Any, shift: int, row_bytes: int, rows: Any, source: int) -> None:
    """Copy consecutive rows at address ``source`` into ``rows`` of the blocks."""
    mask = (1 << shift) - 1
    for i in range(len(rows)):
        row = np.int64(rows[i])
        _copy_bytes(blocks[row >> shift] + (row & mask) * row_bytes, source + i * row_bytes, row_bytes)


@njit(nogil=True, cache=True)
def count_buckets(ids: Any, counts: Any) -> None:
    """Add the number of ``ids`` in each of the 65,536 buckets to ``counts``."""
    for i in range(len(ids)):
        counts[mix64(np.uint64(ids[i])) >> _S48] += 1


@njit(nogil=True, cache=True)
def place_rows(ids: Any, first_row: int, begin: int, end: int, cursors: Any, order: Any) -> None:
    """Second half of a counting sort: put each row whose bucket is in [begin, end) at its bucket's cursor."""
    for i in range(len(ids)):
        bucket = np.int64(mix64(np.uint64(ids[i])) >> _S48)
        if begin <= bucket < end:
            order[cursors[bucket]] = first_row + i
            cursors[bucket] += 1
