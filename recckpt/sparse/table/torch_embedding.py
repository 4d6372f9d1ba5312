"""The rows of an embedding of torch, as a table takes them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recckpt.format.buckets import Slice
from recckpt.format.distinct import distinct
from recckpt.sparse.table.checks import flat_ids

Embedding = nn.Embedding | nn.EmbeddingBag
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)


@dataclass(frozen=True)
class TorchRows:
    """The rows of an ``nn.Embedding`` or ``nn.EmbeddingBag``.

    Attributes:
        ids: of the rows, int64, all different, on the CPU.
        weight: shape (ids, dim).
        padding_id: of the row that is not trained, None where there is none.
        requires_grad: False where the weight is frozen.
    """

    ids: Tensor
    weight: Tensor
    padding_id: int | None
    requires_grad: bool

    @property
    def options(self) -> dict[str, Any]:
        """What a table is made with, unless told otherwise."""
        return {"dtype": self.weight.dtype, "device": self.weight.device, "padding_id": self.padding_id}

    def within(self, owned: Slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the ids of a slice and their rows, on a device."""
        own = owned.owns(self.ids)
        return self.ids[own], self.weight[own.to(self.weight.device)].to(device)


def torch_rows(module: Any, name: str, ids: Tensor | None) -> TorchRows:
    """Return the rows of a module with these ids, None for 0 to n - 1.

    Raises:
        TypeError: it is no embedding of torch.
        ValueError: it has an option that tables do not have, or the ids do not fit.
    """
    if not isinstance(module, Embedding):
        raise TypeError(f"table {name!r}: found a {type(module).__name__}, expected an nn.Embedding or nn.EmbeddingBag")
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option):
            value = f"{option}={getattr(module, option)!r}"
            raise ValueError(f"table {name!r}: found {value}, which a table does not have: keep this module as it is")
    _check_plain(module, name)
    weight = module.weight.detach()
    numbers = torch.arange(len(weight), device="cpu") if ids is None else torch.from_numpy(flat_ids(ids).copy())
    n_different = len(distinct(numbers.numpy()))
    if len(numbers) != len(weight) or n_different != len(numbers):
        counts = f"{len(numbers)} ids, {n_different} of them different"
        raise ValueError(f"table {name!r}: found {counts}, expected a different one for each of {len(weight)} rows")
    padding = module.padding_idx
    return TorchRows(numbers, weight, None if padding is None else int(numbers[padding]), module.weight.requires_grad)


def _check_plain(module: Embedding, name: str) -> None:
    """Refuse a module that does something else than those of torch: a table would not do that."""
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    hooks = [hook for hook in _HOOKS if getattr(module, hook, None) or getattr(module.weight, hook, None)]
    extra = ""
    if type(module).forward is not kind.forward or "forward" in vars(module):
        extra = f"{type(module).__name__} with a forward of its own"
    elif hooks:
        extra = f"hooks ({', '.join(hook.strip('_') for hook in hooks)})"
    elif getattr(module, "parametrizations", None):
        extra = "parametrizations"
    if extra:
        raise ValueError(f"table {name!r}: found {extra}, which a table does not have: keep this module as it is")
