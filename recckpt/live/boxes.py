"""What the ranks have of each table, and whether that makes up the table; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from recckpt.types import SlotSpec


@dataclass(frozen=True)
class RankPart:
    """What one rank knows of a table.

    Attributes:
        n_rows: of the whole table.
        rows: (first, end) of those that this rank has; (0, 0) for none.
        is_copy: whether they are a copy of what other ranks have too.
        slots: of the table, ``embedding`` among them; empty where the rank has no rows.
        scalars: of the optimizer.
        settings: of the optimizer.
        why: rows may change that were not looked up; None where none do.
        refusal: why the table cannot be a live one, None where it can.
    """

    n_rows: int
    rows: tuple[int, int] = (0, 0)
    is_copy: bool = False
    slots: tuple[SlotSpec, ...] = ()
    scalars: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    why: str | None = None
    refusal: str | None = None

    @property
    def has_rows(self) -> bool:
        """Whether this rank has any."""
        return self.rows[0] < self.rows[1]


def problem_of(parts: Sequence[RankPart]) -> str | None:
    """Return why the parts of the ranks do not make up a table, None where they do."""
    sizes = sorted({part.n_rows for part in parts})
    if len(sizes) > 1:
        return f"found {' and '.join(map(str, sizes))} rows, expected as many on all ranks"
    slots = {tuple(sorted(part.slots)): number for number, part in enumerate(parts) if part.has_rows}
    if len(slots) > 1:
        forms = ", ".join(f"{' '.join(map(_text, form)) or 'none'} on rank {number}" for form, number in slots.items())
        return f"found the slots {forms}, expected the same on all ranks"
    if any(part.is_copy for part in parts):
        return _problem_of_copies(parts)
    spans = sorted((*part.rows, number) for number, part in enumerate(parts) if part.has_rows)
    for (_, end, one), (begin, _, other) in pairwise([(0, 0, -1), *spans, (sizes[0], sizes[0], -1)]):
        if begin > end:
            return f"no rank has the rows {end} to {begin - 1}"
        if begin < end:
            return (
                f"ranks {one} and {other} have the row {begin}" if other >= 0 else f"rank {one} has rows beyond {begin}"
            )
    return None


def _problem_of_copies(parts: Sequence[RankPart]) -> str | None:
    others = [number for number, part in enumerate(parts) if part.has_rows and not part.is_copy]
    partial = [number for number, part in enumerate(parts) if part.is_copy and part.rows != (0, part.n_rows)]
    if others or partial:
        return f"rank {min(others + partial)} has a part, and other ranks have copies of all rows"
    return None


def _text(slot: SlotSpec) -> str:
    return f"{slot.name} {slot.kind}"
