"""Sharded tensors, whose values are on several ranks (DTensor, FSDP2, ShardedTensor), and the parts that a rank saves.

Any local tensor with the four attributes of ``CheckpointableTensor`` is also sharded. This is a protocol of
torch.distributed.checkpoint (pytorch/pytorch#189492) and meta-pytorch/torch_checkpointing. ``global_shape`` is the
shape of the whole tensor. The other three have one entry per shard on this rank: ``global_offsets`` is the begin of the
shard in the whole tensor, ``local_offsets`` its begin in the local tensor, ``local_sizes`` its shape.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any, cast

import torch
import xxhash
from torch import Tensor

from recckpt.dense.state_copy import MAPPINGS, Copy, Place, are_plain, portable
from recckpt.dense.tensors import Tile, overlap
from recckpt.format.tensor_index import EXTRA, MODEL, NUMPY_DTYPES
from recckpt.types import GEOMETRY

_KINDS = {"torch.distributed.tensor": "DTensor", "torch.distributed._shard.sharded_tensor": "ShardedTensor"}
_PLAIN = (Tensor, torch.nn.Parameter)
STAND_IN = "recckpt.sharded"  # part of the format: in extra.pt, a dict with this key alone replaces a sharded tensor


@dataclass(frozen=True)
class LocalBox:
    offsets: tuple[int, ...]
    values: Tensor


def is_sharded(value: Any) -> bool:
    """Return whether a value is a sharded tensor; imports nothing."""
    if not isinstance(value, Tensor):
        return False
    has_geometry = hasattr(value, GEOMETRY[1]) and all(hasattr(value, name) for name in GEOMETRY)
    return has_geometry or (type(value) not in _PLAIN and isinstance(value, _kinds()))


def own_shards(name: str, value: Any) -> list[tuple[tuple[int, ...], tuple[slice, ...]]] | None:
    """Return (begin in the whole tensor, slices of the local tensor) per shard of a CheckpointableTensor; else None.

    Raises:
        ValueError: the attributes contradict each other or the tensor.
    """
    if not all(hasattr(value, attribute) for attribute in GEOMETRY):
        return None
    whole, *of_shards = (getattr(value, attribute) for attribute in GEOMETRY)
    here, shards = tuple(value.shape), []
    try:
        is_right = len({*map(len, of_shards)}) == 1 and len(whole) == len(here)
        is_right &= min(map(index, whole), default=0) >= 0
        for of_shard in zip(*of_shards, strict=False):
            begins, at, sizes = (tuple(map(index, numbers)) for numbers in of_shard)
            is_right &= len(here) == len(begins) == len(at) == len(sizes)
            sides = [*zip(begins, sizes, whole, strict=False), *zip(at, sizes, here, strict=False)]
            is_right &= all(min(begin, size) >= 0 and begin + size <= end for begin, size, end in sides)
            shards.append((begins, tuple(slice(begin, begin + n) for begin, n in zip(at, sizes, strict=False))))
    except TypeError:  # not tuples of ints
        is_right = False
    if not is_right:
        parts = ", ".join(f"{attribute} {getattr(value, attribute)!r:.80}" for attribute in GEOMETRY)
        raise ValueError(f"{name or 'a tensor'}: found {parts} of a tensor {here}, expected shards inside both")
    return shards


def may_be_sharded() -> bool:
    return bool(_kinds())


def _kinds() -> tuple[type, ...]:
    """Return the types of sharded tensors from imported modules; modules that are not imported have made no tensors."""
    modules = ((sys.modules.get(module), name) for module, name in _KINDS.items())
    return tuple(getattr(module, name) for module, name in modules if hasattr(module, name))


def local_bytes(value: Tensor) -> int:
    n_bytes = math.prod(value.shape) * value.dtype.itemsize  # on all ranks
    mesh = getattr(value, "device_mesh", None)
    if mesh is not None:
        return n_bytes // int(mesh.size()) if mesh.get_coordinate() is not None else 0
    return sum(piece.values.nbytes for piece in local_boxes("", value))


@torch.no_grad()
def local_boxes(name: str, value: Tensor, known: dict[Any, LocalBox] | None = None) -> list[LocalBox]:
    """Return this rank's parts of a tensor, sharded or not, as views; ``known`` caches results by layout.

    Raises ValueError, with the tensor's name, if the tensor holds partial sums, or its local values do not fit its
    layout or attributes.
    """
    if (shards := own_shards(name, value)) is not None:
        local = value.detach().as_subclass(Tensor)
        return [LocalBox(offsets, local[place]) for offsets, place in shards]
    one, known = cast(Any, value), {} if known is None else known
    is_one_box = hasattr(value, "device_mesh") and own_boxes(value) is None
    kind = (value.shape, one.device_mesh, one.placements) if is_one_box else None
    if kind in known:
        return [LocalBox(known[kind].offsets, _checked(name, value, one.to_local(), known[kind].values.shape))]
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: value}, None, is_coordinator=False)
    try:
        items = planner.create_local_plan().items
    except ValueError as error:
        raise ValueError(f"{name}: {error} Redistribute it to Shard or Replicate before the save") from error
    boxes = [LocalBox(tuple(i.index.offset or ()), cast(Tensor, planner.resolve_data(i)).detach()) for i in items]
    for item, box in zip(items, boxes, strict=True):
        _checked(name, value, box.values, cast(Any, item.tensor_data).chunk.sizes)
    if kind is not None and boxes:
        known[kind] = boxes[0]
    return boxes


def laid_out_as(like: Tensor, values: Tensor) -> Tensor:
    """Return values, with the attributes of ``like`` if this is a CheckpointableTensor of the same shape."""
    if (
        not all(hasattr(like, attribute) for attribute in GEOMETRY)
        or hasattr(values, GEOMETRY[1])
        or values.shape != like.shape
    ):
        return values
    alias = values.detach()
    for attribute in GEOMETRY:
        setattr(alias, attribute, getattr(like, attribute))
    return alias


def own_boxes(value: Tensor) -> Any:
    """Return the local part of a DTensor made by TorchRec, which lists its shards; None for other values.

    The placements of these DTensors do not show where the shards are.
    """
    local = cast(Any, value).to_local() if hasattr(value, "device_mesh") else None
    return local if callable(getattr(local, "local_shards", None)) else None


def _checked(name: str, value: Tensor, found: Tensor, expected: Sequence[int]) -> Tensor:
    if tuple(found.shape) != tuple(expected):
        parts = f"found {tuple(found.shape)} of {tuple(value.shape)} on this rank, expected {tuple(expected)}"
        placements = getattr(value, "placements", "")
        raise ValueError(
            f"{name or 'a sharded tensor'}: {parts} by its layout {placements}; make the tensor by distribute_tensor"
        )
    return found


@dataclass(frozen=True)
class OwnChunk:
    of: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Share:
    dtype: str
    shape: tuple[int, ...]
    n_values: int
    tiles: tuple[Tile, ...] = ()  # tiles of the values, if the tensor's attributes declare them


@dataclass(frozen=True)
class Summary:
    """The values that ranks compare first: a digest of names, dtypes and shapes, and two numbers of values.

    ``n_values`` counts the values of all tensors, ``n_own`` the values that this rank writes.
    """

    digest: int
    n_values: int
    n_own: int
    is_trusted: bool = True  # whether torch made all layouts, so that numbers of values suffice as a check


@dataclass(frozen=True)
class ShardedState:
    chunks: Sequence[OwnChunk] = ()
    shares: Mapping[str, Share] = field(default_factory=dict)

    @cached_property
    def summary(self) -> Summary:
        names = repr(sorted((name, share.dtype, share.shape) for name, share in self.shares.items()))
        n_values = sum(math.prod(share.shape) for share in self.shares.values())
        n_own = sum(share.n_values for share in self.shares.values())
        is_trusted = not any(share.tiles for share in self.shares.values())
        return Summary(xxhash.xxh3_64_intdigest(names.encode()), n_values, n_own, is_trusted)


def is_whole(summaries: Sequence[Summary]) -> bool:
    """Return whether all ranks have the same tensors and together write all values; if not, compare their shares."""
    kinds = {(summary.digest, summary.n_values, summary.is_trusted) for summary in summaries}
    return (
        len(kinds) == 1
        and summaries[0].is_trusted
        and summaries[0].n_values == sum(summary.n_own for summary in summaries)
    )


def check_shares(shares: Sequence[Mapping[str, Share]]) -> None:
    """Raise ValueError unless all ranks agree on each tensor and together write each of its values once."""
    kinds: dict[str, tuple[int, Share]] = {}
    written: Counter[str] = Counter()
    for rank, own in enumerate(shares):
        for name, share in own.items():
            first, known = kinds.setdefault(name, (rank, share))
            if (share.dtype, share.shape) != (known.dtype, known.shape):
                one, other = f"{known.dtype} {known.shape} on rank {first}", f"{share.dtype} {share.shape} on {rank}"
                raise ValueError(f"sharded tensor {_called(name)}: found {one}, {other}; expected equal ones")
            written[name] += share.n_values
    for name, (_, share) in kinds.items():
        if written[name] != math.prod(share.shape):
            found = f"found {written[name]} values on {len(shares)} ranks, expected {math.prod(share.shape)}"
            remedy = "save on all ranks that have a part of the tensor"
            if written[name] > math.prod(share.shape):
                remedy = "several ranks have the same part, and it is not known which rank writes it: use DTensor"
            raise ValueError(f"sharded tensor {_called(name)}: {found}; {remedy}")
        tiles = [tile for own in shares if name in own for tile in own[name].tiles]
        if (twice := overlap(tiles)) is not None:
            found = f"found {twice.sizes} from {twice.offsets} on, which another shard also has in part"
            raise ValueError(f"sharded tensor {_called(name)}: {found}, expected each value once")


def model_names(shares: Sequence[Mapping[str, Share]]) -> list[str]:
    fqns = dict.fromkeys(fqn for own in shares for fqn in own)
    return [_called(fqn) for fqn in fqns if fqn.startswith(f"{MODEL}/")]


class ShardedTensors:
    """Collects the sharded tensors of a state while a save stages the state."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def take_from_model(self, state: Mapping[str, Any]) -> dict[str, Any]:
        self._tensors |= {f"{MODEL}/{name}": value for name, value in state.items() if is_sharded(value)}
        return {name: value for name, value in state.items() if not is_sharded(value)}

    def from_extra(self, copy: Copy) -> Copy:
        """Return a copy function that first replaces each sharded tensor in a registered object's state by a dict.

        The dict holds the name of the tensor, which is its place in the object: ``optim['state'][0]['exp_avg']``.
        """

        def taken(place: Place, state: Any) -> Any:
            if self._tensors or may_be_sharded():
                with suppress(RecursionError):  # portable() refuses the state later, with its name
                    state = self._stood_in(str(place[-1]), state)
            return copy(place, state)

        return taken

    def staged(self, copy: Copy) -> ShardedState:
        """Return copies of the chunks that this rank writes; ValueError, with its name, if a tensor cannot be saved."""
        chunks: list[OwnChunk] = []
        shares: dict[str, Share] = {}
        known = dict[Any, LocalBox]()
        for fqn, tensor in self._tensors.items():
            of, name = fqn.partition("/")[0], _called(fqn)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in NUMPY_DTYPES:
                raise ValueError(f"{name}: a sharded tensor of {tensor.dtype} cannot be saved; cast it")
            boxes = local_boxes(name, tensor, known)
            shape = tuple(getattr(tensor, GEOMETRY[0], tensor.shape))
            if not boxes and 0 in shape:  # write an empty chunk, because a tensor without chunks is not in the index
                boxes = [LocalBox((0,) * len(shape), torch.empty(shape, dtype=tensor.dtype, device="cpu"))]
            n_values, first = 0, len(chunks)
            for piece in boxes:
                if _is_written_here(fqn, tensor, piece) and (piece.values.numel() or 0 in shape):
                    place: Place = ("sharded", fqn, piece.offsets)
                    values = portable(name, copy(place, piece.values))
                    chunks.append(OwnChunk(of, name, dtype, shape, piece.offsets, values))
                    n_values += values.numel()
            own = [chunk for chunk in chunks[first:] if hasattr(tensor, GEOMETRY[1]) and chunk.values.numel()]
            tiles = tuple(Tile(chunk.offsets, tuple(chunk.values.shape)) for chunk in own)
            shares[fqn] = Share(dtype, shape, n_values, tiles)
        return ShardedState(chunks, shares)

    def _stood_in(self, name: str, value: Any) -> Any:
        if is_sharded(value):
            self._tensors[f"{EXTRA}/{name}"] = value
            return {STAND_IN: name}
        if type(value) in (*MAPPINGS, list, tuple) and are_plain(value.values() if type(value) in MAPPINGS else value):
            return value
        if type(value) in MAPPINGS:
            return type(value)({key: self._stood_in(f"{name}[{key!r}]", item) for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)(self._stood_in(f"{name}[{i}]", item) for i, item in enumerate(value))
        return value


def _called(fqn: str) -> str:  # without the prefix MODEL or EXTRA
    return fqn.partition("/")[2]


def _is_written_here(name: str, value: Tensor, piece: LocalBox) -> bool:
    """Return whether this rank writes a piece that several ranks have.

    Each rank decides alone, by a hash of the tensor's name and the piece's place that distributes the work evenly.
    """
    mesh = getattr(value, "device_mesh", None)
    if mesh is None:
        return True
    replica, replicas = 0, 1
    n_dims = mesh.ndim if own_boxes(value) is None else mesh.ndim - 1  # TorchRec shards tables over the last dimension
    for dim, placement in enumerate(cast(Any, value).placements[:n_dims]):
        if placement.is_replicate():
            replica, replicas = replica * mesh.size(dim) + mesh.get_coordinate()[dim], replicas * mesh.size(dim)
    return replicas == 1 or xxhash.xxh3_64_intdigest(f"{name} {piece.offsets}".encode()) % replicas == replica
