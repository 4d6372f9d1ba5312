"""The best checkpoints by what was measured: which to keep, and which one is meant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal, TypeGuard

from recckpt.errors import CheckpointNotFoundError
from recckpt.format.manifest import Manifest, StateValue
from recckpt.policies.joined_keeps import KeepOperators, KeptByAny
from recckpt.types import positive_int


@dataclass(frozen=True)
class Best(KeepOperators):
    """The ``k`` best by a metric that was given to the save, or by several; of equal ones, the newer.

    Checkpoints without a metric, or with a value that is not finite, are never among them.

    Args:
        k: how many.
        metric: its name in ``Manifest.state``; or several with their weights, ``{"auc": 1, "loss": -0.1}``, of which
            the weighted sum counts.
        mode: whether the greatest or the least is best.

    Raises:
        ValueError: an argument is invalid.
    """

    k: int
    metric: str | Mapping[str, float] = field(hash=False)
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        positive_int("Best: k", self.k)
        if not self.weights or not all(map(_is_weight, self.weights.items())):
            raise ValueError(
                "Best: metric must be the name of a metric, or several names with their weights, found "
                f"{self.metric!r:.200}"
            )
        if self.mode not in ("max", "min"):
            raise ValueError(f"Best: mode must be 'max' or 'min', found {self.mode!r}")

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids of the best."""
        sign = 1 if self.mode == "max" else -1
        values = ((self._value(each), place) for place, each in enumerate(checkpoints))
        ranked = sorted((sign * value, place) for value, place in values if _is_number(value))
        return {checkpoints[place].ckpt_id for _, place in ranked[-self.k :]}

    @property
    def weights(self) -> Mapping[str, float]:
        """Each metric with its weight."""
        if isinstance(self.metric, str):
            return {self.metric: 1} if self.metric else {}
        return self.metric if isinstance(self.metric, Mapping) else {}

    def _value(self, checkpoint: Manifest) -> StateValue:
        """Return what counts of a checkpoint; None where it does not have it."""
        if isinstance(self.metric, str):
            return checkpoint.state.get(self.metric)
        values = [(weight, checkpoint.state.get(name)) for name, weight in self.metric.items()]
        numbers = [weight * value for weight, value in values if _is_number(value)]
        return sum(numbers) if len(numbers) == len(values) else None


def idle(keep: object, checkpoints: Sequence[Manifest]) -> list[str]:
    """Say of each policy of the best by a metric that no checkpoint has why it keeps nothing."""
    parts = keep.keeps if isinstance(keep, KeptByAny) else (keep,)
    names = sorted(_metrics(checkpoints))
    of_best = (part for part in parts if isinstance(part, Best))
    unknown = [(part, name) for part in of_best for name in part.weights if name not in names]
    return [f"{part} keeps nothing: no checkpoint has the metric {name!r}, found {names}" for part, name in unknown]


def _metrics(checkpoints: Sequence[Manifest]) -> set[str]:
    return {name for checkpoint in checkpoints for name, value in checkpoint.state.items() if _is_number(value)}


def best_in(keep: object) -> Best:
    """Return the policy of the best checkpoints in what ``max_keep`` may be; ValueError where it is not one."""
    parts = keep.keeps if isinstance(keep, KeptByAny) else (keep,)
    best: list[Best] = []
    for part in (part for part in parts if isinstance(part, Best)):
        best += [part] if (part.metric, part.mode) not in [(other.metric, other.mode) for other in best] else []
    if len(best) > 1:
        both = " and ".join(f"{part.metric!r} ({part.mode})" for part in best)
        raise ValueError(
            f"found max_keep={keep!r}, where the best may be that of {both}: name the step, which "
            "recckpt.find_checkpoint(output_dir, 'best', metric, mode).step tells"
        )
    if not best:
        raise ValueError(
            f"found max_keep={keep!r}, which does not say what is best: give the saver one that does, such as "
            "Newest(3) | Best(1, 'auc'), or name the step"
        )
    return best[0]


def best_id(checkpoints: Sequence[Manifest], best: Best, place: str) -> str:
    """Return the id of the best checkpoint of a place; never of an ephemeral one, which policies are not shown.

    Raises:
        CheckpointNotFoundError: none was saved with the metric; says which metrics there are.
    """
    checkpoints = [checkpoint for checkpoint in checkpoints if not checkpoint.ephemeral]
    ids = replace(best, k=1).kept(checkpoints, datetime.now(timezone.utc))
    if not ids:
        names = sorted(_metrics(checkpoints))
        raise CheckpointNotFoundError(
            f"{place}: found no checkpoint with the metric {best.metric!r}, only with {names}"
        )
    return ids.pop()


def _is_weight(item: tuple[Any, Any]) -> bool:
    name, weight = item
    return isinstance(name, str) and bool(name) and _is_number(weight) and weight != 0


def _is_number(value: Any) -> TypeGuard[int | float]:
    return type(value) is int or (type(value) is float and math.isfinite(value))
