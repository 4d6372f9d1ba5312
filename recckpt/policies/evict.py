"""Eviction policies: pure objects that decide which rows a table evicts, from columns of the rows."""

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
EVENT_TIME = "event_time"  # part of the format: key in the state of a manifest, the present time of the data
NORM = "|embedding|"  # a computed column, not a slot: the L2 norm of each embedding
_DAY_SEC = 86_400
_SPEEDUPS = ((7, 4), (6, 2))  # used sixteenths of the room -> speed-up; from 8 on, a pass looks at all rows
_MAX_DAYS = MAX_EXACT_COUNT // _DAY_SEC


class TrainingTime(Protocol):
    """The step and time at which a policy decides."""

    @property
    def step(self) -> int:
        """The step of training."""

    @property
    def time(self) -> float:
        """Seconds since 1970."""


@runtime_checkable
class Evict(Protocol):
    """Decides which rows to evict. ``a & b`` evicts rows that both evict; a list, rows that any of them evicts."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that the policy reads: scalar slots, or :data:`NORM`."""

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return a mask, True for each row to evict; the answer for a row depends on this row alone."""


class _EvictOperators:
    """Base class for the operator ``&``."""

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
        """Return a mask, True for each row whose last look-up was more than ``steps`` steps ago."""
        mask: Mask = rows[LAST_STEP] < now.step - self.steps
        return mask


@dataclass(frozen=True)
class UnseenFor(_EvictOperators):
    """Rows whose last training look-up was more than ``days`` ago, in event time or else clock time; Monolith's expiry.

    Raises:
        ValueError: ``days`` is not a finite number above 0.
    """

    days: float
    needs = (LAST_TIME,)

    def __post_init__(self) -> None:
        if positive_number("UnseenFor: days", self.days) > _MAX_DAYS:
            raise ValueError(f"UnseenFor: days must be at most {_MAX_DAYS}, found {self.days!r}")

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return a mask, True for each row whose last look-up was more than ``days`` ago."""
        mask: Mask = rows[LAST_TIME] < now.time - self.days * _DAY_SEC
        return mask


@dataclass(frozen=True)
class LowCount(_EvictOperators):
    """Rows that training has looked up fewer than ``n`` times, new rows included.

    ``LowCount(2) & Unseen(steps=1000)`` gives each row 1,000 steps to be looked up again.

    Raises:
        ValueError: ``n`` is not an int of at least 1.
    """

    n: int
    needs = (COUNT,)

    def __post_init__(self) -> None:
        count_of("LowCount: n", self.n)

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return a mask, True for each row with fewer than ``n`` look-ups."""
        mask: Mask = rows[COUNT] < self.n
        return mask


@dataclass(frozen=True)
class SmallNorm(_EvictOperators):
    """Rows whose embedding has an L2 norm below ``x``, new rows included; DeepRec's ``L2WeightEvict``.

    Raises:
        ValueError: ``x`` is not a finite number above 0.
    """

    x: float
    needs = (NORM,)

    def __post_init__(self) -> None:
        positive_number("SmallNorm: x", self.x)

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return a mask, True for each norm below ``x``; embeddings with a NaN stay, so that users notice them."""
        mask: Mask = rows[NORM] < self.x
        return mask


@dataclass(frozen=True, init=False, repr=False)
class EvictedByAll(_EvictOperators):
    """Rows that each of the policies evicts; the same as ``a & b``.

    Raises:
        ValueError: a policy is not an :class:`Evict`, or is a :class:`Capacity`, which compares rows with each other.
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
        """The columns that any of the policies reads."""
        return tuple(sorted({name for policy in self.policies for name in policy.needs}))

    def evicted(self, rows: Columns, now: TrainingTime) -> Mask:
        """Return a mask, True for each row that all policies evict."""
        masks = [policy.evicted(rows, now) for policy in self.policies]
        together: Mask = np.logical_and.reduce(masks)
        return together

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.policies))


@dataclass(frozen=True)
class Capacity:
    """Keeps at most ``n`` rows on all ranks together: evicts rows with the least ``by``, then the lowest id.

    In training, the table evicts rows before it is full, so that no look-up waits; a call of ``table.evict`` leaves
    ``n`` rows. The table evicts only between steps. If neither ``CheckpointManager.step()`` nor ``table.step`` counts
    the steps, the table grows past ``n``, with a warning. TorchRec's ZCH calls these policies
    ``DistanceLFU_EvictionPolicy`` and ``LRU_EvictionPolicy``.

    Args:
        n: greatest number of rows.
        by: ``"last_step"`` evicts the least recently seen rows, ``"count"`` the least often seen rows.
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
        """The slot by which rows are compared."""
        return (self.by,)

    @property
    def target(self) -> int:
        """Internal: number of rows that a pass leaves during training."""
        return self.n - int(self.n * self.room)

    def is_crowded(self, n_rows: int) -> bool:
        """Internal: return whether a pass must begin now, because half of the room is used."""
        return 2 * n_rows > self.target + self.n

    def pace(self, n_rows: int) -> int:
        """Internal: return how much faster a pass must run (1, 2 or 4 times) so that the room lasts until its end."""
        in_use, room = n_rows - self.target, self.n - self.target
        return next((speedup for sixteenths, speedup in _SPEEDUPS if 16 * in_use > sixteenths * room), 1)

    def excess(self, n_rows: int, n_in_part: int, share: float) -> int:
        """Internal: return how many rows to evict from a part of the table that has this ``share`` of all ids."""
        return max(0, min(n_rows - self.target, n_in_part - math.ceil(self.target * share)))


def first_rows(by: npt.NDArray[Any], ids: npt.NDArray[np.int64], n: int) -> Mask:
    """Return a mask of the ``n`` rows with the least ``by``; rows with equal ``by`` are ordered by id."""
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
    """Return whether this is a policy that decides on single rows."""
    return isinstance(policy, Evict) and not isinstance(policy, type)
