"""What a training look-up leaves in its rows: how often each was asked for, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from recckpt.sparse.table.addresses import Addresses
from recckpt.sparse.table.column import Column
from recckpt.sparse.table.id_index import N_CLAIMED, N_ROWS, IdIndex
from recckpt.sparse.table.kernels import compiled, fence, prefetch

Int64s = npt.NDArray[np.int64]

_AHEAD = 16  # rows lie anywhere, so the next ones are asked for early


class Visit(NamedTuple):
    """How often each of some ids occurs, the slot that counts that, if there is one, and slots that are set.

    Attributes:
        occurrences: one for each id.
        counter: name of a scalar int64 slot; empty without one.
        stamps: scalar slot, int64 or float64 -> its new value.
    """

    occurrences: Int64s
    counter: str
    stamps: Mapping[str, int | float]


def visit_rows(index: IdIndex, rows: Int64s, columns: Mapping[str, Column], visit: Visit) -> None:
    """Count and stamp ``rows`` of columns on the CPU, and publish what is claimed: all of it or nothing."""
    counters = [columns[visit.counter]] if visit.counter else []
    stamped = [columns[name] for name in visit.stamps]
    values = zip(visit.stamps.values(), stamped, strict=True)
    stamps = np.array([np.array(value, column.spec.dtype).view(np.int64) for value, column in values], np.int64)
    _visit(Addresses.of([*counters, *stamped]), rows, visit.occurrences, len(counters), stamps, index.memory[1])


@intrinsic
def _int64_at(typing_context: Any, address: Any) -> Any:
    """Return the int64 at an address, a multiple of 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(64))))

    return types.int64(types.int64), generate


@intrinsic
def _set_int64_at(typing_context: Any, address: Any, value: Any) -> Any:
    """Set the int64 at an address, a multiple of 8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.PointerType(ir.IntType(64))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@compiled
def _count(blocks: Any, shift: int, rows: Any, amounts: Any) -> None:
    """Add amounts to the int64 of ``rows``, of which some may be equal."""
    mask = (1 << shift) - 1
    last = len(rows) - 1
    for i in range(len(rows)):
        ahead = rows[min(i + _AHEAD, last)]
        prefetch(blocks[ahead >> shift] + (ahead & mask) * 8)
        address = blocks[rows[i] >> shift] + (rows[i] & mask) * 8
        _set_int64_at(address, _int64_at(address) + amounts[i])


@compiled
def _stamp(blocks: Any, shift: int, rows: Any, stamp: int) -> None:
    """Set the 8 bytes of each of ``rows``."""
    mask = (1 << shift) - 1
    last = len(rows) - 1
    for i in range(len(rows)):
        ahead = rows[min(i + _AHEAD, last)]
        prefetch(blocks[ahead >> shift] + (ahead & mask) * 8)
        _set_int64_at(blocks[rows[i] >> shift] + (rows[i] & mask) * 8, stamp)


@compiled
def _visit(  # noqa: PLR0917  # compiled functions take positions only
    places: Any, rows: Any, occurrences: Any, n_counters: int, stamps: Any, counts: Any
) -> None:
    for i in range(len(places.shifts)):
        blocks = places.blocks[places.starts[i] : places.starts[i + 1]]
        if i < n_counters:
            _count(blocks, places.shifts[i], rows, occurrences)
        else:
            _stamp(blocks, places.shifts[i], rows, stamps[i - n_counters])
    fence()
    counts[N_ROWS] = counts[N_CLAIMED]
