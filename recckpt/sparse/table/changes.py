"""Changes of many columns and the index in one compiled call, in whose middle no exception can arise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit
from torch import Tensor

from recckpt.sparse.table.column import Column
from recckpt.sparse.table.id_index import N_CLAIMED, N_ROWS, VERSION, IdIndex, erase_ids
from recckpt.sparse.table.kernels import copy_rows_within, fence, mark_rows, scatter_rows

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Erasure(NamedTuple):
    """These ``ids``, present and different, go; the rows ``movers``, of ``moved_ids``, move into the ``holes``."""

    ids: Int64s
    moved_ids: Int64s
    movers: Int64s
    holes: Int64s


class _Layout(NamedTuple):
    """Where the rows of columns on the CPU lie: the addresses of the blocks of one after those of the other."""

    addresses: Int64s
    starts: Int64s
    shifts: Int64s
    row_bytes: Int64s

    @classmethod
    def of(cls, columns: Sequence[Column]) -> _Layout:
        addresses = [np.empty(0, np.int64), *(column.memory.addresses for column in columns)]
        return cls(
            np.concatenate(addresses),
            np.cumsum([len(some) for some in addresses]),
            np.array([column.shift for column in columns], np.int64),
            np.array([column.spec.row_bytes for column in columns], np.int64),
        )


def write(
    index: IdIndex, rows: Int64s, columns: Sequence[Column], values: Sequence[Tensor], flag: Int64s | None = None
) -> None:
    """Set ``rows`` of columns on the CPU, publish what is claimed, and set ``flag[0]`` to 1: all of it or nothing."""
    fitting = [column.fitting(tensor) for column, tensor in zip(columns, values, strict=True)]
    sources = np.array([tensor.data_ptr() for tensor in fitting], np.int64)
    _write(_Layout.of(columns), rows, sources, index.memory[1], np.zeros(1, np.int64) if flag is None else flag)


def erase(index: IdIndex, erasure: Erasure, columns: Sequence[Column]) -> None:
    """Forget ids and move rows of columns on the CPU: all of it or nothing."""
    _erase(_Layout.of(columns), *index.memory, *erasure)


def keep(places: IdIndex, rows: Int64s, marks: Bytes) -> None:
    """Publish the places of ``rows`` and mark them: all of it or nothing."""
    _keep(places.memory[1], rows, marks)


@njit(nogil=True, cache=True)
def _write(layout: Any, rows: Any, sources: Any, counts: Any, flag: Any) -> None:
    for i in range(len(sources)):
        addresses = layout.addresses[layout.starts[i] : layout.starts[i + 1]]
        scatter_rows(addresses, layout.shifts[i], layout.row_bytes[i], rows, sources[i])
    fence()
    counts[N_ROWS] = counts[N_CLAIMED]
    flag[0] = 1


@njit(nogil=True, cache=True)
def _erase(  # noqa: PLR0917  # compiled functions take positions only
    layout: Any, cells: Any, counts: Any, ids: Any, moved_ids: Any, movers: Any, holes: Any
) -> None:
    counts[VERSION] |= 1
    fence()
    for i in range(len(layout.shifts)):
        addresses = layout.addresses[layout.starts[i] : layout.starts[i + 1]]
        copy_rows_within(addresses, layout.shifts[i], layout.row_bytes[i], movers, holes)
    erase_ids(cells, counts, ids, moved_ids, holes)


@njit(nogil=True, cache=True)
def _keep(counts: Any, rows: Any, marks: Any) -> None:
    mark_rows(rows, marks)
    counts[N_ROWS] = counts[N_CLAIMED]
