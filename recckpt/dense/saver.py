"""Dense state to ``.pt`` files, sharded tensors to a file of chunks, and the index of what lies where in them."""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3  # part of the format: torch.save refers to them

from recckpt.dense.by_value import ByValue
from recckpt.dense.sharded import OwnChunk
from recckpt.dense.torch_archive import ArchiveContents, write_archive
from recckpt.format import layout, tensor_index
from recckpt.format.dtypes import NUMPY_DTYPES, STORAGES
from recckpt.format.layout import MODEL as MODEL_FILE
from recckpt.format.manifest import FileEntry
from recckpt.format.tensor_index import ALIGNMENT, MODEL, TensorChunk, TensorIndex, block_checksums
from recckpt.storage import HashingSink, NewFiles, SinkFile

_STEP_BYTES = 1 << 20


def save_state(state: Mapping[str, Any], storage: NewFiles, directory: str, name: str) -> FileEntry:
    """Write a dict, as :func:`recckpt.dense.state_copy.portable` returns it; return its entry for the manifest."""
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
    """Write the model's state, the chunks that are this rank's own, and the index of both; return the files.

    The state goes to ``model.pt``, as :func:`save_state` takes it; it is None where another rank writes that.
    """
    files: list[FileEntry] = []
    chunks: list[TensorChunk] = []
    if state is not None:
        entry, chunks = _save_state(state, storage, directory, layout.MODEL)
        files.append(entry)
    if own:
        entry, written = _save_chunks(own, storage, directory, layout.dense_data(shard, shards))
        files.append(entry)
        chunks = chunks + written
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


def _save_chunks(
    own: Sequence[OwnChunk], storage: NewFiles, directory: str, name: str
) -> tuple[FileEntry, list[TensorChunk]]:
    chunks = []
    with storage.create(layout.join(directory, name)) as sink:
        hashing = HashingSink(sink)
        for chunk in own:
            hashing.write(bytes(-sink.n_bytes % ALIGNMENT))
            at, data = sink.n_bytes, _bytes_of(chunk.values)
            for begin in range(0, len(data), _STEP_BYTES):
                hashing.write(data[begin : begin + _STEP_BYTES])
            sizes, checksums = tuple(chunk.values.shape), block_checksums(data)
            listed = TensorChunk(
                chunk.of, chunk.name, chunk.dtype, chunk.shape, chunk.offsets, sizes, name, at, checksums
            )
            chunks.append(listed)
    return FileEntry(name, sink.n_bytes, hashing.xxh3), chunks


def _bytes_of(values: Tensor) -> memoryview:
    """Return the values of a tensor, row by row, without a copy where they lie so."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Later:
    """A tensor whose values are read, contiguous, when they are written; once for all that are the same."""

    dtype: str
    shape: tuple[int, ...]
    same: Hashable
    read: Callable[[], npt.NDArray[Any]]


def write_state(
    state: Mapping[str, Any], to: SinkFile, advance: Callable[[int], object] = lambda n_bytes: None
) -> list[TensorChunk]:
    """Write a dict, and return what the index of dense tensors says of it.

    The state is as :func:`recckpt.dense.state_copy.portable` returns it, and may hold tensors that come :class:`Later`,
    of which one at a time is in memory. ``advance`` counts bytes of tensors.
    """
    records, checksums = _Records(), []

    def written() -> Iterator[memoryview]:
        for read in records.reads:
            data = read()
            checksums.append(block_checksums(data))
            yield data
            advance(len(data))

    places = write_archive(to, ArchiveContents(pickled(dict(state), records.place), written()))
    named = {name: placed for name, value in state.items() if (placed := records.place(value)) is not None}
    return [
        _chunk(name, placed, places[placed.record.number], checksums[placed.record.number])
        for name, placed in sorted(named.items(), key=lambda item: item[1].record.number)
    ]


def _chunk(name: str, placed: Placed, at: int, checksums: tuple[int, ...]) -> TensorChunk:
    shape = placed.shape
    return TensorChunk(MODEL, name, placed.dtype, shape, (0,) * len(shape), shape, MODEL_FILE, at, checksums)


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
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        record = self._record((storage._cdata, dtype), storage.nbytes(), lambda: memory.numpy().data)
        return Placed(dtype, record, int(value.storage_offset()), tuple(value.shape), value.stride())

    def _record(self, key: Hashable, n_bytes: int, read: Callable[[], memoryview]) -> Record:
        if key not in self._known:
            self._known[key] = Record(len(self.reads), n_bytes)
            self.reads.append(read)
        return self._known[key]


def _bytes(values: npt.NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class Record:
    """The bytes of one or more tensors of one dtype, by its number among the records of the file."""

    number: int
    n_bytes: int


@dataclass(frozen=True)
class Placed:
    """Where in a record the values of a tensor lie; offset and strides count items."""

    dtype: str
    record: Record
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def pickled(state: Any, placed: Callable[[Any], Placed | None]) -> bytes:
    """Return the pickle of a state; ``placed`` returns the place of the tensor that an object stands for."""
    file = io.BytesIO()
    _Pickler(file, placed).dump(ByValue().of(state))
    return file.getvalue()


@dataclass(frozen=True)
class _Storage:
    dtype: str
    record: Record


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, placed: Callable[[Any], Placed | None]) -> None:
        super().__init__(file, protocol=2)
        self._placed = placed

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not _Storage:
            return None
        kind, number, n_bytes = STORAGES.get(obj.dtype), str(obj.record.number), obj.record.n_bytes
        if kind is None:
            return "storage", torch.UntypedStorage, number, "cpu", n_bytes
        return "storage", getattr(torch, kind), number, "cpu", n_bytes // getattr(torch, obj.dtype).itemsize

    def reducer_override(self, obj: Any) -> Any:
        placed = self._placed(obj)
        if placed is None:
            return NotImplemented
        hooks: OrderedDict[Any, Any] = OrderedDict()
        args = (_Storage(placed.dtype, placed.record), placed.offset, placed.shape, placed.strides, False, hooks)
        if placed.dtype in STORAGES:
            return _rebuild_tensor_v2, args
        return _rebuild_tensor_v3, (*args, getattr(torch, placed.dtype))
