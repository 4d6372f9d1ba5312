"""What an averaging function keeps: it is called with three pairs of numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

_AVERAGED, _CURRENT = (1.0, 0.0, 2.0), (0.0, 1.0, -3.0)
_CLOSE = 1e-6  # a decay in a float32 tensor and its complement add up to 1 only so far
_INSTEAD = "take get_ema_multi_avg_fn, get_swa_multi_avg_fn or another that returns k * averaged + (1 - k) * current"


@torch.no_grad()
def share_kept(model: AveragedModel, n_averaged: Tensor) -> float:
    """Return which share, 0 to 1, an update keeps of the average; the current value has the rest.

    Raises:
        ValueError: the function of the model is not an average of two values.
    """
    average: Callable[..., Tensor] = model.avg_fn or get_swa_avg_fn()  # type: ignore[no-untyped-call]
    averaged, current = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in (_AVERAGED, _CURRENT))
    if model.multi_avg_fn is not None:
        model.multi_avg_fn([averaged], [current], n_averaged.cpu())
    else:
        averaged = average(averaged, current, n_averaged.cpu())
    kept, added, mixed = averaged.tolist()
    is_average = abs(kept + added - 1) <= _CLOSE and abs(mixed - (2 * kept - 3 * added)) <= 3 * _CLOSE
    if not (is_average and -_CLOSE <= kept <= 1 + _CLOSE):
        function = model.multi_avg_fn or average
        name = getattr(function, "__qualname__", repr(function))
        pairs = ", ".join(f"({a:g}, {b:g})" for a, b in zip(_AVERAGED, _CURRENT, strict=True))
        raise ValueError(
            f"AveragedModel: {name} gives {kept:g}, {added:g}, {mixed:g} for {pairs}, which is not an average of an "
            f"averaged and a current value, and the rows of tables follow nothing else: {_INSTEAD}"
        )
    return float(min(max(kept, 0.0), 1.0))
