"""Tensors whose values lie on several ranks (DTensor, FSDP2, ShardedTensor): the only place that knows their kinds.

Which rank writes what, and which bytes a rank needs, is planned by torch.distributed.checkpoint.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from recckpt.dense.stored_shards import Read, StoredShards

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

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
    return sum(piece.values.nbytes for piece in local_pieces("", value))


def write_plan(tensors: Mapping[str, Tensor]) -> tuple[SavePlan, list[Tensor]]:
    """Return what this rank has of sharded tensors: an item each, and the values beside it.

    Raises:
        ValueError: values that are only summands of what the tensor is; names it.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    items: list[WriteItem] = []
    values: list[Tensor] = []
    for name, tensor in tensors.items():
        planner.set_up_planner({name: tensor}, None, is_coordinator=False)
        try:
            plan = planner.create_local_plan()
        except ValueError as error:
            raise ValueError(
                f"{_called(name)}: {error}; redistribute it to Shard or Replicate before the save"
            ) from error
        items += plan.items
        values += [cast(Tensor, planner.resolve_data(item)).detach() for item in plan.items]
    return SavePlan(items), values


def agreed_plan(plans: Sequence[SavePlan | None], rank: int) -> list[WriteItem]:
    """Return what this rank is to write, of what each rank has: of what several have, one writes it.

    Raises:
        ValueError: the ranks disagree on a tensor.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    found: dict[str, tuple[Any, int]] = {}
    for number, plan in enumerate(plans):
        for item in plan.items if plan else []:
            assert item.tensor_data is not None  # only tensors are planned
            kind = item.tensor_data.properties.dtype, tuple(item.tensor_data.size)
            known, first = found.setdefault(item.index.fqn, (kind, number))
            if known != kind:
                raise ValueError(f"{_called(item.index.fqn)}: {known} on rank {first}, {kind} on rank {number}")
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    agreed, _ = planner.create_global_plan([plan or SavePlan([]) for plan in plans])
    return agreed[rank].items


def local_pieces(name: str, value: Tensor) -> list[Piece]:
    """Return what this rank has of a tensor, sharded or not; the values are the tensor's own."""
    plan, values = write_plan({name: value})
    return [Piece(tuple(item.index.offset or ()), held) for item, held in zip(plan.items, values, strict=True)]


def planned_reads(stored: StoredShards, offsets: Sequence[int], sizes: Sequence[int]) -> list[Read]:
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


def _called(name: str) -> str:
    """Return the name of a tensor, without whose it is."""
    return name.partition("/")[2]


def _kinds() -> tuple[type, ...]:
    """Return the types of sharded tensors that somebody has imported: without that there are none."""
    modules = ((sys.modules.get(module), name) for module, name in _KINDS.items())
    return tuple(getattr(module, name) for module, name in modules if hasattr(module, name))
