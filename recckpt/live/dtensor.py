"""Where the rows of a DTensor lie: known from its mesh, without asking other ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from recckpt.dense.sharded import is_sharded
from recckpt.parallel.ranks import rank_and_size
from recckpt.types import Box


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put the parts of parameters back in their places, where it has left what it gathered for a forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if hasattr(fsdp, "FSDPModule") else ():
        if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]  # it has the class, as looked for above
            module.reshard()


def why_not_by_rows(weight: Any) -> str | None:
    """Return why a sharded weight cannot be saved by rows, None where it can."""
    placements = getattr(weight, "placements", None)
    if placements is None:
        return f"its weight is a {type(weight).__name__}, which is saved in pieces: use DTensor"
    text = ", ".join(map(repr, placements))
    for kind in placements:
        if kind.is_shard() and kind.dim != 0:
            return f"its columns lie apart ({text}), which is not yet saved by rows: shard it by rows, Shard(0)"
        if not (kind.is_shard() or kind.is_replicate()):
            what = "are partial sums" if kind.is_partial() else "do not lie in one range on a rank, as by FSDP2 over TP"
            return f"its rows {what} ({text}): use Shard(0) and Replicate(), in any order"
    n_ranks = rank_and_size()[1]
    if weight.device_mesh.size() != n_ranks:
        return f"its mesh has {weight.device_mesh.size()} of {n_ranks} ranks: make one of all of them"
    local = local_of(weight)
    if type(local) not in (Tensor, nn.Parameter):
        return f"its part of a rank is a {type(local).__name__}: make it of plain tensors"
    return None


def box_of(weight: Any) -> Box:
    """Return the rows of a weight that this rank has; each dimension of the mesh cuts what those before it leave."""
    mesh = weight.device_mesh
    first, end, replica, n_replicas = 0, int(weight.shape[0]), 0, 1
    for at, size, placement in zip(mesh.get_coordinate(), mesh.shape, weight.placements, strict=True):
        if placement.is_replicate():
            replica, n_replicas = replica * size + at, n_replicas * size
        else:
            n_rows = -(-(end - first) // size)  # of a chunk, but for the last ones
            first, end = min(first + n_rows * at, end), min(first + n_rows * (at + 1), end)
    return Box((first, end) if first < end else (0, 0), replica, n_replicas)


def layout_of(tensor: Any) -> tuple[Any, ...]:
    """Return what is equal of tensors that lie alike on all ranks."""
    return tuple(tensor.shape), getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


def local_of(tensor: Any) -> Tensor:
    """Return what this rank has of a tensor, in the memory where it lies: all of one that is not sharded."""
    if not is_sharded(tensor):
        return tensor  # type: ignore[no-any-return]  # it is one
    with torch.no_grad():  # else torch makes a view for a backward pass
        return tensor.to_local()  # type: ignore[no-any-return]


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor lies, and how often it was written in place: torch counts for a DTensor and its part."""
    local = local_of(tensor)
    return local.data_ptr(), local._version + (0 if local is tensor else tensor._version)
