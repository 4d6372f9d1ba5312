"""Which slots and rows of a model's tables its saver saves: a :class:`Choose`, applied to the tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recckpt.format.names import WILDCARD, Pattern, slot_name
from recckpt.format.tables import FLOATS, Narrowed, Reduced, is_narrower
from recckpt.live.attached import AttachedTable
from recckpt.policies.options import Choose
from recckpt.policies.row_filter import RowFilter
from recckpt.sparse.files.reduced_rows import TableChoice
from recckpt.sparse.files.table_rows import source_of
from recckpt.sparse.table.store import in_order, is_stored
from recckpt.text import nearest
from recckpt.types import EMBEDDING, SavableTable, SlotSpec


@dataclass(frozen=True)
class Choice:
    """Which slots and rows of each table are saved, and in which dtypes.

    Attributes:
        slots: slots to save in addition to ids and embeddings; None for all ...
        without: ... except these slots.
        where: row filters; a table's name wins over patterns.
        store: dtypes of slots; a slot's name wins over patterns.
    """

    slots: tuple[Pattern, ...] | None = None
    without: tuple[Pattern, ...] = ()
    where: tuple[tuple[Pattern, RowFilter], ...] = ()
    store: tuple[tuple[Pattern, str], ...] = ()

    @property
    def is_everything(self) -> bool:
        return self.slots is None and not (self.without or self.where or self.store)

    @property
    def leaves_out_optimizers(self) -> bool:
        """Whether no optimizer slot is saved, as in an export for serving."""
        return self.slots == () or Pattern("sparse_opt") in self.without

    def of_table(self, table: SavableTable) -> Choice:
        """Return the choice for a table. To a table of counts, only entries with its full name apply.

        Patterns are meant for tables that users make: a table of counts has no slots, and if it is a Bloom filter, its
        ids are not the user's ids.
        """
        if self.is_everything or getattr(table, "is_trained", True):
            return self
        where = tuple((pattern, rows) for pattern, rows in self.where if pattern.is_explicit)
        store = tuple((pattern, dtype) for pattern, dtype in self.store if pattern.is_explicit)
        return replace(self, where=where, store=store)

    def of(self, table: str, slots: Iterable[SlotSpec]) -> TableChoice | None:
        if self.is_everything:
            return None
        kept = [slot for slot in slots if slot.name == EMBEDDING or self._keeps(table, slot.name)]
        left_out = tuple(sorted({slot.name for slot in slots} - {slot.name for slot in kept}))
        dtypes = {slot.name: self._stored(table, slot) for slot in kept}
        narrowed = tuple(Narrowed(slot.name, slot.dtype, 0.0) for slot in kept if dtypes[slot.name] != slot.dtype)
        where = self._where(table)
        if not left_out and not narrowed and where is None:
            return None
        stored = [SlotSpec(slot.name, dtypes[slot.name], slot.shape) for slot in kept]
        record = None if where is None else where.record
        return TableChoice(in_order(stored), where, Reduced(left_out, record, 0, tuple(sorted(narrowed, key=str))))

    def check(self, tables: Mapping[str, SavableTable], *, of_store: bool = False) -> None:
        """Raise one ValueError that lists every choice that does not fit the tables.

        ``of_store`` checks only dtypes, and only for slots that exist already.
        """
        tables = {} if self.is_everything or (of_store and not self.store) else tables
        problems = [
            problem
            for name, table in tables.items()
            for problem in self.of_table(table)._problems(name, table, of_store=of_store)
        ]
        if problems:
            raise ValueError("; ".join(problems))

    def unmatched(self, tables: Mapping[str, SavableTable]) -> frozenset[str]:
        """Return a message for each option that matches no table or slot, with the nearest known name."""
        if self.is_everything:
            return frozenset()
        slots = {name: slots_of_table(table) for name, table in tables.items()}
        names = [slot_name(table, slot.name) for table, specs in slots.items() for slot in specs]
        known = [*slots, *(name.text for name in names)]
        lost = [("slots", p) for p in (*(self.slots or ()), *self.without) if not any(map(p.matches, names))]
        choices = {name: self.of_table(table) for name, table in tables.items()}
        stored = {p for name in names for p, _ in choices[name.table].store if p.matches(name)}
        chosen = {p for table, choice in choices.items() for p, _ in choice.where if _is_of(p, table)}
        lost += [("store", p) for p, _ in self.store if p not in stored]
        lost += [("where", p) for p, _ in self.where if p not in chosen]
        return frozenset(
            f"Choose: {what}: {p.text!r} matches nothing in the model{_hint(p.text, known)}" for what, p in lost
        )

    def _keeps(self, table: str, slot: str) -> bool:
        name = slot_name(table, slot)
        is_chosen = self.slots is None or any(pattern.matches(name) for pattern in self.slots)
        return is_chosen and not any(pattern.matches(name) for pattern in self.without)

    def _where(self, table: str) -> RowFilter | None:
        matches = [(not p.is_explicit, where) for p, where in self.where if _is_of(p, table)]
        return min(matches, key=lambda match: match[0])[1] if matches else None

    def _stored(self, table: str, slot: SlotSpec) -> str:
        name = slot_name(table, slot.name)
        matches = [(not p.is_explicit, dtype) for p, dtype in self.store if p.matches(name)]
        return min(matches, key=lambda match: match[0])[1] if matches else slot.dtype

    def _problems(self, name: str, table: SavableTable, *, of_store: bool) -> Iterator[str]:
        slots = slots_of_table(table)
        for slot in slots:
            dtype = self._stored(name, slot)
            is_saved = slot.name == EMBEDDING or self._keeps(name, slot.name)
            if is_saved and dtype != slot.dtype and not is_narrower(dtype, slot.dtype):
                expected = [narrower for narrower in FLOATS if is_narrower(narrower, slot.dtype)]
                can = f"it can be stored as {' or '.join(expected)}" if expected else "it can only be stored unchanged"
                yield f"Choose: store: {name}@{slot.name} is {slot.dtype}, found {dtype!r}: {can}; choose other slots"
        where, by_name = None if of_store else self._where(name), {slot.name: slot for slot in slots}
        for one in sorted(where.slots if where else ()):
            if one not in by_name:
                yield f"Choose: where: table {name!r} has no slot {one!r}{nearest(one, by_name)}"
            elif math.prod(by_name[one].shape) != 1:
                yield f"Choose: where: {name}@{one} has shape {by_name[one].shape}, expected one number per row"
        if where is not None and isinstance(table, AttachedTable) and table.rows.box.columns:
            yield (
                f"Choose: where: the columns of table {name!r} are split over ranks, so no rank can choose its rows: "
                "save all rows, or shard the table by rows"
            )


def choice_of(choose: Any) -> Choice:
    if choose is None:
        return Choice()
    if not isinstance(choose, Choose):
        raise TypeError(f"choose must be a recckpt.policies.Choose, or None, found {choose!r:.200}")
    return Choice(*choose.patterns, choose.row_filters, choose.dtypes)


def slots_of_table(table: SavableTable) -> Sequence[SlotSpec]:
    if isinstance(table, AttachedTable):
        return table.specs
    return table.store.slots if is_stored(table) else source_of(table).slots


def _is_of(pattern: Pattern, table: str) -> bool:
    return pattern.matches(slot_name(table, EMBEDDING))


def _hint(text: str, known: Sequence[str]) -> str:
    slots = {name.rpartition("@")[2] for name in known if "@" in name}
    if text in slots:
        return f"; '*@{text}' means this slot of all tables"
    return "" if WILDCARD.findall(text) else nearest(text, known)
