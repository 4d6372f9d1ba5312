"""An embedding whose weight is a DTensor, as FSDP2 and ``parallelize_module`` make it, as a live table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.sharded import is_sharded
from recckpt.errors import LiveTableError
from recckpt.live.dtensor import box_of, layout_of, local_of
from recckpt.live.torch_embedding import TorchEmbedding
from recckpt.live.torch_rules import TorchRule
from recckpt.types import Box


class DTensorEmbedding(TorchEmbedding):
    """The rows of an embedding that this rank has, as a part of them, a copy, or a copy of a part.

    Args:
        name, module, optimizer, rule, tied: as of TorchEmbedding.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        optimizer: Optimizer | None,
        rule: TorchRule | None,
        tied: Sequence[nn.Module] = (),
    ) -> None:
        self._weight: Tensor = module.weight
        super().__init__(name, module, optimizer, rule, tied)

    @property
    def weight(self) -> Tensor:
        """The weight of now: around forward passes FSDP2 has another tensor in its place."""
        now = self._module.weight
        if now is not self._weight and is_sharded(now) and layout_of(now) == layout_of(self._weight):
            self._weight = now
        return self._weight

    def box(self) -> Box:
        """Return the rows that the mesh gives this rank."""
        return box_of(self.weight)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what this rank has of the weight and of the states.

        Raises:
            LiveTableError: a state lies on other ranks than the weight.
        """
        whole, expected = self.whole(), layout_of(self.weight)
        for slot, tensor in whole.items():
            if layout_of(tensor) != expected:
                found = f"{tuple(tensor.shape)} {getattr(tensor, 'placements', 'of one rank')}"
                raise LiveTableError(
                    f"table {self.name!r}: found {slot} as {found}, expected {expected[0]} {expected[2]}, as its "
                    "weight lies: call live_tables before the first step, and load no state of another layout"
                )
        return {slot: local_of(tensor).detach() for slot, tensor in whole.items()}

    def part_of(self, gradient: Any) -> Tensor | None:
        """Return the gradient of the rows of this rank; None where it is known only once the optimizer adds it up."""
        placements = getattr(gradient, "placements", None)
        if layout_of(gradient) == layout_of(self.weight):
            return local_of(gradient)
        if placements and all(one.is_replicate() for one in placements):
            return local_of(gradient)[slice(*self.box().rows)]
        return None


def kind_of(module: nn.Module, weight: Any) -> str:
    """Return what ``print`` calls it: FSDP2 makes a class of its own of each module."""
    kind = nn.EmbeddingBag if isinstance(module, nn.EmbeddingBag) else nn.Embedding
    names = ("Replicate" if one.is_replicate() else "Shard(0)" for one in weight.placements)
    return f"{kind.__name__} {' x '.join(names)}"
