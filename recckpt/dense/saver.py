"""Writes dense state to ``.pt`` files, sharded tensors to a file of chunks, and an index of both."""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3  # part of the format: torch.save refers to them

from recckpt.dense.sharded import OwnChunk
from recckpt.dense.state_copy import MAPPINGS
from recckpt.dense.torch_archive import ArchiveContents, write_archive
from recckpt.format import layout, tensor_index
from recckpt.format.manifest import FileEntry
from recckpt.format.tensor_index import (
    ALIGNMENT,
    NUMPY_DTYPES,
    STORAGES,
    TensorChunk,
    TensorIndex,
    block_checksums,
)
from recckpt.storage import HashingSink, NewFiles, SinkFile

_STEP_BYTES = 1 << 20
_WITHOUT_IDENTITY = frozenset({type(None), bool, int, float})  # pickle writes such objects in full each time


def save_state(state: Mapping[str, Any], storage: NewFiles, directory: str, name: str) -> FileEntry:
    """Write a dict made by :func:`recckpt.dense.state_copy.portable`; return its entry for the manifest."""
    return _save_state(state, storage, directory, name)[0]


def save_tensors(
    state: Mapping[str, Any] | None,
    own: Sequence[OwnChunk],
    storage: NewFiles,
    directory: str,
    *,
    save_id: str,
    shard: int,
    shards: int,
) -> list[FileEntry]:
    """Write the model's state, the chunks of this rank and an index of both; return the entries of the files.

    ``state`` is written to ``model.pt``, as in :func:`save_state`; it is None if another rank writes the file.
    """
    files: list[FileEntry] = []
    chunks: list[TensorChunk] = []
    if state is not None:
        entry, chunks = _save_state(state, storage, directory, layout.MODEL)
        files.append(entry)
    if own:
        name = layout.dense_data(shard, shards)
        with storage.create(layout.join(directory, name)) as sink:
            hashing = HashingSink(sink)
            for chunk in own:
                hashing.write(bytes(-sink.n_bytes % ALIGNMENT))
                at, data = sink.n_bytes, chunk.values.contiguous().reshape(-1).view(torch.uint8).numpy().data
                for begin in range(0, len(data), _STEP_BYTES):
                    hashing.write(data[begin : begin + _STEP_BYTES])
                place = chunk.offsets, tuple(chunk.values.shape), name, at, block_checksums(data)
                chunks.append(TensorChunk(chunk.of, chunk.name, chunk.dtype, chunk.shape, *place))
        files.append(FileEntry(name, sink.n_bytes, hashing.xxh3))
    if chunks:
        index = TensorIndex(save_id, shard, shards, tensor_index.BLOCK_BYTES, tuple(chunks))
        name = layout.dense_index(shard, shards)
        with storage.create(layout.join(directory, name)) as sink:
            hashing = HashingSink(sink)
            hashing.write(tensor_index.encode(index))
        files.append(FileEntry(name, sink.n_bytes, hashing.xxh3))
    return files


def _save_state(
    state: Mapping[str, Any], storage: NewFiles, directory: str, name: str
) -> tuple[FileEntry, list[TensorChunk]]:
    with storage.create(layout.join(directory, name)) as sink:
        hashing = HashingSink(sink)
        chunks = write_state(state, hashing)
    return FileEntry(name, sink.n_bytes, hashing.xxh3), chunks


@dataclass(frozen=True)
class Later:
    """A tensor whose contiguous values are read only when they are written; tensors with equal ``same`` share them."""

    dtype: str
    shape: tuple[int, ...]
    same: Hashable
    read: Callable[[], npt.NDArray[Any]]


@dataclass(frozen=True)
class Placed:
    """The place of a tensor in record ``number`` of ``n_bytes``; offset and strides count items, not bytes."""

    dtype: str
    number: int
    n_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def write_state(
    state: Mapping[str, Any], to: SinkFile, advance: Callable[[int], object] = lambda n_bytes: None
) -> list[TensorChunk]:
    """Write a dict, and return the chunks for the index of dense tensors.

    The state was made by :func:`recckpt.dense.state_copy.portable`, and may contain :class:`Later` tensors; only one
    of them is in memory at a time. ``advance`` is called with the number of bytes written.
    """
    records, checksums = _Records(), []

    def written() -> Iterator[memoryview]:
        for read in records.reads:
            data = read()
            checksums.append(block_checksums(data))
            yield data
            advance(len(data))

    places = write_archive(to, ArchiveContents(pickled(dict(state), records.place), written()))
    named = [(name, placed) for name, value in state.items() if (placed := records.place(value)) is not None]
    chunks = []
    for name, one in sorted(named, key=lambda item: item[1].number):
        place = (0,) * len(one.shape), one.shape, layout.MODEL, places[one.number], checksums[one.number]
        chunks.append(TensorChunk(tensor_index.MODEL, name, one.dtype, one.shape, *place))
    return chunks


class _Records:
    """The distinct storages of tensors; each function in ``reads`` returns the bytes of one storage."""

    def __init__(self) -> None:
        self.reads: list[Callable[[], memoryview]] = []
        self._numbers: dict[Hashable, int] = {}

    def place(self, value: Any) -> Placed | None:
        read: Callable[[], memoryview]
        if isinstance(value, Later):
            later, dtype, shape, offset = value, value.dtype, value.shape, 0
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            key: Hashable = (value.same, dtype)
            n_bytes = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
            read = lambda: later.read().reshape(-1).view(np.uint8).data  # noqa: E731
        elif isinstance(value, Tensor):
            dtype, shape, strides = str(value.dtype).removeprefix("torch."), tuple(value.shape), value.stride()
            storage, offset = value.untyped_storage(), int(value.storage_offset())
            key, n_bytes = (storage._cdata, dtype), storage.nbytes()
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            read = lambda: memory.numpy().data  # noqa: E731
        else:
            return None
        if key not in self._numbers:
            self._numbers[key] = len(self.reads)
            self.reads.append(read)
        return Placed(dtype, self._numbers[key], n_bytes, offset, shape, strides)


def pickled(state: Any, placed: Callable[[Any], Placed | None]) -> bytes:
    """Return the pickle of a state; it depends on the values alone, not on object identity or hashes."""
    file = io.BytesIO()
    _Pickler(file, placed).dump(_by_value(state, {}))
    return file.getvalue()


def _by_value(value: Any, known: dict[Any, Any]) -> Any:
    """Return a copy of a state in which equal leaves are one object, so that its pickle depends on values alone.

    Each container and tensor becomes a new object at each place, even if it occurs several times.
    """
    kind = type(value)
    if kind in MAPPINGS:
        return kind({_by_value(key, known): _by_value(item, known) for key, item in value.items()})
    if kind in (list, tuple):
        is_plain = _WITHOUT_IDENTITY.issuperset(map(type, value))
        return kind([*value] if is_plain else [_by_value(item, known) for item in value])
    if kind is set:
        return _InOrder(_by_value(item, known) for item in value)
    if kind is str:
        return sys.intern(value)  # the same object as strings that pickle itself writes, such as "cpu"
    if kind in (bytes, torch.Size, torch.device):
        return known.setdefault((kind, value), value)
    return known.setdefault((kind, repr(value)), value) if kind is complex else value  # by repr, because 0j == -0j


class _InOrder(list[Any]):
    """The members of a set, pickled as a set in an order that does not depend on hashes."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return set, (sorted(self, key=lambda item: (type(item).__name__, repr(item))),)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, placed: Callable[[Any], Placed | None]) -> None:
        super().__init__(file, protocol=2)
        self._placed = placed

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not Placed:  # a placed tensor stands for its storage
            return None
        kind, number = STORAGES.get(obj.dtype), str(obj.number)
        if kind is None:
            return "storage", torch.UntypedStorage, number, "cpu", obj.n_bytes
        return "storage", getattr(torch, kind), number, "cpu", obj.n_bytes // getattr(torch, obj.dtype).itemsize

    def reducer_override(self, obj: Any) -> Any:
        placed = self._placed(obj)
        if placed is None:
            return NotImplemented
        hooks: OrderedDict[Any, Any] = OrderedDict()
        args = (placed, placed.offset, placed.shape, placed.strides, False, hooks)
        if placed.dtype in STORAGES:
            return _rebuild_tensor_v2, args
        return _rebuild_tensor_v3, (*args, getattr(torch, placed.dtype))
