"""A checkpoint beside a model: which of its names each name of the model means, and how what is there fits."""

from __future__ import annotations

from collections.abc import Sequence

from recckpt.format.names import ID, Name, slot_name, state_name
from recckpt.format.reduced import descriptions_of
from recckpt.format.tables import COUNTS, counted_table
from recckpt.format.training import misfit
from recckpt.load.inventory import PLAIN, Inventory, LoadCandidate, Thing
from recckpt.load.problems import Problems, check_patterns, names_and_tables
from recckpt.load.regrouping import regrouping, regroups
from recckpt.load.renamed import likely_renames
from recckpt.load.report import SAVED_BY
from recckpt.load.tensor_tables import names_of_table
from recckpt.text import first_few, nearest
from recckpt.types import EMBEDDING, is_optimizer_slot

RESIZE = "resize"
_EXTRA_STATE = "_extra_state"  # torch's: what a module gives it takes back, of whatever shape


class Match:
    """An offer beside the names of the model.

    Attributes:
        model: the names of the model.
        there: name of the model that the entry asks for -> its name in the checkpoint.
    """

    def __init__(self, model: Inventory, offer: LoadCandidate, problems: Problems) -> None:
        self.offer, self.model = offer, model
        self.there: dict[Name, Name] = {}
        self._known: set[Name] = set()  # names in the checkpoint that have a partner, asked for or not
        for name in model:
            is_asked = offer.entry.wants(name)
            try:
                source = _source(name, model[name].tied, offer)
            except ValueError as error:
                if is_asked:
                    problems.about_names(offer.entry, f"'oname': {error}")
                continue
            self._known.add(source)
            if is_asked:
                self.there[name] = source

    def check(self, problems: Problems) -> None:
        """Add what is wrong with the entry by itself, whatever the others offer."""
        entry, label, inventory = self.offer.entry, self.offer.label, self.offer.inventory
        check_patterns(entry, self.model, inventory, problems)
        for name, source in self.there.items():
            if source not in inventory and self._is_explicit(name):
                hint = nearest(self.called(source), names_and_tables(inventory))
                problems.about_names(entry, f"{label} has no {self.called(source)!r}{hint}")
        left = self._left()
        whole = [name for name in left if name.group == "dense" or name.slot == EMBEDDING]
        for name in (name for name in whole if name.group in entry.strict_groups):
            problems.surprise(entry, name.table or name.text)
        others = [name.table or name.text for name in whole if name.group not in entry.strict_groups]
        taken_tables = self._known | {slot_name(name.table, ID) for name in left} - inventory.keys()  # or as tensors
        slots = [] if entry.serves else [name for name in left if name.slot not in ("", ID, EMBEDDING)]
        others += [name.text for name in slots if slot_name(name.table, ID) in taken_tables]
        if others:
            problems.warn(entry, f"{label} has what is not in the model: {first_few(others)}")
        taken = {source.table for source in self.there.values() if source in inventory}
        reduced = {table: each for table, each in self.offer.reduced.items() if table in taken}
        what = "training that goes on from there is not, bit for bit, the training that was saved"
        if entry.serves:
            reduced = {table: each.of_slots((EMBEDDING,)) for table, each in reduced.items()}
            what = "its rows are not, bit for bit, those that were trained"
        for line in descriptions_of(reduced):
            problems.warn(entry, f"{label} was saved with {line}: {what}")
        for line in self.offer.unsaved.descriptions if entry.is_own else ():
            problems.warn(entry, f"{label} lacks {line}")
        objects = [name.text for name in left if name.is_object]
        if entry.is_own and objects:
            remedy = "register it before it is loaded, or saves to come lack it"
            problems.warn(entry, f"{label} has the state of what is not registered: {first_few(objects)}; {remedy}")

    def advise(self, problems: Problems) -> None:
        """Add rules for names that the entry must have and lacks, if others there fit them."""
        missing = [name for name in self.there if (name.table or name.text) in problems.missing]
        missing = [name for name in missing if name.slot in ("", EMBEDDING) and self.saved(name) is None]
        left = [name for name in self._left() if name.slot in ("", EMBEDDING)]
        if missing and left:
            rules = likely_renames(self.model, self.offer.inventory, missing=missing, left=left)
            problems.advice.rename(self.offer.entry, rules)

    def _left(self) -> list[Name]:
        """Return what the entry asks for, is there, and is nothing of the model."""
        left = [name for name in self.offer.inventory if name not in self._known and self.offer.entry.wants(name)]
        return [name for name in left if not self._is_count(name)] if self.offer.entry.serves else left

    def _is_count(self, name: Name) -> bool:
        """Say whether this counts ids that wait for a row in another table, which only training needs."""
        waited_for, inventory = counted_table(name.table), self.offer.inventory
        dtype = inventory.get(slot_name(name.table, EMBEDDING), Thing()).dtype
        return bool(waited_for) and slot_name(waited_for, ID) in inventory and dtype in COUNTS

    def _is_explicit(self, name: Name) -> bool:
        """Say whether somebody asked for just this; of a whole table the embedding is what must be there."""
        entry = self.offer.entry
        asked = {pattern.text for pattern in entry.load if pattern.is_explicit}
        if name.text in asked or entry.renames.is_explicit(name.text):
            return True
        return name.slot == EMBEDDING and (name.table in asked or entry.renames.is_explicit(name.table))

    def saved(self, name: Name) -> Thing | None:
        """Return what the checkpoint has of a name that the entry asks for."""
        return self.offer.inventory.get(self.there[name])

    def fit(self, name: Name) -> tuple[str, str]:
        """Return (conversion, why it is left out) of a name that is there; a ValueError says (found, expected)."""
        saved = self.offer.inventory[self.there[name]]
        conversion, reason = self._fit(name, saved, self.model[name])
        if reason or not (saved.tensor or saved.table):
            return conversion, reason
        return ", ".join(filter(None, (as_rows(name, saved), conversion))), ""

    def _fit(self, name: Name, saved: Thing, live: Thing) -> tuple[str, str]:
        if other := misfit(saved.lineage, live.lineage):
            return "", SAVED_BY + other
        takes_anything = "" in (saved.dtype, live.dtype) or name.text.endswith(_EXTRA_STATE)
        is_other, action = regroups(saved, live), self.offer.entry.action(name)
        if is_other or (not takes_anything and (saved.dtype, saved.shape) != (live.dtype, live.shape)):
            converts = is_other and self.offer.entry.convert
            if action == "skip" and not converts:
                return "", f"{self.offer.label} has {saved}, the model {live}: skipped"
            step, saved = regrouping(saved, live, is_allowed=converts) if is_other else ("", saved)
            return ", ".join(filter(None, (step, _conversion(saved, live, action, of_rows=name.is_slot)))), ""
        embedding = slot_name(name.table, EMBEDDING)
        if name.is_slot and name != embedding and embedding in self.there and self.saved(embedding):
            try:
                return "", self.fit(embedding)[1]  # a table without its embedding is of no use
            except ValueError:
                return "", ""  # the embedding itself is refused
        return "", ""

    def is_trained_alike(self, table: str) -> bool:
        """Say whether an optimizer there has kept of the rows of a table what that of the model keeps, if anything."""
        name = slot_name(table, ID)
        there = self.there.get(name, name)
        thing = self.offer.inventory.get(there)
        if thing is None or thing.tensor:
            return thing is not None and bool(thing.optimizer)
        live, saved = (_slots(inventory, one) for inventory, one in ((self.model, name), (self.offer.inventory, there)))
        if (reduced := self.offer.reduced.get(there.table)) is not None:
            saved |= set(filter(is_optimizer_slot, reduced.slots))
        return live == saved

    def called(self, source: Name) -> str:
        """Return the table where all of it is missing, else the name itself."""
        is_missing = bool(source.table) and slot_name(source.table, ID) not in self.offer.inventory
        return source.table if is_missing else source.text


def _slots(inventory: Inventory, of: Name) -> set[str]:
    return {name.slot for name in inventory if name.table == of.table and name.group == "sparse_opt"}


def _source(name: Name, tied: tuple[str, ...], offer: LoadCandidate) -> Name:
    """Return the name that the checkpoint has for one of the model, of a tied parameter for any that it has there."""
    renames = offer.entry.renames
    text = renames.source(Name("dense_opt", name.optimizer) if name.parameter else name)
    if name.parameter:
        names = _names_there([renames.source(Name("dense", one)) for one in (name.parameter, *tied)], text, offer)
        return next((one for one in names if one in offer.inventory), names[0])
    if name.group == "dense_opt" and Name("dense_opt", text) not in offer.inventory:
        return Name("extra", text)  # saved without the names of its parameters
    if not name.is_slot or "@" not in text:
        return Name(name.group, text)
    table, slot = text.rsplit("@", 1)
    others = names_of_table(name.table, table, tied)  # as which a live table may be there
    known = (one for one in (table, *others) if slot_name(one, ID) in offer.inventory)
    return slot_name(next(known, table), slot)


def _names_there(parameters: Sequence[str], optimizer: str, offer: LoadCandidate) -> list[Name]:
    """Return the names that the state of a parameter may have there, where it may be tied to others."""
    things = [offer.inventory.get(Name("dense", parameter), Thing()) for parameter in parameters]
    return [state_name(one, optimizer) for one in dict.fromkeys([*parameters, *(n for t in things for n in t.tied)])]


def as_rows(name: Name, saved: Thing) -> str:
    """Say what becomes of a dense tensor, or of its state, whose rows go into a table; or of a table."""
    if saved.table:
        return f"rows of table {saved.table!r} -> {'state of ' if name.parameter else ''}dense tensor"
    where = f" in {saved.optimizer!r}" if saved.optimizer else ""
    of_state = f"state{where} of " if name.group == "sparse_opt" else ""
    return f"{of_state}dense tensor {saved.tensor!r} -> rows of table {name.table!r}"


def _conversion(saved: Thing, live: Thing, action: str, *, of_rows: bool) -> str:
    """Say how ``saved`` becomes ``live``, or raise ValueError(found, expected) where the action does not allow it.

    Rows of tables, which lie one after the other in their files, get another last dimension only.
    """
    steps = []
    if saved.dtype != live.dtype:
        allowed = action in ("cast", "resize") and PLAIN not in (saved.dtype, live.dtype)
        steps.append(f"cast {saved.dtype} -> {live.dtype}" if allowed else "")
    if saved.shape != live.shape:
        allowed = action == "resize" and len(saved.shape) == len(live.shape)
        is_width = saved.shape[:-1] == live.shape[:-1]
        sides = (saved.shape[-1:], live.shape[-1:]) if is_width else (saved.shape, live.shape)
        step = " -> ".join("x".join(map(str, side)) for side in sides)
        steps.append(f"{RESIZE} {step}" if allowed and (is_width or not of_rows) else "")
    if not all(steps):
        raise ValueError(str(saved), str(live))
    return ", ".join(steps)
