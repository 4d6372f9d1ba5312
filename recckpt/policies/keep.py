"""Retention policies: pure objects that choose which committed checkpoints to keep, by age, step, metric or time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from recckpt.errors import CheckpointNotFoundError
from recckpt.format.manifest import Manifest, StateValue
from recckpt.types import byte_count, positive_int, positive_number


@runtime_checkable
class Keep(Protocol):
    """Decides which checkpoints to keep; a class of your own must have this method.

    Rotation always keeps the newest checkpoint and all pinned checkpoints. The policy does not see ephemeral ones.
    """

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids of the checkpoints to keep; pure.

        Args:
            checkpoints: one manifest per checkpoint id, in order of commit, oldest first; may be empty.
            now: the present time, with time zone.
        """


class KeepOperators(Keep, Protocol):
    """Base class for the operator ``|``."""

    def __or__(self, other: Keep) -> KeptByAny:
        return KeptByAny(self, other)

    def __ror__(self, other: Keep) -> KeptByAny:
        return KeptByAny(other, self)


@dataclass(frozen=True, init=False, repr=False)
class KeptByAny(KeepOperators):
    """Keeps the checkpoints that any of the policies keeps; the same as ``a | b``. Each policy sees all checkpoints.

    Raises:
        ValueError: there is no policy, or an argument is not a :class:`Keep`.
    """

    keeps: tuple[Keep, ...]

    def __init__(self, *keeps: Keep) -> None:
        if not keeps or not all(map(is_keep, keeps)):
            raise ValueError(f"KeptByAny: expected one Keep or more, such as Newest(3), found {keeps!r}")
        flat = [part for keep in keeps for part in (keep.keeps if isinstance(keep, KeptByAny) else (keep,))]
        object.__setattr__(self, "keeps", tuple(flat))

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        return {ckpt_id for keep in self.keeps for ckpt_id in keep.kept(checkpoints, now)}

    def __repr__(self) -> str:
        return f"KeptByAny({', '.join(map(repr, self.keeps))})"


def is_keep(value: Any) -> TypeGuard[Keep]:
    return isinstance(value, Keep) and not isinstance(value, type)


@dataclass(frozen=True)
class Best(KeepOperators):
    """Keeps the ``k`` best checkpoints by one or several metrics passed to the save; of equal ones, the newer.

    Checkpoints without a metric, or with a value that is not finite, are not kept.

    Args:
        k: how many checkpoints to keep.
        metric: name of a metric in ``Manifest.state``; or names with weights, such as ``{"auc": 1, "loss": -0.1}``, to
            compare the weighted sum.
        mode: ``"max"`` if the greatest value is best, ``"min"`` if the least is.

    Raises:
        ValueError: an argument is invalid.
    """

    k: int
    metric: str | Mapping[str, float] = field(hash=False)
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        positive_int("Best: k", self.k)
        are_named = all(isinstance(name, str) and name for name in self.weights)
        if not self.weights or not are_named or not all(_is_number(w) and w != 0 for w in self.weights.values()):
            raise ValueError(
                "Best: metric must be the name of a metric, or several names with their weights, found "
                f"{self.metric!r:.200}"
            )
        if self.mode not in ("max", "min"):
            raise ValueError(f"Best: mode must be 'max' or 'min', found {self.mode!r}")

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        sign = 1 if self.mode == "max" else -1
        values = ((self._value(each), place) for place, each in enumerate(checkpoints))
        ranked = sorted((sign * value, place) for value, place in values if _is_number(value))
        return {checkpoints[place].ckpt_id for _, place in ranked[-self.k :]}

    @property
    def weights(self) -> Mapping[str, float]:
        """Metric -> weight."""
        if isinstance(self.metric, str):
            return {self.metric: 1} if self.metric else {}
        return self.metric if isinstance(self.metric, Mapping) else {}

    def _value(self, checkpoint: Manifest) -> StateValue:
        if isinstance(self.metric, str):
            return checkpoint.state.get(self.metric)
        values = [(weight, checkpoint.state.get(name)) for name, weight in self.metric.items()]
        numbers = [weight * value for weight, value in values if _is_number(value)]
        return sum(numbers) if len(numbers) == len(values) else None


def idle(keep: object, checkpoints: Sequence[Manifest]) -> list[str]:
    """Return one message per :class:`Best` that keeps nothing because no checkpoint has its metric."""
    parts = keep.keeps if isinstance(keep, KeptByAny) else (keep,)
    names = sorted(_metrics(checkpoints))
    of_best = (part for part in parts if isinstance(part, Best))
    unknown = [(part, name) for part in of_best for name in part.weights if name not in names]
    return [
        f"{part} keeps nothing: no checkpoint has the metric {name!r}, found {names}{_not_finite(checkpoints, [name])}"
        for part, name in unknown
    ]


def _not_finite(checkpoints: Sequence[Manifest], names: Iterable[str]) -> str:
    """Return a text that names checkpoints whose metric is not a finite number; "" if there are no such checkpoints."""
    values = [
        (name, one.state[name], one.ckpt_id) for one in reversed(checkpoints) for name in names if name in one.state
    ]
    texts = [f"{name!r} is {value!s} in {ckpt_id!r}" for name, value, ckpt_id in values if not _is_number(value)]
    return f"; {', '.join(texts[:3])}{', ...' if len(texts) > 3 else ''}, which is not compared" if texts else ""


def _metrics(checkpoints: Sequence[Manifest]) -> set[str]:
    return {name for checkpoint in checkpoints for name, value in checkpoint.state.items() if _is_number(value)}


def best_in(keep: object) -> Best:
    """Return the :class:`Best` in a value of ``max_keep``; ValueError if there is none, or several that differ."""
    parts = keep.keeps if isinstance(keep, KeptByAny) else (keep,)
    best: list[Best] = []
    for part in (part for part in parts if isinstance(part, Best)):
        best += [part] if (part.metric, part.mode) not in [(other.metric, other.mode) for other in best] else []
    if len(best) > 1:
        both = " and ".join(f"{part.metric!r} ({part.mode})" for part in best)
        raise ValueError(
            f"found max_keep={keep!r}, which has several kinds of best, {both}: pass the step, such as "
            "recckpt.find_checkpoint(output_dir, 'best', metric, mode).step"
        )
    if not best:
        raise ValueError(
            f"found max_keep={keep!r}, which has no Best: pass the saver a policy with one, such as "
            "Newest(3) | Best(1, 'auc'), or pass the step"
        )
    return best[0]


def best_id(checkpoints: Sequence[Manifest], best: Best, place: str) -> str:
    """Return the id of the best checkpoint, ephemeral ones excluded.

    Raises:
        CheckpointNotFoundError: no checkpoint has the metric; the message lists the metrics that they have.
    """
    checkpoints = [checkpoint for checkpoint in checkpoints if not checkpoint.ephemeral]
    ids = replace(best, k=1).kept(checkpoints, datetime.now(timezone.utc))
    if not ids:
        names = sorted(_metrics(checkpoints))
        raise CheckpointNotFoundError(
            f"{place}: found no checkpoint with the metric {best.metric!r}, only with {names}"
            f"{_not_finite(checkpoints, best.weights)}"
        )
    return ids.pop()


def _is_number(value: Any) -> TypeGuard[int | float]:
    return type(value) is int or (type(value) is float and math.isfinite(value))


@dataclass(frozen=True)
class All(KeepOperators):
    """Keeps every checkpoint; the same as ``max_keep=None``."""

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        return {checkpoint.ckpt_id for checkpoint in checkpoints}


@dataclass(frozen=True)
class Newest(KeepOperators):
    """Keeps the ``n`` newest checkpoints; the same as ``max_keep=n``.

    Raises:
        ValueError: ``n`` is not an int of at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        positive_int("Newest: n", self.n)

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        return {checkpoint.ckpt_id for checkpoint in checkpoints[-self.n :]}


@dataclass(frozen=True)
class EveryNth(KeepOperators):
    """Keeps every checkpoint whose step is a multiple of ``n``, however old.

    Raises:
        ValueError: ``n`` is not an int of at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        positive_int("EveryNth: n", self.n)

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids of checkpoints whose step is a multiple of ``n``; checkpoints without a step are not kept."""
        return {each.ckpt_id for each in checkpoints if each.step is not None and each.step % self.n == 0}


@dataclass(frozen=True)
class YoungerThan(KeepOperators):
    """Keeps checkpoints written less than ``seconds`` ago, and those with an unreadable time.

    Raises:
        ValueError: ``seconds`` is not a finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        positive_number("YoungerThan: seconds", self.seconds)

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        times = ((each.ckpt_id, _moment(each.time)) for each in checkpoints)
        return {ckpt_id for ckpt_id, time in times if time is None or (now - time).total_seconds() < self.seconds}


@dataclass(frozen=True)
class OnePer(KeepOperators):
    """Keeps the first checkpoint per interval of ``seconds`` since 1970 UTC, however old; 86400 keeps one per day.

    Checkpoints with an unreadable time are kept too.

    Raises:
        ValueError: ``seconds`` is not a finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        positive_number("OnePer: seconds", self.seconds)

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        first: dict[object, str] = {}
        for checkpoint in checkpoints:
            time = _moment(checkpoint.time)
            interval = checkpoint.ckpt_id if time is None else time.timestamp() // self.seconds
            first.setdefault(interval, checkpoint.ckpt_id)
        return set(first.values())


@dataclass(frozen=True)
class KeepBytes(KeepOperators):
    """Keeps the newest checkpoints that fit into ``n_bytes`` with the links they need; always the newest one.

    Args:
        n_bytes: an int, or a text such as ``"2 TB"``.

    Raises:
        ValueError: ``n_bytes`` is not a number of bytes of at least 1.
    """

    n_bytes: int | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_bytes", byte_count("KeepBytes: n_bytes", self.n_bytes))

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids to keep; a link that several deltas need is counted once, for the newest of the deltas."""
        sizes = {checkpoint.name: checkpoint.n_bytes for checkpoint in checkpoints}
        counted, kept = set[str](), set[str]()
        for checkpoint in reversed(checkpoints):
            counted |= {checkpoint.name, *(link.save_id for link in checkpoint.chain)}
            if kept and sum(sizes.get(save_id, 0) for save_id in counted) > int(self.n_bytes):
                break
            kept.add(checkpoint.ckpt_id)
        return kept


def as_keep(max_keep: int | Keep | None) -> Keep:
    """Return the policy for an argument ``max_keep``; ValueError if it is neither a number, None nor a policy."""
    if is_keep(max_keep):
        return max_keep
    if max_keep is None:
        return All()
    if type(max_keep) is int and max_keep >= 1:
        return Newest(max_keep)
    raise ValueError(
        f"max_keep must be an int of at least 1, found {max_keep!r}; or None for all, or an object with kept(), such "
        "as recckpt.policies.keep.Newest(3)"
    )


def _moment(written: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(written.replace("Z", "+00:00"))  # Python 3.10 does not know Z
    except ValueError:
        return None
    return None if time.tzinfo is None else time
