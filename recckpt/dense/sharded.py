"""Tensors whose values lie on several ranks (DTensor, FSDP2, ShardedTensor): the only place that knows their kinds.

Which part of a tensor a rank has, and of which stored parts it is made, is planned by torch.distributed.checkpoint.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from recckpt.dense.tensors import Read
from recckpt.dense.tiling import StoredTensor

_KINDS = {"torch.distributed.tensor": "DTensor", "torch.distributed._shard.sharded_tensor": "ShardedTensor"}
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Piece:
    """What this rank has of a tensor: the box of ``values`` that begins at ``offsets``."""

    offsets: tuple[int, ...]
    values: Tensor


def is_sharded(value: Any) -> bool:
    """Say whether a value is a tensor of several ranks; imports nothing for it."""
    return not (type(value) in _PLAIN or not isinstance(value, Tensor)) and isinstance(value, _kinds())


def may_be_sharded() -> bool:
    """Say whether there can be any such tensor in this process."""
    return bool(_kinds())


def n_values(value: Tensor) -> int:
    """Return the number of values of a tensor, over all ranks."""
    return math.prod(value.shape)


def local_bytes(value: Tensor) -> int:
    """Return about how many bytes of a tensor this rank writes."""
    n_bytes = n_values(value) * value.dtype.itemsize
    mesh = getattr(value, "device_mesh", None)
    if mesh is not None:
        return n_bytes // int(mesh.size()) if mesh.get_coordinate() is not None else 0
    return sum(piece.values.nbytes for piece in Pieces().of("", value))


class Pieces:
    """Finds what this rank has of tensors, for one save or load: tensors that are laid out alike are looked at once."""

    def __init__(self) -> None:
        self._known: dict[Any, Piece] = {}

    @torch.no_grad()
    def of(self, name: str, value: Tensor) -> list[Piece]:
        """Return what this rank has of a tensor, sharded or not; the values are the tensor's own.

        Raises:
            ValueError: values that are only summands of what the tensor is, or fewer or more than its layout gives this
                rank, so that nobody knows where they belong; names it.
        """
        one = cast(Any, value)
        kind = (value.shape, one.device_mesh, one.placements) if hasattr(value, "device_mesh") else None
        if kind in self._known:
            known = self._known[kind]
            return [Piece(known.offsets, _checked(name, value, one.to_local(), known.values.shape))]
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: value}, None, is_coordinator=False)
        try:
            items = planner.create_local_plan().items
        except ValueError as error:
            raise ValueError(f"{name}: {error} Redistribute it to Shard or Replicate before the save") from error
        pieces = [Piece(tuple(i.index.offset or ()), cast(Tensor, planner.resolve_data(i)).detach()) for i in items]
        for item, piece in zip(items, pieces, strict=True):
            _checked(name, value, piece.values, cast(Any, item.tensor_data).chunk.sizes)
        if kind is not None and pieces:
            self._known[kind] = pieces[0]
        return pieces


def is_written_here(name: str, value: Tensor, piece: Piece) -> bool:
    """Say whether this rank is the one, of those that have a piece of a sharded tensor, that writes it.

    Each rank can tell by itself, and the work is shared out by names and places.
    """
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return True
    replica, replicas = 0, 1
    for dim, placement in enumerate(cast(Any, value).placements):
        if placement.is_replicate():
            replica, replicas = replica * mesh.size(dim) + mesh.get_coordinate()[dim], replicas * mesh.size(dim)
    return replicas == 1 or xxhash.xxh3_64_intdigest(f"{name} {piece.offsets}".encode()) % replicas == replica


def planned_reads(stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[Read]:
    """Return which boxes of a stored tensor's chunks make up a box of the tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    boxes = [(chunk.offsets, chunk.sizes) for _, chunk in stored.chunks]
    numbers = [n for n, (_, box) in enumerate(boxes) if math.prod(box)]
    there = [ChunkStorageMetadata(torch.Size(boxes[n][0]), torch.Size(boxes[n][1])) for n in numbers]
    wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    if not math.prod(sizes):
        return []
    stored_as = TensorStorageMetadata(TensorProperties(), torch.Size(stored.shape), there)
    return [
        Read(
            numbers[item.storage_index.index or 0],
            tuple(item.storage_offsets),
            tuple(item.dest_offsets),
            tuple(item.lengths),
        )
        for item in create_read_items_for_chunk_list(stored.name, stored_as, [wanted])
    ]


def with_values(live: Tensor, pieces: Iterable[Tensor]) -> Tensor:
    """Return a sharded tensor like ``live`` with other values on this rank, one tensor for each of its pieces."""
    given, of_several = list(pieces), cast(Any, live)
    if hasattr(live, "device_mesh"):
        from torch.distributed.tensor import DTensor

        mesh, kinds = of_several.device_mesh, of_several.placements
        local = given[0] if given else of_several.to_local()  # a rank that is not of the mesh has nothing
        return DTensor.from_local(local, mesh, kinds, run_check=False, shape=live.shape, stride=live.stride())
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    held = zip(given, of_several.local_shards(), strict=True)
    shards = [Shard(values.to(shard.tensor.device), shard.metadata) for values, shard in held]
    group = of_several._process_group
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, of_several.metadata(), process_group=group)


def _checked(name: str, value: Tensor, found: Tensor, expected: Sequence[int]) -> Tensor:
    """Return what this rank has of a tensor, if it is as large as the layout of the tensor says."""
    if tuple(found.shape) != tuple(expected):
        parts = f"found {tuple(found.shape)} of {tuple(value.shape)} on this rank, expected {tuple(expected)}"
        placements = getattr(value, "placements", "")
        raise ValueError(
            f"{name or 'a sharded tensor'}: {parts} by its layout {placements}; make it by distribute_tensor"
        )
    return found


def _kinds() -> tuple[type, ...]:
    """Return the types of sharded tensors that somebody has imported: without that there are none."""
    modules = ((sys.modules.get(module), name) for module, name in _KINDS.items())
    return tuple(getattr(module, name) for module, name in modules if hasattr(module, name))
