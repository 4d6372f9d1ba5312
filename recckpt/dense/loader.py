"""Loads dense state from a checkpoint: ``.pt`` files, without running code from them, and sharded tensors."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from recckpt.dense.sharded import STAND_IN, is_sharded, laid_out_as, local_boxes, own_boxes, own_shards
from recckpt.dense.state_copy import MAPPINGS
from recckpt.dense.tensors import DenseTensors, Read, StoredTensor
from recckpt.dense.torch_archive import HEADER_BYTES, LoadableArchive, check_loadable, data_begin
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.format.tensor_index import NUMPY_DTYPES, STORAGES
from recckpt.output_dir.checkpoint_dir import map_checked, read_checked
from recckpt.output_dir.open_files import MappedFile
from recckpt.storage.base import Files
from recckpt.storage.local_files import drop_pages
from recckpt.types import GEOMETRY

StoredValue = Tensor | StoredTensor
_STEP_BYTES = 1 << 20
_DTYPES = {f"torch {name}": getattr(torch, name) for name in NUMPY_DTYPES if hasattr(torch, name)}
_DTYPES |= {f"torch {kind}": getattr(torch, dtype) for dtype, kind in STORAGES.items()}
_DTYPES["torch.storage UntypedStorage"] = torch.uint8
_KINDS: Mapping[str, Callable[..., Any]] = {
    "torch Size": torch.Size,
    "torch device": torch.device,
    "collections OrderedDict": OrderedDict,
    "collections Counter": Counter,
    "__builtin__ set": set,
    "__builtin__ complex": complex,
}


def load_state(storage: Files, directory: str, entry: FileEntry, *, is_mapped: bool = True) -> dict[str, Any]:
    """Return the dict in a ``.pt`` file, on the CPU; CorruptCheckpointError as in :func:`unpickled`."""
    checked = (map_checked if is_mapped else read_checked)(storage, directory, entry)
    data, is_map = memoryview(checked), isinstance(checked, memoryview)

    def read(record: zipfile.ZipInfo) -> torch.UntypedStorage:
        """Copy a record in steps, so that the system can drop mapped pages meanwhile."""
        header = data[record.header_offset : record.header_offset + HEADER_BYTES]
        at, n_bytes = data_begin(record, header), record.file_size
        if at + n_bytes > len(data):
            raise ValueError(f"{record.filename} ends at byte {at + n_bytes} of {len(data)}")
        values = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        there, here = data[at : at + n_bytes], values.numpy()
        for begin in range(0, n_bytes, _STEP_BYTES):
            step = slice(begin, begin + _STEP_BYTES)
            here[step] = np.frombuffer(there[step], np.uint8)
            if is_map and n_bytes >= _STEP_BYTES:
                drop_pages(there[step])
        return values.untyped_storage()

    return unpickled(cast(BinaryIO, MappedFile(data)), layout.join(directory, entry.name), read)


def unpickled(content: BinaryIO, path: str, read: Callable[[zipfile.ZipInfo], torch.UntypedStorage]) -> dict[Any, Any]:
    """Return the dict in a torch.save file without running code from the file; about as fast as pickle.

    ``read`` is called once per record and returns its storage. Raises CorruptCheckpointError if the file was not
    written by torch.save, or refers to objects other than tensors and plain data.
    """
    archive = check_loadable(content, path)
    try:
        state: dict[Any, Any] = _Unpickler(archive, read).load()
    except Exception as error:  # crafted, not damaged, because the checksum fits
        found = f"not loadable ({type(error).__name__}: {error!s:.200})"
        raise CorruptCheckpointError(path, "", found=found, expected="tensors and plain data") from error
    return state


class _Unpickler(pickle.Unpickler):
    """Resolves the names that :func:`check_loadable` allows to own functions, so a pickle cannot change others."""

    def __init__(self, archive: LoadableArchive, read: Callable[[zipfile.ZipInfo], torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(archive.pickle))
        self._archive, self._read = archive, read
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._known: Mapping[str, Any] = {
            "torch._utils _rebuild_tensor_v2": lambda storage, *args: _tensor(*storage, *_plain(args, 5)),
            "torch._utils _rebuild_tensor_v3": lambda storage, *args: _tensor(storage[0], args[5], *_plain(args, 6)),
            "torch._utils _rebuild_parameter": lambda values, requires_grad, hooks: nn.Parameter(values, requires_grad),
            "_codecs encode": lambda text, encoding: text.encode("latin1"),
            **{name: partial(kind) for name, kind in _KINDS.items()},  # files can set attributes only on these
            **_DTYPES,
        }

    def find_class(self, module: str, name: str) -> Any:
        return self._known[f"{module} {name}"]

    def persistent_load(self, pid: Any) -> tuple[torch.UntypedStorage, torch.dtype]:
        _, dtype, number, _, n_values = pid
        if number not in self._storages:
            n_bytes, record = n_values * dtype.itemsize, self._archive.entries[f"{self._archive.root}/data/{number}"]
            is_as_it_is = record.compress_type == zipfile.ZIP_STORED and not record.flag_bits & 1
            if not is_as_it_is or not record.file_size == record.compress_size == n_bytes:
                found = f"{record.filename} is {record.file_size} bytes"
                raise ValueError(f"{found}, expected {n_bytes}, not compressed")
            self._storages[number] = self._read(record)
        return self._storages[number], dtype


def _plain(args: tuple[Any, ...], n_args: int) -> tuple[Any, ...]:
    """Return offset, shape and strides; refuse further attributes, such as the ones of conjugate tensors."""
    if any(args[n_args:]):
        raise ValueError(f"a tensor with {args[n_args]}")
    return args[:3]


def _tensor(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if 0 not in shape and not 0 <= last < storage.nbytes() // dtype.itemsize:  # torch would enlarge the storage
        raise ValueError(f"a tensor of {shape} ends at value {last} of {storage.nbytes()} bytes")
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


def check_indexed(
    state: Mapping[str, Any], tensors: Mapping[str, StoredTensor], names: Iterable[str], path: str
) -> None:
    """Check that ``model.pt`` holds exactly the tensors of the index and the plain values of the manifest."""
    elsewhere = {name for name, tensor in tensors.items() if tensor.is_sharded}
    expected = {name: _described(tensors.get(name)) for name in names if name not in elsewhere}
    found = {name: _described(value) for name, value in state.items()}
    for name in (*expected, *found):
        if expected.get(name) != found.get(name):
            there, listed = found.get(name, "nothing"), expected.get(name, "nothing")
            raise CorruptCheckpointError(path, repr(name), found=there, expected=f"{listed}, by index and manifest")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | StoredTensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "plain data"


def is_as_stored(live: Any, stored: StoredTensor) -> bool:
    """Return whether a tensor already has the stored values, by checksum; False for sharded tensors."""
    index, chunk = stored.chunks[0]
    if not isinstance(live, Tensor) or is_sharded(live) or live.is_meta or len(stored.chunks) > 1:
        return False
    if (str(live.dtype).removeprefix("torch."), tuple(live.shape)) != (stored.dtype, stored.shape):
        return False
    data = live.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    blocks = torch.split(data, index.block_bytes) if len(data) else ()
    return all(
        xxhash.xxh3_64_intdigest(block.cpu().numpy().data) == checksum
        for block, checksum in zip(blocks, chunk.xxh3, strict=True)
    )


def as_live(stored: StoredValue, live: Tensor | None, reader: DenseTensors, dtype: torch.dtype | None = None) -> Tensor:
    """Return stored values on the CPU with the layout of ``live``; if ``live`` is sharded, only this rank's part.

    If sizes differ, values beyond the size of ``live`` are dropped, and missing values are copied from ``live``. If
    ``live`` is None, the result is a plain tensor. If ``dtype`` is None, the result has the dtype of ``live``.
    """
    if live is None:
        return box_of(stored, (0,) * len(stored.shape), tuple(stored.shape), reader)
    parts = []
    for piece in local_boxes("", live):
        sizes = tuple(piece.values.shape)
        ends = [min(begin + size, whole) for begin, size, whole in zip(piece.offsets, sizes, stored.shape, strict=True)]
        inside = tuple(max(0, end - begin) for begin, end in zip(piece.offsets, ends, strict=True))
        values = box_of(stored, piece.offsets, inside, reader).to(dtype or piece.values.dtype)
        if inside != sizes:
            padded = piece.values.detach().clone().cpu()
            padded[tuple(map(slice, inside))] = values
            values = padded
        parts.append(values)
    return with_values(live, parts) if is_sharded(live) else parts[0]


def fitted(saved: Any, like: Any, reader: DenseTensors) -> Any:
    """Return the saved state of a registered object; its sharded tensors get the layout of those in ``like``.

    ``like`` is a state of the same structure with the layout of this run. A sharded tensor that ``like`` lacks becomes
    a plain tensor.
    """
    if stands_in(saved):
        stored = reader.of_extra(saved[STAND_IN])
        fits = isinstance(like, Tensor) and tuple(getattr(like, GEOMETRY[0], like.shape)) == stored.shape
        return as_live(stored, like if fits else None, reader, _dtype(stored))
    if isinstance(saved, Tensor):
        fits = is_sharded(like) and getattr(like, GEOMETRY[0], like.shape) == saved.shape
        return as_live(saved, like, reader, saved.dtype) if fits else saved
    if type(saved) in MAPPINGS:
        return type(saved)({key: fitted(item, _below(like, key), reader) for key, item in saved.items()})
    if type(saved) in (list, tuple):
        return type(saved)(fitted(item, _below(like, i), reader) for i, item in enumerate(saved))
    return saved


def stands_in(value: Any) -> bool:
    return type(value) is dict and value.keys() == {STAND_IN} and isinstance(value[STAND_IN], str)


def has_stand_ins(state: Any) -> bool:
    if isinstance(state, Mapping):
        return stands_in(state) or any(map(has_stand_ins, state.values()))
    return type(state) in (list, tuple) and any(map(has_stand_ins, state))


def _below(like: Any, key: Any) -> Any:
    if isinstance(like, Mapping):
        return like.get(key)
    return like[key] if isinstance(like, list | tuple) and isinstance(key, int) and key < len(like) else None


def box_of(stored: StoredValue, offsets: Sequence[int], sizes: tuple[int, ...], reader: DenseTensors) -> Tensor:
    if isinstance(stored, StoredTensor):
        values = reader.read_box(stored, sizes, planned_reads(stored, offsets, sizes))
        return torch.from_numpy(values).view(_dtype(stored))
    place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
    return stored[place].clone() if place else stored


def _dtype(stored: StoredTensor) -> torch.dtype:
    dtype = getattr(torch, stored.dtype)
    assert isinstance(dtype, torch.dtype)  # the index allows these names only
    return dtype


def planned_reads(stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[Read]:
    if not math.prod(sizes):
        return []
    if len(stored.chunks) == 1:  # the imports below take a second
        return [Read(0, tuple(offsets), (0,) * len(sizes), tuple(sizes))]
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    boxes = [(chunk.offsets, chunk.sizes) for _, chunk in stored.chunks]
    numbers = [n for n, (_, box) in enumerate(boxes) if math.prod(box)]
    there = [ChunkStorageMetadata(torch.Size(boxes[n][0]), torch.Size(boxes[n][1])) for n in numbers]
    target = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    stored_as = TensorStorageMetadata(TensorProperties(), torch.Size(stored.shape), there)
    return [
        Read(
            numbers[item.storage_index.index or 0],
            tuple(item.storage_offsets),
            tuple(item.dest_offsets),
            tuple(item.lengths),
        )
        for item in create_read_items_for_chunk_list(stored.name, stored_as, [target])
    ]


def with_values(live: Tensor, pieces: Iterable[Tensor]) -> Tensor:
    """Return a sharded tensor like ``live`` with other local values; ``pieces`` has one tensor per local shard."""
    new_pieces, of_several = list(pieces), cast(Any, live)
    if (places := own_shards("", live)) is not None:
        local = live.detach().clone()
        for values, (_, place) in zip(new_pieces, places, strict=True):
            local[place] = values.to(local.device)
        return laid_out_as(live, local)
    if hasattr(live, "device_mesh"):
        from torch.distributed.tensor import DTensor

        mesh, kinds = of_several.device_mesh, of_several.placements
        boxes = own_boxes(live)
        if boxes is not None:
            local = type(boxes)(new_pieces, boxes.local_offsets())
        else:
            local = new_pieces[0] if new_pieces else of_several.to_local()  # a rank outside the mesh has no piece
        return DTensor.from_local(local, mesh, kinds, run_check=False, shape=live.shape, stride=live.stride())
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    pairs = zip(new_pieces, of_several.local_shards(), strict=True)
    shards = [Shard(values.to(shard.tensor.device), shard.metadata) for values, shard in pairs]
    group = of_several._process_group
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, of_several.metadata(), process_group=group)
