"""The tables of a checkpoint in its manifest, and what was left out of them (docs/format.md, section 3)."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from math import prod
from typing import Annotated

from msgspec import Meta

from recckpt.format.codec import COUNT_LIMIT, Checksum, Count, JsonRecord, Number
from recckpt.text import count, plural
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec, check_table_name

FLOATS = ("float16", "bfloat16", "float32", "float64")
COUNTS = ("int64", "uint8")  # part of the format: dtypes of the counts of ids that wait for a row, exact or in a filter
AVERAGE = ("average_from", "average_of", "average_since")  # part of the format: the slots of an average
_COUNTED = re.compile(r"(.+)\.candidates(_\d+x\d+)?", re.DOTALL)

Problem = tuple[str, object, object]  # a field, what was found there, and what was expected


class Where(JsonRecord, frozen=True, rename={"minimum": "min", "n_ids": "ids"}):
    """Conditions that all saved rows meet; a list of ids is recorded as its length and checksum."""

    minimum: Mapping[str, int | float]  # scalar slot -> least value
    sample: Annotated[float, Meta(ge=0, le=1)]  # share of all ids, chosen by their hash
    n_ids: Count | None = None  # None for all ids
    ids_xxh3: Checksum | None = None

    def __str__(self) -> str:
        parts = [f"{slot} of at least {_number(least)}" for slot, least in self.minimum.items()]
        parts += [] if self.n_ids is None else [f"one of {plural(self.n_ids, 'given id')}"]
        parts += [] if self.sample == 1.0 else [f"in a sample of {self.sample:g}"]
        return " and ".join(parts) or "any"


@dataclass(frozen=True)
class Narrowed:
    slot: str
    dtype: str  # dtype in the table
    error: Number = field(compare=False)  # largest rounding error


@dataclass(frozen=True)
class Reduced:
    slots: tuple[str, ...]  # slots that were left out
    where: Where | None  # condition of saved rows; None for all rows
    rows: Count = field(compare=False)  # number of rows left out, over all shards
    narrowed: tuple[Narrowed, ...]

    @property
    def dtypes(self) -> Mapping[str, str]:
        return {narrowed.slot: narrowed.dtype for narrowed in self.narrowed}

    @property
    def forgets_why(self) -> bool:
        """Whether a table that is loaded from this checkpoint lacks values that decide which rows are saved."""
        looked_at = set(self.where.minimum) if self.where else set[str]()
        return not looked_at.isdisjoint({*self.slots, *self.dtypes})

    def __str__(self) -> str:
        parts = [f"without {', '.join(self.slots)}"] if self.slots else []
        parts += [f"without {plural(self.rows, 'row')} (saved: {self.where})"] if self.rows else []
        parts += [f"{each.slot} narrower than {each.dtype}, by {each.error:.3g} at most" for each in self.narrowed]
        return "; ".join(parts)

    def of_slots(self, names: Collection[str]) -> Reduced:
        """Return this record for only some of the slots; the left-out rows stay the same."""
        slots = tuple(slot for slot in self.slots if slot in names)
        return replace(self, slots=slots, narrowed=tuple(each for each in self.narrowed if each.slot in names))

    def plus(self, other: Reduced) -> Reduced:
        """Return what was left out of two shards of a table."""
        return replace(self.no_better(other), rows=self.rows + other.rows)

    def no_better(self, other: Reduced) -> Reduced:
        """Return this record with each error raised to the error in the other record, if that is larger."""
        errors = {each.slot: each.error for each in other.narrowed}
        worst = (replace(each, error=max(each.error, errors.get(each.slot, 0.0))) for each in self.narrowed)
        return replace(self, narrowed=tuple(worst))


def _number(value: int | float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_narrower(dtype: str, than: str) -> bool:
    """Return whether floating-point values of dtype ``than`` may be stored in ``dtype``.

    float16 and bfloat16 have the same width, and neither of them holds all values of the other.
    """
    return dtype in FLOATS and than in FLOATS and ITEM_BYTES[dtype] < ITEM_BYTES[than]


def descriptions_of(tables: Mapping[str, Reduced]) -> list[str]:
    groups: dict[tuple[object, ...], tuple[list[str], list[Reduced]]] = {}
    for name, reduced in tables.items():
        names, alike = groups.setdefault((reduced.slots, repr(reduced.where), reduced.narrowed), ([], []))
        names.append(name)
        alike.append(reduced)
    lines = []
    for names, alike in groups.values():
        if text := str(reduce(Reduced.plus, alike)):
            more = f" and {count(len(names) - 3)} more" if len(names) > 3 else ""
            lines.append(f"table{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:3]))}{more} {text}")
    return lines


def counted_table(name: str) -> str:
    """Return the table whose waiting ids the table ``name`` counts; "" if ``name`` is not a table of counts."""
    match = _COUNTED.fullmatch(name)
    return match[1] if match else ""


def averages_of(table: str, tables: Sequence[TableEntry]) -> list[str]:
    """Return which of the tables of a checkpoint are averages of the rows of one table."""
    near = {entry.name: entry.is_average for entry in tables if entry.name.startswith(f"{table}.")}
    others = {name for name, is_average in near.items() if not is_average}
    if any(entry.name == table and entry.is_average for entry in tables):  # saved inside RowAverage.swap(), as all were
        others |= {name for name in near if any(other.startswith(f"{name}.") for other in near)}
    of_others = tuple(f"{name}." for name in others)
    return [name for name in near.keys() - others if not name.startswith(of_others)]


class DeltaRows(JsonRecord, frozen=True):
    upserts: Count  # new or changed rows
    deletes: Count  # deleted ids, counted once per shard that has them
    replaced: bool  # whether these are all rows, so that no parent is needed


class ClockDates(JsonRecord, frozen=True):
    """The first and the last date that the clock gave to rows, in seconds since 1970."""

    first: Number
    last: Number

    def joined(self, other: ClockDates | None) -> ClockDates:
        return self if other is None else ClockDates(min(self.first, other.first), max(self.last, other.last))


class LiveLayout(JsonRecord, frozen=True):
    """The layout of a table in another library's memory: numbered places for rows."""

    n_rows: Count  # places for rows
    # Ranges [begin, end) of columns with one value each in slots; () without such slots.
    columns: Annotated[tuple[tuple[Count, Count], ...], Meta(min_length=1)] = ()


class TableEntry(JsonRecord, frozen=True):
    """A table as it was saved: rows over all shards, and its slots; in a delta, also the rows of the delta."""

    name: str
    rows: Count  # rows of the checkpoint, even in a delta
    slots: tuple[SlotSpec, ...]
    delta: DeltaRows | None = None
    reduced: Reduced | None = None  # what was left out; None if the whole table was saved
    evicted_to: Count | None = None  # step up to which rows were evicted; None without eviction by steps
    clock: ClockDates | None = None  # range of the clock's dates in ``last_time``; None if the clock has dated no rows
    live: LiveLayout | None = None  # layout of a table of another library

    @property
    def row_bytes(self) -> int:
        return 8 + sum(slot.row_bytes for slot in self.slots)

    @property
    def own_rows(self) -> int:
        return self.rows if self.delta is None else self.delta.upserts

    @property
    def is_whole(self) -> bool:
        return self.delta is None or self.delta.replaced

    @property
    def is_average(self) -> bool:
        left_out = self.reduced.slots if self.reduced else ()
        return {*AVERAGE} <= {*(slot.name for slot in self.slots), *left_out}


def table_problems(table: TableEntry, *, of_delta: bool) -> Iterator[Problem]:
    try:
        check_table_name(table.name)
    except ValueError as error:
        yield "name", error, "a table name"
    names = [slot.name for slot in table.slots]
    for number, slot in enumerate(table.slots):
        for key, found, expected in _slot_problems(slot):
            yield f"slots[{number}].{key}", found, expected
    if len(set(names)) < len(names) or EMBEDDING not in names:
        yield "slots", names, "different names, one of them 'embedding'"
    if of_delta != (table.delta is not None):
        where = "no such field in a full checkpoint" if table.delta else "this field, in a delta"
        yield "delta", "rows of a delta" if table.delta else "no such field", where
    if table.delta is not None:
        delta, n_rows = table.delta, table.rows
        if delta.replaced and delta.deletes:
            yield "delta.deletes", delta.deletes, "0, since the table is replaced"
        if delta.upserts > n_rows or (delta.replaced and delta.upserts < n_rows):
            yield "delta.upserts", delta.upserts, f"{'' if delta.replaced else 'at most '}the {n_rows} rows"
    if table.reduced is not None:
        yield from _reduced_problems(table.reduced, {slot.name: slot.dtype for slot in table.slots})
    if table.clock is not None and table.clock.last < table.clock.first:
        yield "clock.last", table.clock.last, f"at least {table.clock.first}, as in clock.first"
    if table.live is not None:
        yield from _live_problems(table.live, table)


def _slot_problems(slot: SlotSpec) -> Iterator[Problem]:
    if slot.name in ("", "id", "table", "op"):
        yield "name", repr(slot.name), "a slot name"
    if slot.dtype not in ITEM_BYTES:
        yield "dtype", repr(slot.dtype), f"one of {', '.join(ITEM_BYTES)}"
    for axis, n_values in enumerate(slot.shape):
        if not 1 <= n_values < COUNT_LIMIT:
            yield f"shape[{axis}]", n_values, "an int of at least 1, below 10^18"
    if slot.row_bytes >= 2**31:
        yield "shape", slot.shape, "a row of less than 2 GiB"


def _reduced_problems(reduced: Reduced, saved: Mapping[str, str]) -> Iterator[Problem]:
    left_out, where, slots = reduced.slots, reduced.where, [each.slot for each in reduced.narrowed]
    if len({*left_out, *saved}) < len(left_out) + len(saved) or "" in left_out:
        yield "reduced.slots", left_out, "different slots that are not in the checkpoint"
    for number, each in enumerate(reduced.narrowed):
        if each.slot not in saved:
            yield f"reduced.narrowed[{number}].slot", repr(each.slot), f"one of {', '.join(saved)}"
        elif not is_narrower(saved[each.slot], each.dtype):
            yield f"reduced.narrowed[{number}].dtype", repr(each.dtype), f"a wider one than {saved[each.slot]}"
    if len(set(slots)) < len(slots):
        yield "reduced.narrowed", slots, "different slots"
    if where is None and reduced.rows:
        yield "reduced.rows", reduced.rows, "0, because no row is left out"
    for slot, least in (where.minimum if where else {}).items():
        if abs(least) > sys.float_info.max:
            yield f"reduced.where.min.{slot}", least, "a number that a double can hold"
    if where is not None and (where.n_ids is None) != (where.ids_xxh3 is None):
        yield "reduced.where.ids_xxh3", where.ids_xxh3, "a checksum, if there are ids"


def _live_problems(live: LiveLayout, table: TableEntry) -> Iterator[Problem]:
    if live.n_rows < table.rows:
        yield "live.n_rows", live.n_rows, f"at least {table.rows}, the number of rows"
    borders = [0, *(end for _, end in live.columns)]
    [width] = (prod(slot.shape) for slot in table.slots if slot.name == EMBEDDING)
    is_whole = tuple(pairwise(borders)) == live.columns and sorted({*borders}) == borders and borders[-1] == width
    if live.columns and not is_whole:
        expected = f"ranges [begin, end) in order and without gaps, from 0 to {width}"
        yield "live.columns", live.columns, expected
