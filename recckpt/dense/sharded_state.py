"""What a save takes of sharded tensors: each rank its own pieces, and in extra.pt the name in place of the tensor."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash
from torch import Tensor

from recckpt.dense.buffers import Copy, Place
from recckpt.dense.portable import portable
from recckpt.dense.sharded import Pieces, is_sharded, is_written_here, may_be_sharded
from recckpt.format.dtypes import NUMPY_DTYPES
from recckpt.format.tensor_index import EXTRA, MODEL

STAND_IN = "recckpt.sharded"  # part of the format: the one key of the dict that stands for a tensor in extra.pt


@dataclass(frozen=True)
class OwnChunk:
    """A box of a sharded tensor that this rank writes."""

    of: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Share:
    """What a rank has of one sharded tensor: how many of its values it writes."""

    dtype: str
    shape: tuple[int, ...]
    n_values: int


@dataclass(frozen=True)
class Summary:
    """What the ranks compare: in most jobs that is all that is to be said.

    Attributes:
        digest: of names, dtypes and shapes.
        n_values: of all tensors, on all ranks.
        n_own: how many of them this rank writes.
    """

    digest: int
    n_values: int
    n_own: int


@dataclass(frozen=True)
class ShardedState:
    """What this rank writes of sharded tensors.

    Attributes:
        chunks: the boxes.
        shares: of each tensor that it has any part of.
    """

    chunks: Sequence[OwnChunk] = ()
    shares: Mapping[str, Share] = field(default_factory=dict)

    @cached_property
    def summary(self) -> Summary:
        """What other ranks compare with theirs."""
        names = repr(sorted((name, share.dtype, share.shape) for name, share in self.shares.items()))
        n_values = sum(math.prod(share.shape) for share in self.shares.values())
        n_own = sum(share.n_values for share in self.shares.values())
        return Summary(xxhash.xxh3_64_intdigest(names.encode()), n_values, n_own)


def is_whole(summaries: Sequence[Summary]) -> bool:
    """Say whether all ranks have the same tensors and write all of their values; where not, shares must be compared."""
    kinds = {(summary.digest, summary.n_values) for summary in summaries}
    return len(kinds) == 1 and summaries[0].n_values == sum(summary.n_own for summary in summaries)


def check_shares(shares: Sequence[Mapping[str, Share]]) -> None:
    """Check that the ranks agree on each tensor, and together write it once.

    Raises:
        ValueError: they do not; names it.
    """
    kinds: dict[str, tuple[int, Share]] = {}
    written: Counter[str] = Counter()
    for rank, own in enumerate(shares):
        for name, share in own.items():
            first, known = kinds.setdefault(name, (rank, share))
            if (share.dtype, share.shape) != (known.dtype, known.shape):
                one, other = f"{known.dtype} {known.shape} on rank {first}", f"{share.dtype} {share.shape} on {rank}"
                raise ValueError(f"sharded tensor {_called(name)}: found {one}, {other}; expected one of all ranks")
            written[name] += share.n_values
    for name, (_, share) in kinds.items():
        if written[name] != math.prod(share.shape):
            found = f"found {written[name]} values on {len(shares)} ranks, expected {math.prod(share.shape)}"
            raise ValueError(f"sharded tensor {_called(name)}: {found}; save on all ranks that have a part of it")


def model_names(shares: Sequence[Mapping[str, Share]]) -> list[str]:
    """Return the names of the model's tensors of which any rank has a share."""
    fqns = dict.fromkeys(fqn for own in shares for fqn in own)
    return [_called(fqn) for fqn in fqns if fqn.startswith(f"{MODEL}/")]


class ShardedTensors:
    """Gathers the sharded tensors of a state while it is staged."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def take_from_model(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Take the sharded tensors out of a model's state, and return the rest."""
        if not may_be_sharded():
            return dict(state)
        self._tensors |= {f"{MODEL}/{name}": value for name, value in state.items() if is_sharded(value)}
        return {name: value for name, value in state.items() if not is_sharded(value)}

    def from_extra(self, copy: Copy) -> Copy:
        """Return a copy function that takes the sharded tensors of a registered object first.

        In the state stands a dict with their name, which is the object's and the place in it, such as
        ``optim['state'][0]['exp_avg']``.
        """
        return lambda place, state: copy(place, self._without(str(place[-1]), state) if may_be_sharded() else state)

    def staged(self, copy: Copy) -> ShardedState:
        """Return what this rank writes of the tensors, copied.

        Raises:
            ValueError: a tensor cannot be saved; names it.
        """
        chunks: list[OwnChunk] = []
        shares: dict[str, Share] = {}
        pieces = Pieces()
        for fqn, tensor in self._tensors.items():
            of, name = fqn.partition("/")[0], _called(fqn)
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            if dtype not in NUMPY_DTYPES:
                raise ValueError(f"{name}: a sharded tensor of {tensor.dtype} cannot be saved; cast it")
            n_values = 0
            for piece in pieces.of(name, tensor):
                is_here = is_written_here(fqn, tensor, piece)
                if is_here and (piece.values.numel() or 0 in shape):
                    place: Place = ("sharded", fqn, piece.offsets)
                    values = portable(name, copy(place, piece.values))
                    chunks.append(OwnChunk(of, name, dtype, shape, piece.offsets, values))
                    n_values += values.numel()
            shares[fqn] = Share(dtype, shape, n_values)
        return ShardedState(chunks, shares)

    def _without(self, name: str, state: Any) -> Any:
        try:
            return self._stood_in(name, state)
        except RecursionError:
            return state  # which is refused by its name elsewhere

    def _stood_in(self, name: str, value: Any) -> Any:
        if is_sharded(value):
            self._tensors[f"{EXTRA}/{name}"] = value
            return {STAND_IN: name}
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._stood_in(f"{name}[{key!r}]", item)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._stood_in(f"{name}[{i}]", item) for i, item in enumerate(value))
        return value


def _called(fqn: str) -> str:
    """Return the name of a tensor, without whose it is."""
    return fqn.partition("/")[2]
