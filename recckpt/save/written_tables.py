"""The tables that a rank wrote, in columns, and those of all ranks added up; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from recckpt.errors import StateMismatchError
from recckpt.format.reduced import Reduced
from recckpt.format.tables import ClockDates, DeltaRows, LiveLayout, TableEntry
from recckpt.types import SlotSpec

Slots = tuple[SlotSpec, ...]
_T = TypeVar("_T")


@dataclass(frozen=True)
class NamesAndSlots:
    """The names and the slots of the tables of a rank; most ranks have the same."""

    names: tuple[str, ...]
    kinds: tuple[Slots, ...]  # all that occur
    kind_of: tuple[int, ...]  # of each table, the number of its kind

    @classmethod
    def of(cls, slots: Mapping[str, Slots]) -> NamesAndSlots:
        """Return those of tables by name."""
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(slots.values()))}
        return cls(tuple(slots), tuple(numbers), tuple(numbers[kind] for kind in slots.values()))


@dataclass(frozen=True, eq=False)
class WrittenTables:
    """The tables that one rank wrote: in columns, since rank 0 is sent those of all ranks and adds them up.

    Attributes:
        heads: their names and slots.
        counts: of each table its rows; in a delta upserts and deletes too. Shape (1 or 3, tables).
        reduced: by name, what the tables had more; of those that were not saved as they were.
        evicted_to: by name, the step up to which eviction was done; of those where rows are evicted in steps.
        clock: by name, when the clock has dated rows; of those where it has.
        live: by name, how the table lies, the same on all ranks; of live tables.
    """

    heads: NamesAndSlots
    counts: npt.NDArray[np.int64]
    reduced: Mapping[str, Reduced] = field(default_factory=dict)
    evicted_to: Mapping[str, int] = field(default_factory=dict)
    clock: Mapping[str, ClockDates] = field(default_factory=dict)
    live: Mapping[str, LiveLayout] = field(default_factory=dict)


def tables_of_all(ranks: Sequence[WrittenTables], replaced: Collection[str]) -> tuple[TableEntry, ...]:
    """Add up the tables of the ranks, which all wrote a full checkpoint, or all a delta.

    Args:
        ranks: what each of them wrote.
        replaced: names of the tables that a delta holds whole.

    Raises:
        StateMismatchError: the slots of a table are not the same on all ranks; names it.
    """
    alike: defaultdict[NamesAndSlots, list[int]] = defaultdict(list)
    for rank, tables in enumerate(ranks):
        alike[tables.heads].append(rank)
    slots = _slots_of_all({heads: group[0] for heads, group in alike.items()})
    places = {name: place for place, name in enumerate(slots)}
    counts = np.zeros((len(ranks[0].counts), len(slots)), np.int64)
    n_ranks = np.zeros(len(slots), np.int64)  # that have the table
    for heads, group in alike.items():
        at = [places[name] for name in heads.names]
        counts[:, at] += sum(ranks[rank].counts for rank in group)
        n_ranks[at] += len(group)
    reduced = _by_name(tables.reduced for tables in ranks)
    clock = _by_name(tables.clock for tables in ranks)
    evicted_to = _by_name(tables.evicted_to for tables in ranks)
    live = _by_name(tables.live for tables in ranks)

    def entry(name: str, n_rows: int, *changed: int) -> TableEntry:
        steps = evicted_to.get(name, [])
        is_even = len(steps) == n_ranks[places[name]] and len(set(steps)) == 1  # else slices that are trained apart
        return TableEntry(
            name,
            n_rows,
            slots[name],
            DeltaRows(changed[0], changed[1], name in replaced) if changed else None,
            reduce(Reduced.plus, reduced[name]) if name in reduced else None,
            steps[0] if is_even else None,
            reduce(ClockDates.joined, clock[name]) if name in clock else None,
            live[name][0] if name in live else None,
        )

    return tuple(entry(name, *of_table) for name, of_table in zip(slots, counts.T.tolist(), strict=True))


def _slots_of_all(first_ranks: Mapping[NamesAndSlots, int]) -> dict[str, Slots]:
    """Return the slots of all tables by name, from the first ranks that have some of them, in order of rank."""
    slots: dict[str, Slots] = {}
    for heads, rank in first_ranks.items():
        for name, kind in zip(heads.names, heads.kind_of, strict=True):
            own = heads.kinds[kind]
            if slots.setdefault(name, own) != own:
                raise StateMismatchError(
                    f"table {name!r} of rank {rank}",
                    mismatched={"slots": (own, slots[name])},
                    remedy="give the table the same shape, dtype and optimizer on every rank",
                )
    return slots


def _by_name(of_ranks: Iterable[Mapping[str, _T]]) -> dict[str, list[_T]]:
    """Return what ranks have of tables, by table."""
    lists: defaultdict[str, list[_T]] = defaultdict(list)
    for own in of_ranks:
        for name, value in own.items():
            lists[name].append(value)
    return lists
