"""Which rows a table evicts: pure decisions on columns of some of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from recckpt.types import MAX_EXACT_COUNT, count_of, positive_number

Mask = npt.NDArray[np.bool_]
Columns = Mapping[str, npt.NDArray[Any]]

COUNT, LAST_STEP, LAST_TIME = "count", "last_step", "last_time"  # part of the format: slots that a table tracks
EVENT_TIME = "event_time"  # part of the format: in the state of a manifest, the time that counted as now
NORM = "|embedding|"  # the length of each embedding; no slot
_DAY_SEC = 86_400
_SPEEDUPS = ((7, 4), (6, 2))  # sixteenths of the room that are in use -> speed-up; beyond 8 a pass looks at all rows
_MAX_DAYS = MAX_EXACT_COUNT // _DAY_SEC


class TrainingTime(Protocol):
    """When a decision is made."""

    @property
    def step(self) -> int:
        """The step of training."""

    @property
    def time(self) -> float:
        """Seconds since 1970."""


@runtime_checkable
class Evict(Protocol):
    """Says which rows go. Two of them go together by ``a & b``; a list of them stands for any."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that it looks at: scalar slots, or :data:`NORM`."""

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return True for each row that goes; by what is in that row alone, so the order of rows does not matter."""


class _EvictOperators:
    """What several policies have in common."""

    def __and__(self, other: Any) -> EvictedByAll:
        return EvictedByAll(self, other)


@dataclass(frozen=True)
class Unseen(_EvictOperators):
    """Rows whose last training look-up was more than ``steps`` steps ago; DeepRec's ``GlobalStepEvict``.

    Raises:
        ValueError: ``steps`` is not an int of at least 1.
    """

    steps: int
    needs = (LAST_STEP,)

    def __post_init__(self) -> None:
        count_of("Unseen: steps", self.steps)

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return True where the step is too long ago."""
        mask: Mask = rows[LAST_STEP] < now.step - self.steps
        return mask


@dataclass(frozen=True)
class UnseenFor(_EvictOperators):
    """Rows whose last training look-up was more than ``days`` ago, by event time or the clock; Monolith's expiry.

    Raises:
        ValueError: ``days`` is not a finite number above 0.
    """

    days: float
    needs = (LAST_TIME,)

    def __post_init__(self) -> None:
        if positive_number("UnseenFor: days", self.days) > _MAX_DAYS:
            raise ValueError(f"UnseenFor: days must be at most {_MAX_DAYS}, found {self.days!r}")

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return True where the time is too long ago."""
        mask: Mask = rows[LAST_TIME] < now.time - self.days * _DAY_SEC
        return mask


@dataclass(frozen=True)
class LowCount(_EvictOperators):
    """Rows that training has looked up fewer than ``n`` times, brand-new ones included.

    ``LowCount(2) & Unseen(steps=1000)`` gives each row 1,000 steps to be looked up again.

    Raises:
        ValueError: ``n`` is not an int of at least 1.
    """

    n: int
    needs = (COUNT,)

    def __post_init__(self) -> None:
        count_of("LowCount: n", self.n)

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return True where there were too few."""
        mask: Mask = rows[COUNT] < self.n
        return mask


@dataclass(frozen=True)
class SmallNorm(_EvictOperators):
    """Rows whose embedding has an L2 norm below ``x``, brand-new ones included; DeepRec's ``L2WeightEvict``.

    Raises:
        ValueError: ``x`` is not a finite number above 0.
    """

    x: float
    needs = (NORM,)

    def __post_init__(self) -> None:
        positive_number("SmallNorm: x", self.x)

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return True where the norm is below ``x``; embeddings with a NaN stay, so that they are noticed."""
        mask: Mask = rows[NORM] < self.x
        return mask


@dataclass(frozen=True, init=False, repr=False)
class EvictedByAll(_EvictOperators):
    """Rows that each of these evicts; ``a & b`` is the same.

    Raises:
        ValueError: one of them is not an :class:`Evict`, or a :class:`Capacity`, which decides on all rows at once.
    """

    policies: tuple[Evict, ...]

    def __init__(self, *policies: Any) -> None:
        for policy in policies:
            if not is_evict(policy):
                raise ValueError(f"expected policies that look at one row, such as Unseen(steps=9), found {policy!r}")
        flat = [part for one in policies for part in (one.policies if isinstance(one, EvictedByAll) else (one,))]
        object.__setattr__(self, "policies", tuple(flat))

    @property
    def needs(self) -> tuple[str, ...]:
        """What any of the policies needs."""
        return tuple(sorted({name for policy in self.policies for name in policy.needs}))

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return True for rows that all policies evict."""
        masks = [policy.evicted(rows, now) for policy in self.policies]
        together: Mask = np.logical_and.reduce(masks)
        return together

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.policies))


@dataclass(frozen=True)
class Capacity:
    """At most ``n`` rows on all ranks together: rows with the least ``by`` go; among equals those with the lowest ids.

    In training it makes ``room`` before the table is full, so that no look-up waits; called by hand it leaves ``n``
    rows. Rows go only between steps: unless ``CheckpointManager.step()`` or ``table.step`` counts them, the table grows
    past ``n``, with a warning. TorchRec's ZCH does the same by ``DistanceLFU_EvictionPolicy`` and
    ``LRU_EvictionPolicy``.

    Args:
        n: rows.
        by: ``"last_step"`` evicts rows not seen for longest, ``"count"`` rows seen least.
        room: share of ``n`` that stays free for new rows.

    Raises:
        ValueError: an argument is out of range.
    """

    n: int
    by: Literal["last_step", "count"] = "last_step"
    room: float = 0.1

    def __post_init__(self) -> None:
        count_of("Capacity: n", self.n)
        if self.by not in (LAST_STEP, COUNT):
            raise ValueError(f"Capacity: by must be 'last_step' or 'count', found {self.by!r}")
        if positive_number("Capacity: room", self.room) > 0.5:
            raise ValueError(f"Capacity: room must be at most 0.5, found {self.room!r}")

    @property
    def needs(self) -> tuple[str, ...]:
        """The slot that decides."""
        return (self.by,)

    @property
    def target(self) -> int:
        """Internal: rows that stay while training."""
        return self.n - int(self.n * self.room)

    def is_crowded(self, n_rows: int) -> bool:
        """Internal: say whether there are too many rows to wait for the next pass: half of the room is used."""
        return 2 * n_rows > self.target + self.n

    def pace(self, n_rows: int) -> int:
        """Internal: return the speed-up (1, 2 or 4) that keeps room for new rows until the pass ends."""
        in_use, room = n_rows - self.target, self.n - self.target
        return next((speedup for sixteenths, speedup in _SPEEDUPS if 16 * in_use > sixteenths * room), 1)

    def excess(self, n_rows: int, n_in_part: int, share: float) -> int:
        """Internal: return how many rows a part with this ``share`` of all ids must evict to keep to it."""
        return max(0, min(n_rows - self.target, n_in_part - math.ceil(self.target * share)))


def first_rows(by: npt.NDArray[Any], ids: npt.NDArray[np.int64], n: int) -> Mask:
    """Return a mask of the ``n`` rows with the least ``by``; of equal ones, those with the lowest ids."""
    if n >= len(by):
        return np.ones(len(by), np.bool_)
    if n <= 0:
        return np.zeros(len(by), np.bool_)
    border = np.partition(by, n - 1)[n - 1]
    mask: Mask = by < border
    ties = np.flatnonzero(by == border)
    n_ties = n - int(mask.sum())
    mask[ties[np.argpartition(ids[ties], n_ties - 1)[:n_ties]]] = True
    return mask


def least_count(policies: Iterable[Any]) -> int:
    """Return the greatest ``n`` of the :class:`LowCount` among policies; 0 without one."""
    least = 0
    for policy in policies:
        if isinstance(policy, EvictedByAll):
            least = max(least, least_count(policy.policies))
        elif isinstance(policy, LowCount):
            least = max(least, policy.n)
    return least


def is_evict(policy: Any) -> bool:
    """Say whether this is a policy that decides on single rows."""
    return isinstance(policy, Evict) and not isinstance(policy, type)
