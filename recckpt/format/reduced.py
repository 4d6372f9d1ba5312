"""What a checkpoint has less of a table than the table had, by its manifest (docs/format.md, section 3.1)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recckpt.format.json_fields import Fields
from recckpt.text import count, plural
from recckpt.types import ITEM_BYTES, SlotSpec

FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Where:
    """Conditions of the rows that were saved, all of them; of a list of ids, how many and their checksum."""

    minimum: tuple[tuple[str, int | float], ...] = ()  # scalar slot, and the least value
    n_ids: int | None = None  # None for all ids
    ids_xxh3: int = 0
    sample: float = 1.0  # the share of all ids, by their hash

    def __str__(self) -> str:
        parts = [f"{slot} of at least {_number(least)}" for slot, least in self.minimum]
        parts += [] if self.n_ids is None else [f"one of {plural(self.n_ids, 'given id')}"]
        parts += [] if self.sample == 1.0 else [f"in a sample of {self.sample:g}"]
        return " and ".join(parts) or "any"


@dataclass(frozen=True)
class Narrowed:
    """A slot that was stored in a narrower dtype than the table has."""

    slot: str
    dtype: str  # of the table
    error: float = field(default=0.0, compare=False)  # of a value of any row, at most


@dataclass(frozen=True)
class Reduced:
    """How a table was not saved as it is."""

    slots: tuple[str, ...] = ()  # that were left out
    where: Where | None = None  # what the rows have to meet; None for all rows
    rows: int = field(default=0, compare=False)  # that were left out, over all shards
    narrowed: tuple[Narrowed, ...] = ()

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The dtypes that the table has, by the slots that were narrowed."""
        return {narrowed.slot: narrowed.dtype for narrowed in self.narrowed}

    @property
    def forgets_why(self) -> bool:
        """Whether a table that is loaded from this cannot tell which rows would be saved: what says so is not there."""
        looked_at = {slot for slot, _ in self.where.minimum} if self.where else set()
        return not looked_at.isdisjoint({*self.slots, *self.dtypes})

    def __str__(self) -> str:
        parts = [f"without {', '.join(self.slots)}"] if self.slots else []
        parts += [f"without {plural(self.rows, 'row')} (saved: {self.where})"] if self.rows else []
        parts += [f"{each.slot} narrower than {each.dtype}, by {each.error:.3g} at most" for each in self.narrowed]
        return "; ".join(parts)

    def of_slots(self, names: Collection[str]) -> Reduced:
        """Return what was left out of some slots, and the rows that were left out of all."""
        slots = tuple(slot for slot in self.slots if slot in names)
        return replace(self, slots=slots, narrowed=tuple(each for each in self.narrowed if each.slot in names))

    def plus(self, other: Reduced) -> Reduced:
        """Return what was left out of two shards of a table."""
        return replace(self.no_better(other), rows=self.rows + other.rows)

    def no_better(self, other: Reduced) -> Reduced:
        """Return this with the errors of rows that are in another checkpoint, or shard, as well."""
        errors = {each.slot: each.error for each in other.narrowed}
        worst = (replace(each, error=max(each.error, errors.get(each.slot, 0.0))) for each in self.narrowed)
        return replace(self, narrowed=tuple(worst))


def reduced_json(reduced: Reduced) -> dict[str, Any]:
    """Return the JSON object of what was left out."""
    where: dict[str, Any] | None = None
    if reduced.where is not None:
        choice = reduced.where
        where = {"min": dict(choice.minimum), "sample": choice.sample}
        where |= {} if choice.n_ids is None else {"ids": choice.n_ids, "ids_xxh3": f"{choice.ids_xxh3:016x}"}
    narrowed = [{"slot": each.slot, "dtype": each.dtype, "error": each.error} for each in reduced.narrowed]
    return {"slots": list(reduced.slots), "where": where, "rows": reduced.rows, "narrowed": narrowed}


def parse_reduced(fields: Fields, slots: Collection[SlotSpec]) -> Reduced:
    """Return what :func:`reduced_json` wrote of a table with these slots; CorruptCheckpointError for anything else."""
    saved = {slot.name: slot.dtype for slot in slots}
    left_out = fields.texts("slots")
    if len({*left_out, *saved}) < len(left_out) + len(saved) or "" in left_out:
        raise fields.wrong("slots", str(left_out), "different slots that are not in the checkpoint")
    narrowed = tuple(_narrowed(entry, saved) for entry in fields.objects("narrowed"))
    if len({each.slot for each in narrowed}) < len(narrowed):
        raise fields.wrong("narrowed", str([each.slot for each in narrowed]), "different slots")
    where = _where(fields.mapping("where")) if fields.has("where") else None
    rows = fields.count("rows")
    if rows and where is None:
        raise fields.wrong("rows", str(rows), "0, where no row is left out")
    return Reduced(tuple(left_out), where, rows, narrowed)


def _narrowed(fields: Fields, saved: Mapping[str, str]) -> Narrowed:
    slot, dtype = fields.text("slot"), fields.text("dtype")
    if slot not in saved:
        raise fields.wrong("slot", repr(slot), f"one of {', '.join(saved)}")
    if not is_narrower(saved[slot], dtype):
        raise fields.wrong("dtype", repr(dtype), f"a wider one than {saved[slot]}")
    return Narrowed(slot, dtype, fields.number("error"))


def _where(fields: Fields) -> Where:
    minimum = fields.scalars("min")
    for slot, least in minimum.items():
        if type(least) not in (int, float) or not abs(least) <= sys.float_info.max:
            raise fields.wrong(f"min.{slot}", repr(least), "a number")
    n_ids = fields.maybe_count("ids")
    ids_xxh3 = 0 if n_ids is None else fields.checksum("ids_xxh3")
    pairs = tuple(sorted(minimum.items()))
    sample = fields.number("sample")
    if sample > 1:
        raise fields.wrong("sample", repr(sample), "a share from 0 to 1")
    return Where(pairs, n_ids, ids_xxh3, sample)


def _number(value: int | float) -> str:
    """Return a whole number in full, any other in short."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def is_narrower(dtype: str, than: str) -> bool:
    """Say whether values may be stored in a dtype, narrower than that of their table: both are of numbers with a point.

    float16 and bfloat16 have the same width, and neither holds all of the other.
    """
    return dtype in FLOATS and than in FLOATS and ITEM_BYTES[dtype] < ITEM_BYTES[than]


def descriptions_of(tables: Mapping[str, Reduced]) -> list[str]:
    """Return a line for each kind of what was left out, if there is any, with the tables that it was left out of."""
    alike: dict[Reduced, list[str]] = {}
    sums: dict[Reduced, Reduced] = {}
    for name, reduced in tables.items():
        alike.setdefault(reduced, []).append(name)
        sums[reduced] = sums[reduced].plus(reduced) if reduced in sums else reduced
    return [f"{_names(names)} {text}" for reduced, names in alike.items() if (text := str(sums[reduced]))]


def _names(names: list[str]) -> str:
    some = ", ".join(map(repr, names[:3]))
    more = f" and {count(len(names) - 3)} more" if len(names) > 3 else ""
    return f"table{'s' if len(names) > 1 else ''} {some}{more}"
