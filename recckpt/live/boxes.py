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
        columns: (begin, end) of the columns of these rows that it has, of ``width``; None for all.
        width: of the whole table; 0 where ``columns`` is None.
        is_copy: whether they are a copy of what other ranks have too.
        slots: of the table, ``embedding`` among them; empty where the rank has no rows.
        scalars: of the optimizer.
        settings: of the optimizer.
        why: rows may change that were not looked up; None where none do.
        refusal: why the table cannot be a live one, None where it can.
    """

    n_rows: int
    rows: tuple[int, int] = (0, 0)
    columns: tuple[int, int] | None = None
    width: int = 0
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

    @property
    def is_first_column(self) -> bool:
        """Whether this rank has rows, with all their columns or the first."""
        return self.has_rows and (self.columns is None or self.columns[0] == 0)

    def kind_of(self, slot: SlotSpec) -> str:
        """Return a slot as text, which is the same for all parts of a table."""
        if self.columns is None or slot.shape != (self.columns[1] - self.columns[0],):
            return f"{slot.name} {slot.kind}"
        return f"{slot.name} {slot.dtype}[its columns of {self.width}]"


def column_ranges(parts: Sequence[RankPart]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of columns over which ranks have divided a table, in order; none where it is not divided."""
    ranges = sorted({part.columns for part in parts if part.columns is not None and part.has_rows})
    return tuple(ranges) if len(ranges) > 1 else ()


def problem_of(parts: Sequence[RankPart]) -> str | None:
    """Return why the parts of the ranks do not make up a table, None where they do."""
    sizes = sorted({part.n_rows for part in parts})
    if len(sizes) > 1:
        return f"found {' and '.join(map(str, sizes))} rows, expected as many on all ranks"
    slots = {tuple(sorted(map(part.kind_of, part.slots))): n for n, part in enumerate(parts) if part.has_rows}
    if len(slots) > 1:
        forms = ", ".join(f"{' '.join(form) or 'none'} on rank {number}" for form, number in slots.items())
        return f"found the slots {forms}, expected the same on all ranks"
    if any(part.is_copy for part in parts):
        return _problem_of_copies(parts)
    return _problem_of_columns(parts) or _problem_of_rows(parts)


def _problem_of_rows(parts: Sequence[RankPart]) -> str | None:
    """Return which rows no rank has, or several have."""
    n_rows = parts[0].n_rows
    spans = sorted({part.rows: (*part.rows, n) for n, part in enumerate(parts) if part.is_first_column}.values())
    for (_, end, one), (begin, _, other) in pairwise([(0, 0, -1), *spans, (n_rows, n_rows, -1)]):
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


def _problem_of_columns(parts: Sequence[RankPart]) -> str | None:
    """Return why the columns of some rows are not there once, on ranks that are divided as for all other rows."""
    by_rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parts:
        if part.has_rows and part.columns is not None:
            by_rows.setdefault(part.rows, []).append(part.columns)
    expected, width = column_ranges(parts), max(part.width for part in parts)
    for (first, end), ranges in by_rows.items():
        borders = [(0, 0), *sorted(ranges), (width, width)]
        if any(before[1] != after[0] for before, after in pairwise(borders)):
            return f"ranks have the columns {sorted(ranges)} of the rows {first} to {end - 1}, expected 0 to {width}"
        if expected and tuple(sorted(ranges)) != expected:
            return f"the rows {first} to {end - 1} are divided into the columns {sorted(ranges)}, others are not"
    return None
