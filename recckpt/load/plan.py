"""Decides from which source each name of the model is loaded, by names and shapes only, before any row is read."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.manifest import misfit, other_decay
from recckpt.format.names import ID, Name, slot_name, state_name
from recckpt.format.tables import COUNTS, counted_table, descriptions_of
from recckpt.live.optimizer_slots import OPTIONAL, akin_slot, common_slot
from recckpt.load.conf import Entry
from recckpt.load.inventory import PLAIN, Inventory, LoadCandidate, Thing
from recckpt.load.problems import Problems, check_patterns, fitting_action, names_and_tables
from recckpt.load.report import (
    DECAY_STAYS,
    OF_TRAINING,
    SAVED_BY,
    SCHEDULE_STAYS,
    SETTINGS_STAY,
    UNASKED,
    LoadPlan,
    Planned,
)
from recckpt.load.tensor_tables import names_of_table, with_tables_as_tensors, with_tensors_as_tables
from recckpt.text import first_few, nearest
from recckpt.types import EMBEDDING, is_optimizer_slot

RESIZE = "resize"
_SCALARS = Name("sparse_opt", SPARSE_OPTIM)
_EXTRA_STATE = "_extra_state"  # torch's key of a module's extra state, which may have any shape


def regroups(saved: Thing, live: Thing) -> bool:
    """Return whether a slot has one value per range of columns on one side, and other ranges on the other side."""
    if live.columns:
        return saved.columns != live.columns
    return bool(saved.columns) and live.shape == ()


def _values_of(thing: Thing) -> str:
    if not thing.columns:
        return "one value per row"
    return f"one value for each of the columns {', '.join(f'{begin}:{end}' for begin, end in thing.columns)}"


class Match:
    """Matches the names of a candidate with the model's; ``there``: requested name -> its name in the checkpoint."""

    def __init__(self, model: Inventory, offer: LoadCandidate, problems: Problems) -> None:
        self.offer, self.model = offer, model
        self.there: dict[Name, Name] = {}
        self._known: set[Name] = set()  # names in the checkpoint that have a partner, asked for or not
        for name in model:
            is_asked = offer.entry.wants(name, is_schedule=model[name].is_schedule)
            try:
                source = _source(name, model[name].tied, offer)
            except ValueError as error:
                if is_asked:
                    problems.refuse(offer.entry, f"'oname': {error}", of_names=True)
                continue
            if model[name].tied and name.is_slot and source not in offer.inventory:
                akin = slot_name(source.table, akin_slot(source.slot) or source.slot)  # slot of a similar optimizer
                source = akin if akin in offer.inventory else source
            self._known.add(source)
            if is_asked:
                self.there[name] = source

    def check(self, problems: Problems) -> None:
        """Add the problems of this entry that do not depend on other entries."""
        entry, label, inventory = self.offer.entry, self.offer.label, self.offer.inventory
        check_patterns(entry, self.model, inventory, problems)
        asked = {pattern.text for pattern in entry.load if pattern.is_explicit}
        for name, source in self.there.items():
            if source in inventory:
                continue
            texts = (name.text, name.table) if name.slot == EMBEDDING else (name.text,)
            if any(text in asked or entry.renames.is_explicit(text) for text in texts):
                hint = nearest(self.called(source), names_and_tables(inventory))
                problems.refuse(entry, f"{label} has no {self.called(source)!r}{hint}", of_names=True)
        left = self._left()
        whole = [name for name in left if name.group == "dense" or name.slot == EMBEDDING]
        for name in (name for name in whole if name.group in entry.strict_groups):
            problems.lack([entry], name.table or name.text, in_model=True)
        others = [name.table or name.text for name in whole if name.group not in entry.strict_groups]
        taken_tables = self._known | {slot_name(name.table, ID) for name in left} - inventory.keys()  # also as tensors
        slots = [] if entry.serves else [name for name in left if name.slot not in ("", ID, EMBEDDING)]
        others += [name.text for name in slots if slot_name(name.table, ID) in taken_tables]
        if others:
            problems.warn(entry, f"{label} has names that are not in the model: {first_few(others)}")
        taken = {source.table for source in self.there.values() if source in inventory}
        reduced = {table: each for table, each in self.offer.reduced.items() if table in taken}
        what = "training that continues from there will not match the saved training bit for bit"
        if entry.serves:
            reduced = {table: each.of_slots((EMBEDDING,)) for table, each in reduced.items()}
            what = "its rows do not match the trained rows bit for bit"
        for line in descriptions_of(reduced):
            problems.warn(entry, f"{label} was saved with {line}: {what}")
        for line in self.offer.unsaved.descriptions if entry.is_own else ():
            problems.warn(entry, f"{label} lacks {line}")
        objects = [name.text for name in left if name.is_object]
        if entry.is_own and objects:
            remedy = "register them before the load, or later saves lack them"
            problems.warn(entry, f"{label} has states of unregistered objects: {first_few(objects)}; {remedy}")

    def _left(self) -> list[Name]:
        entry, inventory = self.offer.entry, self.offer.inventory
        left = [name for name in inventory if name not in self._known and entry.wants(name)]
        if not entry.serves:
            return left
        counts = set[str]()  # tables of counts for ids that wait for a row: only training needs them
        for table in {name.table for name in left if name.is_slot}:
            dtype = inventory.get(slot_name(table, EMBEDDING), Thing()).dtype
            if (waited_for := counted_table(table)) and slot_name(waited_for, ID) in inventory and dtype in COUNTS:
                counts.add(table)
        return [name for name in left if name.table not in counts]

    def fit(self, name: Name) -> tuple[str, str]:
        """Return (conversion, reason to leave the name out) for a name; raises ValueError(found, expected)."""
        saved, live = self.offer.inventory[self.there[name]], self.model[name]
        if name.is_settings and saved.lineage:
            other, decay = misfit(saved.lineage, live.lineage), other_decay(saved.lineage, live.lineage)
            return ("", SAVED_BY + other) if other else (DECAY_STAYS + decay if decay else "", "")
        takes_anything = "" in (saved.dtype, live.dtype) or name.text.endswith(_EXTRA_STATE)
        is_other, action = regroups(saved, live), self.offer.entry.action(name)
        if is_other or (not takes_anything and (saved.dtype, saved.shape) != (live.dtype, live.shape)):
            if action == "skip" and not (is_other and self.offer.entry.convert):
                return "", f"{self.offer.label} has {saved}, the model {live}: skipped"
            return _conversion(saved, live, action, of_rows=name.is_slot, regrouped=self.offer.entry.convert), ""
        embedding = slot_name(name.table, EMBEDDING)
        if name.is_slot and name != embedding and self.there.get(embedding) in self.offer.inventory:
            try:
                return "", self.fit(embedding)[1]  # a table without its embedding is of no use
            except ValueError:
                return "", ""  # the embedding itself is refused
        return "", ""

    def is_trained_alike(self, table: str) -> bool:
        name = slot_name(table, ID)
        there = self.there.get(name, name)
        thing = self.offer.inventory.get(there)
        if thing is None:
            return False
        if thing.tensor:
            return bool(thing.optimizer)
        live, saved = _slots(self.model, name.table), _slots(self.offer.inventory, there.table)
        if (reduced := self.offer.reduced.get(there.table)) is not None:
            saved |= set(filter(is_optimizer_slot, reduced.slots))
        if self.model[name].tied:
            return {*map(common_slot, live)} - OPTIONAL == {*map(common_slot, saved)} - OPTIONAL
        return live == saved

    def called(self, source: Name) -> str:
        is_missing = bool(source.table) and slot_name(source.table, ID) not in self.offer.inventory
        return source.table if is_missing else source.text


def _slots(inventory: Inventory, table: str | None = None) -> set[str]:
    slots = (name for name in inventory if name.is_slot and name.group == "sparse_opt")
    return {name.slot for name in slots if table in (None, name.table)}


def _source(name: Name, tied: tuple[str, ...], offer: LoadCandidate) -> Name:
    renames = offer.entry.renames
    text = renames.source(Name("dense_opt", name.optimizer) if name.parameter else name)
    if name.parameter:
        parameters = [renames.source(Name("dense", one)) for one in (name.parameter, *tied)]
        things = [offer.inventory.get(Name("dense", one), Thing()) for one in parameters]  # may be tied only there
        texts = dict.fromkeys([*parameters, *(other for thing in things for other in thing.tied)])
        names = [state_name(one, text) for one in texts]
        return next((one for one in names if one in offer.inventory), names[0])
    if name.group == "dense_opt" and Name("dense_opt", text) not in offer.inventory:
        return Name("extra", text)  # saved without the names of its parameters
    if not name.is_slot or "@" not in text:
        return Name(name.group, text)
    table, slot = text.rsplit("@", 1)
    others = names_of_table(name.table, table, tied)  # names of a live table there
    known = (one for one in (table, *others) if slot_name(one, ID) in offer.inventory)
    return slot_name(next(known, table), slot)


def as_rows(name: Name, saved: Thing) -> str:
    if saved.table:
        return f"rows of table {saved.table!r} -> {'state of ' if name.parameter else ''}dense tensor"
    where = f" in {saved.optimizer!r}" if saved.optimizer else ""
    of_state = f"state{where} of " if name.group == "sparse_opt" else ""
    return f"{of_state}dense tensor {saved.tensor!r} -> rows of table {name.table!r}"


def _conversion(saved: Thing, live: Thing, action: str, *, of_rows: bool, regrouped: bool) -> str:
    """Describe how ``saved`` becomes ``live``; ValueError(found, expected) if the action does not allow it.

    For rows of tables only the last dimension can be resized, because rows lie one after another in their files.
    """
    steps = []
    if regroups(saved, live):
        before, after = _values_of(saved), _values_of(live)
        if not saved.columns and saved.shape:
            raise ValueError(f"{saved}, in unknown ranges of columns", f"{live}, {after}")
        if not regrouped:
            raise ValueError(f"{saved}, {before}", f"{live}, {after}; or 'convert': True in load_conf")
        steps.append(f"{before} -> {after}")
        saved = replace(saved, shape=live.shape)
    is_alike = saved.dtype == live.dtype and live.is_embedding and saved.shape[1:] == live.shape[1:]
    if action == "error" and is_alike and saved.shape[:1] < live.shape[:1]:  # here are only more rows
        action = RESIZE
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


def plan_load(
    model: Inventory,
    offers: Sequence[LoadCandidate],
    problems: Problems,
    check: Callable[[Sequence[Planned], Problems], None] = lambda items, problems: None,
) -> LoadPlan:
    """Decide from which source each name is loaded.

    If several candidates have a name, the last one is used. ``check`` adds problems that only live objects show.

    Raises:
        LoadConfError: there are unknown names or keys; the message lists them, and all that does not fit.
        StateMismatchError: the only problems are states that do not fit.
        CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: the only problem is one unreadable
            checkpoint.
    """
    problems = copy.deepcopy(problems)
    items = resolve(model, offers, problems)
    check(items, problems)
    if problems.not_found:
        _excuse(model, offers, items, problems)
    misfits = [offer for offer in offers if offer.entry.label in problems.misfits] or offers
    places = [f"{offer.entry.label} ({offer.label})" if offer.entry.path else offer.label for offer in misfits]
    problems.raise_if_any(places or ["the bank"])
    return LoadPlan(tuple(items), tuple(offer.label for offer in offers), tuple(problems.warnings))


def resolve(model: Inventory, offers: Sequence[LoadCandidate], problems: Problems) -> list[Planned]:
    offers = [with_tables_as_tensors(model, with_tensors_as_tables(model, offer)) for offer in offers]
    matches = [Match(model, offer, problems) for offer in offers]
    for match in matches:
        match.check(problems)
    # Tables first, each with its ids and embeddings before the optimizer's slots.
    names = sorted(model, key=lambda n: (not n.is_slot, n.table, n.slot != ID, n.slot != EMBEDDING, n))
    planned = {name: _resolve_one(name, model[name], matches, problems) for name in names if not name.parameter}
    planned |= {name: _follow(name, model[name].tied, planned, matches) for name in names if name.parameter}
    scalars = planned.get(_SCALARS, Planned(_SCALARS))
    if scalars.offer is not None:
        planned[_SCALARS] = _checked_optimizer(scalars, matches[scalars.offer])
    items = [planned[name] for name in names]
    if any(offer.entry.where.slots for offer in offers):
        _check_filters(items, offers, problems)
    return items


def _resolve_one(name: Name, live: Thing, matches: Sequence[Match], problems: Problems) -> Planned:
    reasons: list[str] = []
    missing_in: list[Entry] = []
    for number, match in reversed(list(enumerate(matches))):
        if name not in match.there:
            continue
        entry, label, source = match.offer.entry, match.offer.label, match.there[name]
        saved = match.offer.inventory.get(source)
        if saved is None:
            reasons.append(f"{label} has no {match.called(source)!r}" if source != name else f"not in {label}")
            if name.group in entry.strict_groups and name.slot in ("", EMBEDDING):
                missing_in.append(entry)
            continue
        try:
            conversion, reason = match.fit(name)
        except ValueError as error:
            action = None if regroups(saved, live) else fitting_action(name, saved, live)
            found, expected = error.args
            problems.misfit(entry, name.text, found, expected, action)
            conversion = reason = ""
        if not reason:
            rows = as_rows(name, saved) if saved.tensor or saved.table else ""
            return Planned(name, number, source.text, saved, ", ".join(filter(None, (rows, conversion))))
        reasons.append(reason)
    if missing_in:
        problems.lack(missing_in, name.table or name.text)
    unasked = SCHEDULE_STAYS if live.is_schedule and matches else UNASKED
    if not live.is_schedule and matches and name.is_of_training and all(each.offer.entry.serves for each in matches):
        unasked = OF_TRAINING
    return Planned(name, reason="; ".join(reasons) or (SETTINGS_STAY if name.is_settings else unasked))


def _follow(name: Name, tied: Sequence[str], planned: Mapping[Name, Planned], matches: Sequence[Match]) -> Planned:
    """Plan the state of one parameter of a dense optimizer: the state comes from the source of the parameter."""
    parameters = [item for one in (name.parameter, *tied) if (item := planned.get(Name("dense", one)))]
    parameter = next((item for item in parameters if item.offer is not None), parameters[0] if parameters else None)
    if parameter is None:  # such as a parameter of a loss: only the own run may have its state
        own = [n for n, match in enumerate(matches) if match.offer.entry.is_own and name in match.there]
        return _state_of(name, own[0], matches) if own else Planned(name, reason="its parameter is not in the model")
    if parameter.offer is None:
        return Planned(name, reason="its parameter is not loaded")
    if name not in matches[parameter.offer].there:
        return Planned(name, reason=UNASKED)
    if RESIZE in parameter.conversion:
        return Planned(name, reason="its parameter is resized")
    settings, inventory = planned.get(Name("dense_opt", name.optimizer)), matches[parameter.offer].offer.inventory
    is_resumed = settings is not None and settings.offer == parameter.offer
    if settings is None or not is_resumed or Name("dense_opt", settings.source) in inventory:
        return _state_of(name, parameter.offer, matches)
    return Planned(name, settings.offer, settings.source)  # the whole state is loaded, by position


def _state_of(name: Name, number: int, matches: Sequence[Match]) -> Planned:
    match = matches[number]
    source, inventory = match.there[name], match.offer.inventory
    saved = inventory.get(source)
    if saved is not None:
        sides = ((inventory, source), (match.model, name))
        other = misfit(*(side.get(Name("dense_opt", one.optimizer), Thing()).lineage for side, one in sides))
        if other:
            return Planned(name, reason=SAVED_BY + other)
        return Planned(name, number, source.text, saved, as_rows(name, saved) if saved.table else "")
    if Name("dense_opt", source.optimizer) in inventory:
        return Planned(name, reason=f"{source.optimizer!r} there does not train {source.parameter!r}")
    if Name("extra", source.optimizer) in inventory:
        return Planned(name, reason=f"{source.optimizer!r} there has no names of parameters")
    return Planned(name, reason=f"{match.offer.label} has no {source.optimizer!r}")


def _checked_optimizer(item: Planned, match: Match) -> Planned:
    """Leave out the scalars of another sparse optimizer. The slots of its tables show that it is another one."""
    left_out = {slot for each in match.offer.reduced.values() for slot in each.slots if is_optimizer_slot(slot)}
    saved, live = sorted(_slots(match.offer.inventory) | left_out), sorted(_slots(match.model))
    if saved == live or any(map(match.is_trained_alike, {name.table for name in match.model if name.is_slot})):
        return item
    return Planned(item.name, reason=f"{SAVED_BY}an optimizer with slots {saved}, this one has {live}")


def _check_filters(planned: Iterable[Planned], offers: Sequence[LoadCandidate], problems: Problems) -> None:
    """Check that the loaded tables have the slots that ``where`` uses, with one number per row."""
    for item in planned:
        if item.offer is None or not item.name.is_slot:
            continue
        offer, table = offers[item.offer], item.source.rpartition("@")[0]
        for slot in sorted(offer.entry.where.slots):
            thing = offer.inventory.get(slot_name(table, slot))
            if thing is None:
                problems.refuse(offer.entry, f"'where': {offer.label} has no '{table}@{slot}'", of_names=True)
            elif math.prod(thing.shape) != 1:
                what = f"'{table}@{slot}' is {thing}, expected one number per row"
                problems.refuse(offer.entry, f"'where': {what}")


def _excuse(model: Inventory, offers: Sequence[LoadCandidate], items: Sequence[Planned], problems: Problems) -> None:
    """Let a run resume although its bank is gone, if its own checkpoint has all that the bank was to provide."""
    own = {number for number, offer in enumerate(offers) if offer.entry.is_own}
    for entry, error in list(problems.not_found):
        names = {name for name, thing in model.items() if entry.wants(name, is_schedule=thing.is_schedule)}
        asked = (item for item in items if item.name in names and not item.name.parameter)
        if own and all(item.offer in own for item in asked):
            problems.not_found.remove((entry, error))
            problems.warn(entry, f"{error}; it is not needed, since the run resumes")
