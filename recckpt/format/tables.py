"""The tables of a checkpoint, as its manifest lists them (docs/format.md, sections 3 and 12.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from recckpt.format.json_fields import Fields
from recckpt.format.reduced import Reduced, parse_reduced, reduced_json
from recckpt.types import EMBEDDING, ITEM_BYTES, SlotSpec, check_table_name

COUNTS = ("int64", "uint8")  # part of the format: dtypes of the counts of ids that wait for a row, exact or in a filter
_COUNTED = re.compile(r"(.+)\.candidates(_\d+x\d+)?", re.DOTALL)


def counted_table(name: str) -> str:
    """Return the table whose waiting ids another one counts, by the name of that; "" where it counts none."""
    match = _COUNTED.fullmatch(name)
    return match[1] if match else ""


@dataclass(frozen=True)
class DeltaRows:
    """Rows and deletes of a table in the files of a delta, over all shards."""

    upserts: int  # rows that are new or have changed
    deletes: int  # ids that were deleted, each counted as often as a shard has it
    replaced: bool  # whether these are all rows, and nothing of older links counts


class ClockDates(NamedTuple):
    """The first and the last moment at which rows were dated by the clock, in seconds since 1970."""

    first: float
    last: float

    def joined(self, other: ClockDates | None) -> ClockDates:
        """Return what includes both."""
        return self if other is None else ClockDates(min(self.first, other.first), max(self.last, other.last))


@dataclass(frozen=True)
class LiveLayout:
    """How a table lay in memory of another library, as rows in places with numbers."""

    n_rows: int  # how many rows it has places for
    columns: tuple[tuple[int, int], ...] = ()  # ranges [begin, end) with a value each in slots; () where none has


@dataclass(frozen=True)
class TableEntry:
    """A table as it was saved: rows over all shards, and its slots; of a delta, also which rows it has itself."""

    name: str
    rows: int  # of the checkpoint, not of the delta
    slots: tuple[SlotSpec, ...]
    delta: DeltaRows | None = None
    reduced: Reduced | None = None  # what the table had more; None where it was saved as it was
    evicted_to: int | None = None  # the step up to which eviction was done; None where nothing is evicted in steps
    clock: ClockDates | None = None  # of ``last_time`` in rows; None where it has no date of the clock
    live: LiveLayout | None = None  # of a table that was another library's

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the id included."""
        return 8 + sum(slot.row_bytes for slot in self.slots)

    @property
    def own_rows(self) -> int:
        """Rows that lie in the checkpoint's own files."""
        return self.rows if self.delta is None else self.delta.upserts

    @property
    def is_whole(self) -> bool:
        """Whether all rows lie in the checkpoint's own files."""
        return self.delta is None or self.delta.replaced


def table_json(table: TableEntry) -> dict[str, Any]:
    """Return the JSON object of an entry."""
    entry = {"name": table.name, "rows": table.rows, "slots": [_slot_json(slot) for slot in table.slots]}
    if table.delta is not None:
        delta = table.delta
        entry["delta"] = {"upserts": delta.upserts, "deletes": delta.deletes, "replaced": delta.replaced}
    if table.reduced is not None:
        entry["reduced"] = reduced_json(table.reduced)
    if table.evicted_to is not None:
        entry["evicted_to"] = table.evicted_to
    if table.clock is not None:
        entry["clock"] = table.clock._asdict()
    if table.live is not None:
        entry["live"] = live_json(table.live)
    return entry


def live_json(live: LiveLayout) -> dict[str, Any]:
    """Return the JSON object of a layout."""
    columns = {"columns": [list(each) for each in live.columns]} if live.columns else {}
    return {"n_rows": live.n_rows, **columns}


def _slot_json(slot: SlotSpec) -> dict[str, Any]:
    return {"name": slot.name, "dtype": slot.dtype, "shape": list(slot.shape)}


def parse_table(fields: Fields, *, of_delta: bool) -> TableEntry:
    """Return the entry in a JSON object, of a delta or of a full checkpoint; CorruptCheckpointError for a wrong one."""
    try:
        name = check_table_name(fields.text("name"))
    except ValueError as error:
        raise fields.wrong("name", str(error), "a table name") from error
    slots = tuple(_slot(entry) for entry in fields.objects("slots"))
    names = [slot.name for slot in slots]
    if len(set(names)) < len(names) or EMBEDDING not in names:
        raise fields.wrong("slots", str(names), "different names, one of them 'embedding'")
    rows = fields.count("rows")
    if not of_delta and fields.has("delta"):
        raise fields.wrong("delta", "rows of a delta", "no such field in a full checkpoint")
    delta = _delta_rows(fields.mapping("delta"), rows) if of_delta else None
    reduced = parse_reduced(fields.mapping("reduced"), slots) if fields.has("reduced") else None
    evicted_to = fields.count("evicted_to") if fields.has("evicted_to") else None
    clock = _clock(fields.mapping("clock")) if fields.has("clock") else None
    live = _live(fields.mapping("live"), rows, slots) if fields.has("live") else None
    return TableEntry(name, rows, slots, delta, reduced, evicted_to, clock, live)


def _live(fields: Fields, rows: int, slots: tuple[SlotSpec, ...]) -> LiveLayout:
    n_rows = fields.count("n_rows", low=1)
    if n_rows < rows:
        raise fields.wrong("n_rows", str(n_rows), f"places for the {rows} rows at least")
    if not fields.has("columns"):
        return LiveLayout(n_rows)
    columns = fields.lists_of_counts("columns")
    borders = [0, *(each[-1] if each else 0 for each in columns)]
    ranges = tuple(pairwise(borders))
    [width] = (prod(slot.shape) for slot in slots if slot.name == EMBEDDING)
    if ranges != columns or sorted({*borders}) != borders or borders[-1] != width:
        raise fields.wrong("columns", str(columns), f"ranges [begin, end) in order and without gaps, from 0 to {width}")
    return LiveLayout(n_rows, ranges)


def _clock(fields: Fields) -> ClockDates:
    dates = ClockDates(fields.number("first"), fields.number("last"))
    if dates.last < dates.first:
        raise fields.wrong("last", str(dates.last), f"at least first, which is {dates.first}")
    return dates


def _delta_rows(fields: Fields, rows: int) -> DeltaRows:
    delta = DeltaRows(fields.count("upserts"), fields.count("deletes"), fields.flag("replaced"))
    if delta.replaced and delta.deletes:
        raise fields.wrong("deletes", str(delta.deletes), "0, since the table is replaced")
    if delta.upserts > rows or (delta.replaced and delta.upserts < rows):
        raise fields.wrong("upserts", str(delta.upserts), f"{'' if delta.replaced else 'at most '}the {rows} rows")
    return delta


def _slot(fields: Fields) -> SlotSpec:
    name, dtype = fields.text("name"), fields.text("dtype")
    if name in ("", "id", "table", "op"):
        raise fields.wrong("name", repr(name), "a slot name")
    if dtype not in ITEM_BYTES:
        raise fields.wrong("dtype", repr(dtype), f"one of {', '.join(ITEM_BYTES)}")
    spec = SlotSpec(name, dtype, fields.counts("shape", low=1))
    if spec.row_bytes >= 2**31:
        raise fields.wrong("shape", str(spec.shape), "a row of less than 2 GiB")
    return spec
