"""What a save takes of sharded tensors: each rank its own pieces, and in extra.pt the name in place of the tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recckpt.dense.buffers import Copy, Place
from recckpt.dense.chunks import EXTRA, MODEL
from recckpt.dense.portable import portable
from recckpt.dense.sharded import agreed_plan, is_sharded, may_be_sharded, write_plan
from recckpt.dense.stored_tensor import NUMPY_DTYPES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

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
class ShardedState:
    """What this rank has of sharded tensors.

    Attributes:
        plan: an item for each piece; None where it has no sharded tensor. Goes to all ranks.
        values: the pieces, by (tensor, offsets).
    """

    plan: SavePlan | None = None
    values: Mapping[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Bytes of all pieces, of which other ranks may have some too."""
        return sum(values.nbytes for values in self.values.values())

    def own_chunks(self, plans: Sequence[SavePlan | None], rank: int) -> list[OwnChunk]:
        """Return what this rank is to write, given the plans of all ranks.

        Raises:
            ValueError: the ranks disagree on a tensor.
        """
        if not any(plans):
            assert self.plan is None
            return []
        chunks = []
        for item in agreed_plan(plans, rank):
            of, _, name = item.index.fqn.partition("/")
            assert item.tensor_data is not None  # only tensors are planned
            shape, offsets = tuple(item.tensor_data.size), tuple(item.index.offset or ())
            values = self.values[item.index.fqn, offsets]
            if values.numel() or 0 in shape:
                dtype = str(values.dtype).removeprefix("torch.")
                chunks.append(OwnChunk(of, name, dtype, shape, offsets, values))
        return chunks


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
        """Return what this rank has of the tensors, copied.

        Raises:
            ValueError: a tensor cannot be saved; names it.
        """
        if not self._tensors:
            return ShardedState()
        plan, values = write_plan(self._tensors)
        held: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for item, value in zip(plan.items, values, strict=True):
            fqn, offsets = item.index.fqn, tuple(item.index.offset or ())
            place: Place = ("sharded", fqn, offsets)
            held[fqn, offsets] = portable(fqn.partition("/")[2], copy(place, value))
            if str(value.dtype).removeprefix("torch.") not in NUMPY_DTYPES:
                raise ValueError(f"{fqn.partition('/')[2]}: a sharded tensor of {value.dtype} cannot be saved; cast it")
        return ShardedState(plan, held)

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
