"""Compiled loops over rows, which run without the GIL: copy rows by address, count and sort them by bucket."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache, NullCache
from numba.extending import intrinsic

from recckpt.format.buckets import mix64 as _mix64
from recckpt.parallel.threads import Errand, start

log = logging.getLogger("recckpt")

_Loop = TypeVar("_Loop", bound=Callable[..., Any])
mix64 = njit(inline="always")(_mix64)
_S48 = np.uint64(48)
_ID_BYTES = 8
_AHEAD, _AHEAD_BYTES = 16, 256  # rows are at random addresses, so later ones are prefetched


def compiled(function: _Loop) -> _Loop:
    """Compile a loop, or load it from the cache, at its first call, in a thread that no signal handler interrupts.

    If numba is interrupted while it compiles, it stays broken for the rest of the process.
    """
    loop: Any = njit(nogil=True)(function)
    loop._cache = _Cache(function)
    compile_for = loop._compile_for_args

    def compile_aside(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # signal handlers run in the main thread only
            return compile_for(*args)
        compiling = Errand(lambda: compile_for(*args))
        try:
            start(threading.Thread(target=compiling.run, name="recckpt-compile"))
        except RuntimeError:  # raised while the interpreter exits, when a last save may still be made
            return compile_for(*args)
        compiling.over.wait()  # if an exception ends this wait, the thread still completes
        return compiling.result()

    loop._compile_for_args = compile_aside
    return loop


class _Cache(NullCache):  # type: ignore[misc]  # numba has no types
    """Numba's cache. Where its files cannot be used, each process compiles loops itself, and logs that once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._cache: FunctionCache | None = None
        with suppress(RuntimeError):  # raised if neither the package's directory nor the home directory is writable
            self._cache = FunctionCache(function)

    def load_overload(self, *args: Any) -> Any:
        return self._unless_unusable(FunctionCache.load_overload, args)

    def save_overload(self, *args: Any) -> None:
        self._unless_unusable(FunctionCache.save_overload, args)

    def _unless_unusable(self, method: Callable[..., Any], args: Any) -> Any:
        with suppress(OSError):  # for example a full disk, or files of another user
            if self._cache is not None:
                return method(self._cache, *args)
        return _note_that_all_compile()


@cache
def _note_that_all_compile() -> None:
    log.info(
        "numba has no place to cache compiled loops, so each process compiles them at their first use, which takes "
        "some seconds: set NUMBA_CACHE_DIR to a writable directory"
    )


@intrinsic
def _copy_bytes(typing_context: Any, target: Any, source: Any, n_bytes: Any) -> Any:
    signature = types.void(types.int64, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, n_bytes = arguments
        pointer = ir.PointerType(ir.IntType(8))
        cgutils.raw_memcpy(builder, builder.inttoptr(target, pointer), builder.inttoptr(source, pointer), n_bytes, 1)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at ``address``; an invalid address does not fault."""
    signature = types.void(types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, number = ir.PointerType(ir.IntType(8)), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, number, number, number]),
            "llvm.prefetch.p0",
        )
        to_read, keep, data = number(0), number(3), number(1)
        builder.call(function, [builder.inttoptr(arguments[0], pointer), to_read, keep, data])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def fence(typing_context: Any) -> Any:  # a full memory barrier
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@compiled
def gather_rows(blocks: Any, shift: int, row_bytes: int, rows: Any, target: int) -> None:
    """Copy ``rows`` from blocks of ``1 << shift`` rows to the address ``target``."""
    mask = (1 << shift) - 1
    last = len(rows) - 1
    for i in range(len(rows)):
        ahead = np.int64(rows[min(i + _AHEAD, last)])
        address = blocks[ahead >> shift] + (ahead & mask) * row_bytes
        for line in range(0, min(row_bytes, _AHEAD_BYTES), 64):
            prefetch(address + line)
        row = np.int64(rows[i])
        source = blocks[row >> shift] + (row & mask) * row_bytes
        if row_bytes == _ID_BYTES:
            _copy_bytes(target + i * row_bytes, source, _ID_BYTES)  # a constant size compiles to two instructions
        else:
            _copy_bytes(target + i * row_bytes, source, row_bytes)


@compiled
def scatter_rows(blocks: Any, shift: int, row_bytes: int, rows: Any, source: int) -> None:
    mask = (1 << shift) - 1
    for i in range(len(rows)):
        row = np.int64(rows[i])
        _copy_bytes(blocks[row >> shift] + (row & mask) * row_bytes, source + i * row_bytes, row_bytes)


@compiled
def copy_rows_within(blocks: Any, shift: int, row_bytes: int, rows: Any, to_rows: Any) -> None:
    mask = (1 << shift) - 1
    for i in range(len(rows)):
        row, to_row = rows[i], to_rows[i]
        source = blocks[row >> shift] + (row & mask) * row_bytes
        _copy_bytes(blocks[to_row >> shift] + (to_row & mask) * row_bytes, source, row_bytes)


@compiled
def lay_over(  # noqa: PLR0917  # compiled functions take positions only
    blocks: Any, shift: int, row_bytes: int, rows: Any, at: Any, target: int
) -> None:
    """Copy ``rows`` of the blocks to the positions ``at`` among consecutive rows at the address ``target``."""
    mask = (1 << shift) - 1
    for i in range(len(rows)):
        source = blocks[rows[i] >> shift] + (rows[i] & mask) * row_bytes
        _copy_bytes(target + at[i] * row_bytes, source, row_bytes)


@njit(nogil=True, inline="always")
def is_marked(marks: Any, row: int) -> Any:
    return (marks[row >> 3] >> (row & 7)) & 1


@compiled
def unmarked_rows(rows: Any, n_rows: int, marks: Any, needed: Any) -> Any:
    """Return the ``rows`` below ``n_rows`` whose bit is 0 in ``marks``, and 1 in ``needed`` unless that is empty."""
    unmarked = np.empty(len(rows), np.int64)
    n = 0
    for i in range(len(rows)):
        row = rows[i]
        if row < n_rows and not is_marked(marks, row) and (len(needed) == 0 or is_marked(needed, row)):
            unmarked[n] = row
            n += 1
    return unmarked[:n]


@compiled
def mark_rows(rows: Any, marks: Any) -> None:
    for i in range(len(rows)):
        marks[rows[i] >> 3] |= 1 << (rows[i] & 7)


@compiled
def pick_marked(rows: Any, marks: Any, needed: Any, mark_others: bool) -> Any:
    """Return positions of ``rows`` marked, or absent from a non-empty ``needed``; ``mark_others`` marks the rest."""
    places = np.empty(len(rows), np.int64)
    n = 0
    for i in range(len(rows)):
        row = np.int64(rows[i])
        bit = np.uint8(1 << (row & 7))
        if marks[row >> 3] & bit or (len(needed) and not needed[row >> 3] & bit):
            places[n] = i
            n += 1
        elif mark_others:
            marks[row >> 3] |= bit
    return places[:n]


@compiled
def add_rows(groups: Any, values: Any, sums: Any) -> None:
    for i in range(len(groups)):
        group = groups[i]
        for j in range(values.shape[1]):
            sums[group, j] += values[i, j]


@compiled
def row_norms(values: Any, norms: Any) -> None:
    """Set ``norms`` to the L2 norms of rows, summed in column order, so that a norm does not depend on other rows."""
    for i in range(len(values)):
        total = 0.0
        for j in range(values.shape[1]):
            total += values[i, j] * values[i, j]
        norms[i] = np.sqrt(total)


@compiled
def count_buckets(ids: Any, counts: Any) -> None:
    for i in range(len(ids)):
        counts[mix64(np.uint64(ids[i])) >> _S48] += 1


@compiled
def first_outside(ids: Any, begin: int, end: int) -> int:
    """Return the position of the first id whose bucket is outside [begin, end), or -1."""
    outside = 0
    for i in range(len(ids)):  # no early exit, so that the loop is vectorized
        bucket = np.int64(mix64(np.uint64(ids[i])) >> _S48)
        outside += (bucket < begin) | (bucket >= end)
    if outside:
        for i in range(len(ids)):
            bucket = np.int64(mix64(np.uint64(ids[i])) >> _S48)
            if bucket < begin or bucket >= end:
                return i
    return -1


@compiled
def place_rows(  # noqa: PLR0917  # compiled functions take positions only
    ids: Any, first_row: int, begin: int, end: int, cursors: Any, order: Any
) -> None:
    """Second half of a counting sort: put each row with a bucket in [begin, end) at its bucket's cursor."""
    for i in range(len(ids)):
        bucket = np.int64(mix64(np.uint64(ids[i])) >> _S48)
        if begin <= bucket < end and cursors[bucket] < len(order):  # the second is false if ids changed since the count
            order[cursors[bucket]] = first_row + i
            cursors[bucket] += 1


@compiled
def first_repeat(ids: Any) -> tuple[int, int]:
    """Return the position of the first repeated id, or -1, and the position where the last bucket begins."""
    longest = n_same = 0
    bucket = np.uint64(1 << 48)  # no id has this bucket
    for i in range(len(ids)):
        own_bucket = mix64(np.uint64(ids[i])) >> _S48
        n_same = n_same + 1 if own_bucket == bucket else 1
        bucket = own_bucket
        longest = max(longest, n_same)
    size = 1
    while size < 2 * longest:
        size *= 2
    cells = np.zeros((size, 2), np.int64)  # id, and 1 + the start of its bucket; a cell of another bucket is empty
    bucket, begin = np.uint64(1 << 48), 0
    for i in range(len(ids)):
        hashed = mix64(np.uint64(ids[i]))
        if hashed >> _S48 != bucket:
            bucket, begin = hashed >> _S48, i
        cell = np.int64(hashed) & (size - 1)
        while cells[cell, 1] == begin + 1:
            if cells[cell, 0] == ids[i]:
                return i, begin
            cell = (cell + 1) & (size - 1)
        cells[cell, 0] = ids[i]
        cells[cell, 1] = begin + 1
    return -1, begin
