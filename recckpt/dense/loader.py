"""Dense state from a checkpoint: ``.pt`` files without running any code, and the pieces of sharded tensors."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch import Tensor

from recckpt.dense.by_value import MAPPINGS
from recckpt.dense.sharded import STAND_IN, Pieces, is_sharded, may_be_sharded, own_boxes
from recckpt.dense.tensors import DenseTensors, Read, StoredTensor
from recckpt.errors import CorruptCheckpointError
from recckpt.format import layout
from recckpt.format.manifest import FileEntry
from recckpt.output_dir.checkpoint_dir import read_checked
from recckpt.storage.base import Files

StoredValue = Tensor | StoredTensor


def load_state(storage: Files, directory: str, entry: FileEntry) -> dict[str, Any]:
    """Return the dict in a ``.pt`` file, checked, on the CPU; :func:`loaded` has the errors."""
    data, path = read_checked(storage, directory, entry), layout.join(directory, entry.name)
    return loaded(io.BytesIO(data), path, "cpu")


def loaded(file: BinaryIO, path: str, device: str) -> dict[Any, Any]:
    """Return the dict in a file of torch.save, without running any code from it; messages call it ``path``.

    A CorruptCheckpointError says that it is not a torch file, or needs code to run.
    """
    try:
        state = torch.load(file, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # its bytes are those that were written, so whoever wrote them meant harm
        found, remedy = f"not loadable ({_reason(error)})", "do not load this file with weights_only=False"
        raise CorruptCheckpointError(
            path, "", found=found, expected="tensors and plain data", remedy=f"nothing of it was run; {remedy}"
        ) from error
    if not isinstance(state, dict):
        raise CorruptCheckpointError(path, "", found=type(state).__name__, expected="a dict")
    return state


def _reason(error: Exception) -> str:
    """Return what torch says is wrong, without its advice to load the file all the same."""
    lines = [line.strip().partition("WeightsUnpickler error: ")[-1] or line.strip() for line in str(error).splitlines()]
    advice = ("weights_only", "Weights only load failed")
    lines = [line.partition(" Please ")[0] for line in lines if line and not any(words in line for words in advice)]
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__


def check_indexed(
    state: Mapping[str, Any], tensors: Mapping[str, StoredTensor], names: Iterable[str], path: str
) -> None:
    """Check that ``model.pt`` holds what the index lists, and of plain values what the manifest names, and no more."""
    expected = {name: _described(tensors.get(name)) for name in names if not _is_elsewhere(tensors.get(name))}
    found = {name: _described(value) for name, value in state.items()}
    for name in (*expected, *found):
        if expected.get(name) != found.get(name):
            there, listed = found.get(name, "nothing"), expected.get(name, "nothing")
            raise CorruptCheckpointError(path, repr(name), found=there, expected=f"{listed}, by index and manifest")


def _is_elsewhere(tensor: StoredTensor | None) -> bool:
    return tensor is not None and tensor.is_sharded


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor | StoredTensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return "plain data"


def is_as_stored(live: Any, stored: StoredTensor) -> bool:
    """Say whether a tensor of a model has the stored values already, by their checksums; what is sharded has not."""
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
    """Return stored values in the form of a tensor of the model, on the CPU; of a sharded one only what is here.

    Where sizes differ the values are cut, or padded by those of the model. Without ``live`` all values come as a plain
    tensor; without ``dtype`` they get that of ``live``.
    """
    if live is None:
        return box_of(stored, (0,) * len(stored.shape), tuple(stored.shape), reader)
    parts = []
    for piece in Pieces().of("", live):
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
    """Return the state of a registered object with the tensors in it that are sharded, there or here, as here.

    ``like`` is state of the same form whose tensors are laid out as wanted; what it lacks comes as plain tensors.
    """
    if stands_in(saved):
        stored = reader.of_extra(saved[STAND_IN])
        fits = isinstance(like, Tensor) and tuple(like.shape) == stored.shape
        return as_live(stored, like if fits else None, reader, _dtype(stored))
    if isinstance(saved, Tensor):
        fits = may_be_sharded() and is_sharded(like) and like.shape == saved.shape
        return as_live(saved, like, reader, saved.dtype) if fits else saved
    if type(saved) in MAPPINGS:
        return type(saved)({key: fitted(item, _below(like, key), reader) for key, item in saved.items()})
    if type(saved) in (list, tuple):
        return type(saved)(fitted(item, _below(like, i), reader) for i, item in enumerate(saved))
    return saved


def stands_in(value: Any) -> bool:
    """Say whether a value of ``extra.pt`` stands for a sharded tensor."""
    return type(value) is dict and value.keys() == {STAND_IN} and isinstance(value[STAND_IN], str)


def has_stand_ins(state: Any) -> bool:
    """Say whether a state has sharded tensors in it."""
    if isinstance(state, Mapping):
        return stands_in(state) or any(map(has_stand_ins, state.values()))
    return type(state) in (list, tuple) and any(map(has_stand_ins, state))


def _below(like: Any, key: Any) -> Any:
    if isinstance(like, Mapping):
        return like.get(key)
    return like[key] if isinstance(like, list | tuple) and isinstance(key, int) and key < len(like) else None


def box_of(stored: StoredValue, offsets: Sequence[int], sizes: tuple[int, ...], reader: DenseTensors) -> Tensor:
    """Return a box of a stored tensor, on the CPU."""
    if isinstance(stored, StoredTensor):
        values = reader.read_box(stored, sizes, planned_reads(stored, offsets, sizes))
        return torch.from_numpy(values).view(_dtype(stored))
    place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
    return stored[place].clone() if place else stored


def _dtype(stored: StoredTensor) -> torch.dtype:
    dtype = getattr(torch, stored.dtype)
    assert isinstance(dtype, torch.dtype)  # of the allow-list
    return dtype


def planned_reads(stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[Read]:
    """Return which boxes of a stored tensor's chunks make up a box of the tensor."""
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
    """Return a sharded tensor like ``live`` with other values on this rank, one tensor for each of its pieces."""
    new_pieces, of_several = list(pieces), cast(Any, live)
    if hasattr(live, "device_mesh"):
        from torch.distributed.tensor import DTensor

        mesh, kinds = of_several.device_mesh, of_several.placements
        boxes = own_boxes(live)
        if boxes is not None:
            local = type(boxes)(new_pieces, boxes.local_offsets())
        else:
            local = new_pieces[0] if new_pieces else of_several.to_local()  # a rank that is not of the mesh has nothing
        return DTensor.from_local(local, mesh, kinds, run_check=False, shape=live.shape, stride=live.stride())
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    pairs = zip(new_pieces, of_several.local_shards(), strict=True)
    shards = [Shard(values.to(shard.tensor.device), shard.metadata) for values, shard in pairs]
    group = of_several._process_group
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, of_several.metadata(), process_group=group)
