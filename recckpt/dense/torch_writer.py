"""State to a ``.pt`` file that plain ``torch.load(weights_only=True)`` reads, and where in it each tensor lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recckpt.dense.placed_tensors import Placed, Record, pickled
from recckpt.dense.torch_archive import Contents, write_archive
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.format.layout import MODEL as MODEL_FILE
from recckpt.format.tensor_index import MODEL, Chunk, block_checksums
from recckpt.storage import SinkFile


@dataclass(frozen=True)
class Later:
    """A tensor whose values are read, contiguous, when they are written; once for all that are the same."""

    dtype: str
    shape: tuple[int, ...]
    same: Hashable
    read: Callable[[], npt.NDArray[Any]]


def write_state(
    state: Mapping[str, Any], to: SinkFile, advance: Callable[[int], object] = lambda n_bytes: None
) -> list[Chunk]:
    """Write a dict, and return what the index of dense tensors says of it.

    The state is as :func:`recckpt.dense.portable.portable` returns it, and may hold tensors that come :class:`Later`,
    of which one at a time is in memory. ``advance`` counts bytes of tensors.

    Raises:
        OSError: the storage failed.
    """
    records, checksums = _Records(), []

    def written() -> Iterator[memoryview]:
        for read in records.reads:
            data = read()
            checksums.append(block_checksums(data))
            yield data
            advance(len(data))

    places = write_archive(to, Contents(pickled(dict(state), records.place), written()))
    named = {name: placed for name, value in state.items() if (placed := records.place(value)) is not None}
    return [
        _chunk(name, placed, places[placed.record.number], checksums[placed.record.number])
        for name, placed in sorted(named.items(), key=lambda item: item[1].record.number)
    ]


def _chunk(name: str, placed: Placed, at: int, checksums: tuple[int, ...]) -> Chunk:
    shape = placed.shape
    return Chunk(MODEL, name, placed.dtype, shape, (0,) * len(shape), shape, MODEL_FILE, at, checksums)


class _Records:
    """The storages of tensors, each once; ``reads`` give the bytes of each."""

    def __init__(self) -> None:
        self.reads: list[Callable[[], memoryview]] = []
        self._known: dict[Hashable, Record] = {}

    def place(self, value: Any) -> Placed | None:
        """Return where a tensor lies, None for what is no tensor."""
        if isinstance(value, Later):
            strides = tuple(math.prod(value.shape[dim + 1 :]) for dim in range(len(value.shape)))
            n_bytes = math.prod(value.shape) * NUMPY_DTYPES[value.dtype].itemsize
            record = self._record((value.same, value.dtype), n_bytes, lambda: _bytes(value.read()))
            return Placed(value.dtype, record, 0, value.shape, strides)
        if not isinstance(value, Tensor):
            return None
        dtype, storage = str(value.dtype).removeprefix("torch."), value.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        record = self._record((storage._cdata, dtype), storage.nbytes(), lambda: memory.numpy().data)
        return Placed(dtype, record, int(value.storage_offset()), tuple(value.shape), value.stride())

    def _record(self, key: Hashable, n_bytes: int, read: Callable[[], memoryview]) -> Record:
        if key not in self._known:
            self._known[key] = Record(len(self.reads), n_bytes)
            self.reads.append(read)
        return self._known[key]


def _bytes(values: npt.NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data
