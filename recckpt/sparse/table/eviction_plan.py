"""What a table evicts, and which of its ids it looks at when: pure decisions on policies, steps and numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from recckpt.policies.evict import NORM, Capacity, Evict, is_evict
from recckpt.sparse.table.id_index import N_PARTS
from recckpt.sparse.table.tracking import TRACKED
from recckpt.types import count_of, positive_number

Policy = Evict | Capacity

MIN_PART_ROWS = 1024  # of a capacity: parts of fewer would differ too much in how many rows they hold


class HashRange(NamedTuple):
    """The ids whose hashes end on 16 bits in [begin, end)."""

    begin: int
    end: int

    @property
    def share(self) -> float:
        """Which part of all ids it is."""
        return (self.end - self.begin) / N_PARTS


ALL = HashRange(0, N_PARTS)


@dataclass(frozen=True)
class Plan:
    """What a table evicts, and in how many steps it has looked at all rows.

    Attributes:
        rules: look at one row each.
        capacity: looks at all; None without one.
    """

    rules: tuple[Evict, ...] = ()
    capacity: Capacity | None = None
    every: int = 1
    budget_ms: float | None = None

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The rules and the capacity."""
        return (*self.rules, *([self.capacity] if self.capacity else []))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is ever evicted."""
        return not self.rules and self.capacity is None

    @property
    def needs(self) -> frozenset[str]:
        """The columns that the policies look at."""
        return frozenset(name for policy in self.policies for name in policy.needs)

    @property
    def n_parts(self) -> int:
        """Parts that the ids are cut into."""
        most = N_PARTS if self.capacity is None else max(1, self.capacity.n // MIN_PART_ROWS)
        return min(self.every, N_PARTS, most)

    def due(self, before: int | None, step: int, pace: int = 1) -> list[HashRange]:
        """Return the parts that are due at a step, where those up to the step ``before`` are done; None is the last.

        At a ``pace`` of 2 all parts are looked at in half of the steps.
        """
        n_parts = self.n_parts
        if before is None or not before < step:
            before = step - 1
        first, last = (at * n_parts // self.every for at in (before, step))
        numbers = range(max(first, last - n_parts) + 1, last + 1)
        # Parts scanned in one step are n_parts / pace apart, so each was last scanned equally long ago.
        due = {(number + n * n_parts // pace) % n_parts: None for number in numbers for n in range(pace)}
        return [HashRange(part * N_PARTS // n_parts, (part + 1) * N_PARTS // n_parts) for part in due]


def plan_of(table: str, policies: Sequence[Any], slots: set[str], *, every: Any, budget_ms: Any) -> Plan:
    """Return what these policies ask for, or raise ValueError where a table of these slots cannot do it."""
    capacities = [policy for policy in policies if isinstance(policy, Capacity)]
    rules = [policy for policy in policies if not isinstance(policy, Capacity)]
    strange = [policy for policy in rules if not is_evict(policy)]
    if strange or not policies:
        raise ValueError(f"table {table!r}: expected policies of recckpt.policies.evict, found {strange or 'none'}")
    if len(capacities) > 1:
        raise ValueError(f"table {table!r}: found {capacities}, expected one capacity: rows are ordered by one slot")
    for policy in policies:
        missing = {*policy.needs} - slots - {NORM}
        tracks = tuple(track for track, spec in TRACKED.items() if spec.name in missing)
        if missing:
            remedy = f"add track={tracks} where the table is made" if tracks else "declare it with add_slot"
            raise ValueError(
                f"table {table!r}: {policy} goes by {sorted(missing)}, found the slots {sorted(slots)}: {remedy}"
            )
    budget = None if budget_ms is None else positive_number(f"table {table!r}: budget_ms", budget_ms)
    every = count_of(f"table {table!r}: evict_every", every)
    return Plan(tuple(rules), next(iter(capacities), None), every, budget)
