"""What to keep: small pure objects that choose among committed checkpoints, by age, step, metric or time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from recckpt.format.manifest import Manifest
from recckpt.policies.best import Best
from recckpt.policies.joined_keeps import Keep, KeepOperators, KeptByAny, is_keep
from recckpt.types import byte_count, positive_int, positive_number

__all__ = ["All", "Best", "EveryNth", "Keep", "KeepBytes", "KeptByAny", "Newest", "OnePer", "YoungerThan", "as_keep"]


@dataclass(frozen=True)
class All(KeepOperators):
    """Every checkpoint; what ``max_keep=None`` stands for."""

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return all ids."""
        return {checkpoint.ckpt_id for checkpoint in checkpoints}


@dataclass(frozen=True)
class Newest(KeepOperators):
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
class EveryNth(KeepOperators):
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
class YoungerThan(KeepOperators):
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
class OnePer(KeepOperators):
    """The first of each interval of ``seconds`` since 1970 UTC, such as 86400 for one a day, for ever.

    Those whose time cannot be read stay.

    Raises:
        ValueError: ``seconds`` is not a finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        positive_number("OnePer: seconds", self.seconds)

    def kept(self, checkpoints: Sequence[Manifest], now: datetime) -> set[str]:
        """Return the ids of the first in each interval."""
        first: dict[object, str] = {}
        for checkpoint in checkpoints:
            time = _moment(checkpoint.time)
            interval = checkpoint.ckpt_id if time is None else time.timestamp() // self.seconds
            first.setdefault(interval, checkpoint.ckpt_id)
        return set(first.values())


@dataclass(frozen=True)
class KeepBytes(KeepOperators):
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


def as_keep(max_keep: int | Keep | None) -> Keep:
    """Return what a number of checkpoints, or None for all, stands for, and any other :class:`Keep` as it is.

    Raises:
        ValueError: it is something else.
    """
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


def _age_sec(written: str, now: datetime) -> float:
    """Return the age of what was written then; less than any where the time or its zone cannot be read."""
    time = _moment(written)
    return -math.inf if time is None else (now - time).total_seconds()


def _moment(written: str) -> datetime | None:
    """Return when something was written; None where the time or its zone cannot be read."""
    try:
        time = datetime.fromisoformat(written.replace("Z", "+00:00"))  # Python 3.10 does not know Z
    except ValueError:
        return None
    return None if time.tzinfo is None else time
