"""Which optimizer of torch trains a parameter, also where TorchRec's optimizers are around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from recckpt.dense.keyed_optimizer import is_keyed
from recckpt.dense.optimizer_class import updater
from recckpt.dense.optimizers import is_zero
from recckpt.errors import LiveTableError
from recckpt.live.torch_rules import KNOWN, TorchRule, rule_of


def optimizers_in(optimizers: Iterable[Optimizer], model: nn.Module) -> list[Optimizer]:
    """Return the optimizers of torch in these, and those that the parameters of a model step in the backward pass."""
    in_backward = (one for parameter in model.parameters() for one in getattr(parameter, "_in_backward_optimizers", ()))
    inner = [one for outer in (*optimizers, *in_backward) for one in _inner(outer)]
    return list({id(one): one for one in inner}.values())


def _inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizers that one of TorchRec's consists of; one that consists of none itself."""
    if is_keyed(optimizer):
        parts = [part for _, part in getattr(optimizer, "optimizers", ())]
        parts += [part for part in [getattr(optimizer, "_optimizer", None)] if part is not None]
        for part in parts:
            yield from _inner(part)
    else:
        yield optimizer if is_zero(optimizer) else updater(optimizer)


def trainer_of(weight: Tensor, optimizers: Sequence[Optimizer]) -> tuple[Optimizer | None, TorchRule | None]:
    """Return the optimizer that trains a weight, and what is known of it; None where the weight is frozen.

    Raises:
        LiveTableError: it cannot be saved by rows what there is; says why.
    """
    own = [one for one in optimizers for group in one.param_groups if any(weight is each for each in group["params"])]
    if len(own) > 1:
        kinds = ", ".join(type(one).__name__ for one in own)
        raise LiveTableError(f"{len(own)} optimizers train it ({kinds}), expected one: leave it to one of them")
    if not own:
        if weight.requires_grad:
            raise LiveTableError("none of the optimizers trains it: give live_tables the one that does, or freeze it")
        return None, None
    [optimizer] = own
    rule = rule_of(optimizer)
    if rule is None:
        raise LiveTableError(
            f"{type(optimizer).__name__} trains it, of which it is not known what it keeps of a row: use one of "
            f"exactly these classes of torch: {', '.join(KNOWN)}"
        )
    group = next(group for group in optimizer.param_groups if any(weight is each for each in group["params"]))
    if why := rule.refusal(group):
        raise LiveTableError(f"{type(optimizer).__name__}: {why}")
    return optimizer, rule
