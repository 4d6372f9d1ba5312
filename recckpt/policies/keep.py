"""What to keep: small pure objects that choose among committed checkpoints, by age, step, metric or time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from recckpt.errors import CheckpointNotFoundError
from recckpt.format.manifest import Manifest
from recckpt.types import byte_count, positive_int, positive_number


@runtime_checkable
class Keep(Protocol):
    """Says which checkpoints to keep; a class of your own needs nothing but this.

    Rotation keeps the newest checkpoint of all and pinned ones whatever it says, and shows it no ephemeral ones.
    """

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids of those to keep; pure.

        Args:
            checkpoints: the current one of each id, in order of commit, oldest first; may be empty.
            now: the time, with its zone.
        """


class _KeepOperators(Keep, Protocol):
    """Joins by ``|``."""

    def __or__(self, other: Keep) -> KeptByAny:
        return KeptByAny(self, other)

    def __ror__(self, other: Keep) -> KeptByAny:
        return KeptByAny(other, self)


@dataclass(frozen=True)
class All(_KeepOperators):
    """Every checkpoint; what ``max_keep=None`` stands for."""

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return all ids."""
        return {checkpoint.ckpt_id for checkpoint in checkpoints}


@dataclass(frozen=True)
class Newest(_KeepOperators):
    """The ``n`` newest; what ``max_keep=n`` stands for.

    Raises:
        ValueError: ``n`` is not an int of at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        positive_int("Newest: n", self.n)

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the last ids."""
        return {checkpoint.ckpt_id for checkpoint in checkpoints[-self.n :]}


@dataclass(frozen=True)
class EveryNth(_KeepOperators):
    """Those whose step is a multiple of ``n``, for ever.

    Raises:
        ValueError: ``n`` is not an int of at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        positive_int("EveryNth: n", self.n)

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids with such a step; one saved without a step has none."""
        return {each.ckpt_id for each in checkpoints if each.step is not None and each.step % self.n == 0}


@dataclass(frozen=True)
class Best(_KeepOperators):
    """The ``k`` best by a metric that was given to the save; of equal ones, the newer.

    Checkpoints without the metric, or with a value that is not finite, are never among them.

    Args:
        k: how many.
        metric: its name in ``Manifest.state``.
        mode: whether the greatest or the least is best.

    Raises:
        ValueError: an argument is invalid.
    """

    k: int
    metric: str
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        positive_int("Best: k", self.k)
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"Best: metric must be the name of a metric, found {self.metric!r}")
        if self.mode not in ("max", "min"):
            raise ValueError(f"Best: mode must be 'max' or 'min', found {self.mode!r}")

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids of the best."""
        sign = 1 if self.mode == "max" else -1
        values = ((each.state.get(self.metric), place) for place, each in enumerate(checkpoints))
        ranked = sorted((sign * value, place) for value, place in values if _is_number(value))
        return {checkpoints[place].ckpt_id for _, place in ranked[-self.k :]}


def idle(keep: object, checkpoints: Sequence[Manifest]) -> list[str]:
    """Say of each policy of the best by a metric that no checkpoint has why it keeps nothing."""
    parts = keep.keeps if isinstance(keep, KeptByAny) else (keep,)
    names = sorted(_metrics(checkpoints))
    unknown = [part for part in parts if isinstance(part, Best) and part.metric not in names]
    return [f"{part} keeps nothing: no checkpoint has the metric {part.metric!r}, found {names}" for part in unknown]


def _metrics(checkpoints: Sequence[Manifest]) -> set[str]:
    return {name for checkpoint in checkpoints for name, value in checkpoint.state.items() if _is_number(value)}


def best_in(keep: object) -> Best:
    """Return the policy of the best checkpoints in what ``max_keep`` may be; ValueError where it is not one."""
    parts = keep.keeps if isinstance(keep, KeptByAny) else (keep,)
    best = {(part.metric, part.mode): part for part in parts if isinstance(part, Best)}
    if len(best) > 1:
        both = " and ".join(f"{metric!r} ({mode})" for metric, mode in best)
        raise ValueError(
            f"found max_keep={keep!r}, where the best may be that of {both}: name the step, which "
            "recckpt.find_checkpoint(output_dir, 'best', metric, mode).step tells"
        )
    if not best:
        raise ValueError(
            f"found max_keep={keep!r}, which does not say what is best: give the saver one that does, such as "
            "Newest(3) | Best(1, 'auc'), or name the step"
        )
    return next(iter(best.values()))


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


@dataclass(frozen=True)
class YoungerThan(_KeepOperators):
    """Those written less than ``seconds`` ago; one whose time cannot be read counts as young.

    Raises:
        ValueError: ``seconds`` is not a finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        positive_number("YoungerThan: seconds", self.seconds)

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids of the young."""
        return {each.ckpt_id for each in checkpoints if _age_sec(each.time, now) < self.seconds}


@dataclass(frozen=True)
class KeepBytes(_KeepOperators):
    """The newest that fit into so many bytes together, with what they are read from; the newest of all in any case.

    Args:
        n_bytes: an int, or a text such as ``"2 TB"``.

    Raises:
        ValueError: it is not a number of bytes of at least 1.
    """

    n_bytes: int | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_bytes", byte_count("KeepBytes: n_bytes", self.n_bytes))

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the last ids; the links below a delta count once, for the newest that stands on them."""
        sizes = {checkpoint.origin: checkpoint.n_bytes for checkpoint in checkpoints}
        counted, kept = set[str](), set[str]()
        for checkpoint in reversed(checkpoints):
            counted |= {checkpoint.origin, *(link.save_id for link in checkpoint.chain)}
            if kept and sum(sizes.get(save_id, 0) for save_id in counted) > int(self.n_bytes):
                break
            kept.add(checkpoint.ckpt_id)
        return kept


@dataclass(frozen=True, init=False, repr=False)
class KeptByAny(_KeepOperators):
    """Those that any of these keeps, each asked about all; ``a | b`` is the same.

    Raises:
        ValueError: none is given, or one of them is not a :class:`Keep`.
    """

    keeps: tuple[Keep, ...]

    def __init__(self, *keeps: Keep) -> None:
        if not keeps or not all(map(_is_keep, keeps)):
            raise ValueError(f"KeptByAny: expected one Keep or more, such as Newest(3), found {keeps!r}")
        flat = [part for keep in keeps for part in (keep.keeps if isinstance(keep, KeptByAny) else (keep,))]
        object.__setattr__(self, "keeps", tuple(flat))

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return all that they keep."""
        return {ckpt_id for keep in self.keeps for ckpt_id in keep.kept(checkpoints, now)}

    def __repr__(self) -> str:
        return f"KeptByAny({', '.join(map(repr, self.keeps))})"


def as_keep(max_keep: int | Keep | None) -> Keep:
    """Return what a number of checkpoints, or None for all, stands for, and any other :class:`Keep` as it is.

    Raises:
        ValueError: it is something else.
    """
    if _is_keep(max_keep):
        return max_keep
    if max_keep is None:
        return All()
    if type(max_keep) is int and max_keep >= 1:
        return Newest(max_keep)
    raise ValueError(
        f"max_keep must be an int of at least 1, found {max_keep!r}; or None for all, or an object with kept(), such "
        "as recckpt.policies.keep.Newest(3)"
    )


def _is_keep(value: Any) -> TypeGuard[Keep]:
    return isinstance(value, Keep) and not isinstance(value, type)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _age_sec(written: str, now: datetime) -> float:
    """Return the age of what was written then; less than any where the time or its zone cannot be read."""
    try:
        time = datetime.fromisoformat(written.replace("Z", "+00:00"))  # Python 3.10 does not know Z
    except ValueError:
        return -math.inf
    return -math.inf if time.tzinfo is None else (now - time).total_seconds()
