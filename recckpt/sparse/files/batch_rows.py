"""Rows of one batch on their way to a table: as they lie in a file, or as another rank has sent them."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from recckpt.sparse.files.arrow_format import ID, column_buffer, ids_in
from recckpt.types import SlotSpec

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 8


@dataclass(frozen=True)
class BatchRows:
    """Ids of a batch, all of them or some, and slots of their rows.

    Attributes:
        table: its name in the checkpoint.
        shard: which one the batch is of.
        path: of the file that it was read from.
        ids: int64, one a row.
        values: slot -> the bytes of one value a row.
    """

    table: str
    shard: int
    path: str
    ids: Int64s
    values: Mapping[str, Bytes]

    @classmethod
    def of_columns(cls, table: str, shard: int, path: str, columns: Mapping[str, pa.Array]) -> BatchRows:
        """Return the rows in Arrow columns, without a copy."""
        values = {name: np.frombuffer(column_buffer(array), np.uint8) for name, array in columns.items() if name != ID}
        return cls(table, shard, path, ids_in(columns), values)

    @property
    def n_bytes(self) -> int:
        """Bytes of the ids and values."""
        return self.ids.nbytes + sum(values.size for values in self.values.values())

    def tensor(self, spec: SlotSpec) -> Tensor:
        """Return the values of a slot as a tensor, without a copy; it lives as long as these rows, and is read only."""
        values = self.values[spec.name]
        # numpy would have torch warn of memory that cannot be written
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * values.size).from_address(values.ctypes.data))
        return torch.from_numpy(memory).view(getattr(torch, spec.dtype)).view(len(self.ids), *spec.shape)

    def some(self, positions: Int64s, columns: Collection[str]) -> BatchRows:
        """Return a copy of some rows, with some of their slots."""
        values = {name: _rows(self.values[name], len(self.ids), positions) for name in sorted(columns)}
        return BatchRows(self.table, self.shard, self.path, self.ids[positions], values)


def packed(pieces: Iterable[BatchRows]) -> Bytes:
    """Return the bytes of some rows, for another rank."""
    pieces = list(pieces)
    if not pieces:
        return np.empty(0, np.uint8)
    heads = [(p.table, p.shard, p.path, len(p.ids), [(name, v.size) for name, v in p.values.items()]) for p in pieces]
    head = np.frombuffer(pickle.dumps(heads), np.uint8)
    arrays = [np.array([len(head)], np.int64).view(np.uint8), head]
    for piece in pieces:
        arrays += [piece.ids.view(np.uint8), *piece.values.values()]
    return np.concatenate([padded for array in arrays for padded in (array, _padding(array.size))])


def unpacked(data: Bytes) -> Iterator[BatchRows]:
    """Yield the rows that another rank has packed, without a copy."""
    if not len(data):
        return
    rest = _Rest(data)
    heads: list[Any] = pickle.loads(rest.take(int(rest.take(8).view(np.int64)[0])).data)
    for table, shard, path, n_rows, columns in heads:
        ids = rest.take(8 * n_rows).view(np.int64)
        yield BatchRows(table, shard, path, ids, {name: rest.take(n_bytes) for name, n_bytes in columns})


class _Rest:
    """What is still to be read of packed bytes."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._at = data, 0

    def take(self, n_bytes: int) -> Bytes:
        """Return the next bytes, and pass over their padding."""
        taken = self._data[self._at : self._at + n_bytes]
        self._at += n_bytes + _padding(n_bytes).size
        return taken


def _padding(n_bytes: int) -> Bytes:
    return np.zeros(-n_bytes % _ALIGNMENT, np.uint8)


def _rows(values: Bytes, n_rows: int, positions: Int64s) -> Bytes:
    taken: Bytes = values.reshape(n_rows, -1).take(positions, axis=0).reshape(-1)
    return taken
