"""Which name of the model is taken from where: decided from names and shapes alone, before a row is read."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import ID, Name, slot_name, state_name
from recckpt.format.reduced import descriptions_of
from recckpt.format.training import Lineage, misfit
from recckpt.load.conf import Entry
from recckpt.load.inventory import PLAIN, Inventory, LoadCandidate, Thing
from recckpt.load.problems import Problems, check_patterns, first_few, names_and_tables
from recckpt.load.report import SAVED_BY, SETTINGS_STAY, UNASKED, LoadPlan, Planned
from recckpt.text import nearest
from recckpt.types import EMBEDDING, is_optimizer_slot

_RESIZE = "resize"
_EXTRA_STATE = "_extra_state"  # torch's: what a module gives it takes back, of whatever shape


def plan_load(
    model: Inventory,
    offers: Sequence[LoadCandidate],
    problems: Problems,
    check: Callable[[Sequence[Planned], Problems], None] = lambda items, problems: None,
) -> LoadPlan:
    """Decide what is loaded from where.

    Args:
        model: names of the model.
        offers: what the checkpoints have, in the order of the bank; of those that have a name, the last one counts.
        problems: what is wrong with the bank already.
        check: adds what is known of the live objects alone.

    Raises:
        LoadConfError: names or keys that do not exist; all of them, and all that does not fit beside them.
        StateMismatchError: there is nothing but state that does not fit.
        CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: one entry's checkpoint cannot be read.
    """
    problems = copy.deepcopy(problems)
    items = resolve(model, offers, problems)
    check(items, problems)
    _excuse(offers, items, problems)
    misfits = [offer for offer in offers if offer.entry.label in problems.misfits] or offers
    problems.raise_if_any([offer.called for offer in misfits] or ["the bank"])
    return LoadPlan(tuple(items), tuple(offer.label for offer in offers), tuple(problems.warnings))


def resolve(model: Inventory, offers: Sequence[LoadCandidate], problems: Problems) -> list[Planned]:
    """Take each name once, from the last offer that has it; what is wrong is added to ``problems``."""
    matches = [Match(model, offer, problems) for offer in offers]
    for match in matches:
        match.check(problems)
    names = sorted(model, key=_order)
    planned = {name: _resolve_one(name, matches, problems) for name in names if not name.parameter}
    planned |= {name: _follow(name, model[name].tied, planned, matches) for name in names if name.parameter}
    items = [_checked_optimizer(planned[name], model, offers) for name in names]
    _check_filters(items, offers, problems)
    return items


def _order(name: Name) -> tuple[object, ...]:
    """Sort tables first, each with its ids and embeddings before the optimizer's slots."""
    return not name.is_slot, name.table, name.slot != ID, name.slot != EMBEDDING, name


def _resolve_one(name: Name, matches: Sequence[Match], problems: Problems) -> Planned:
    reasons: list[str] = []
    missing_in: list[Entry] = []
    for number, match in reversed(list(enumerate(matches))):
        if name not in match.there:
            continue
        entry, label, source, saved = match.offer.entry, match.offer.label, match.there[name], match.saved(name)
        if saved is None:
            reasons.append(f"{label} has no {match.called(source)!r}" if source != name else f"not in {label}")
            if name.group in entry.strict_groups and name.slot in ("", EMBEDDING):
                missing_in.append(entry)
            continue
        try:
            conversion, reason = match.fit(name)
        except ValueError as error:
            problems.misfit(entry, name.text, *error.args)
            conversion = reason = ""
        if not reason:
            return Planned(name, number, source.text, saved, conversion)
        reasons.append(reason)
    if missing_in:
        problems.miss(missing_in, name.table or name.text)
    unasked = SETTINGS_STAY if name.is_settings else UNASKED
    return Planned(name, reason="; ".join(reasons) or unasked)


def _follow(name: Name, tied: Sequence[str], planned: Mapping[Name, Planned], matches: Sequence[Match]) -> Planned:
    """Plan the state of one parameter of a dense optimizer: it follows its parameter, as slots follow ids."""
    parameters = [item for one in (name.parameter, *tied) if (item := planned.get(Name("dense", one)))]
    parameter = next((item for item in parameters if item.offer is not None), parameters[0] if parameters else None)
    if parameter is None:  # not in the state dict, as that of a loss: such a one is at home in the own run only
        own = [n for n, match in enumerate(matches) if match.offer.entry.is_own and name in match.there]
        return _state_of(name, own[0], matches) if own else Planned(name, reason="its parameter is not in the model")
    if parameter.offer is None:
        return Planned(name, reason="its parameter is not loaded")
    if name not in matches[parameter.offer].there:
        return Planned(name, reason=UNASKED)
    if _RESIZE in parameter.conversion:
        return Planned(name, reason="its parameter is resized")
    settings, inventory = planned.get(Name("dense_opt", name.optimizer)), matches[parameter.offer].offer.inventory
    is_resumed = settings is not None and settings.offer == parameter.offer
    if settings is None or not is_resumed or Name("dense_opt", settings.source) in inventory:
        return _state_of(name, parameter.offer, matches)
    return Planned(name, settings.offer, settings.source)  # the state comes whole, by the places of the parameters


def _state_of(name: Name, number: int, matches: Sequence[Match]) -> Planned:
    """Take the state of a parameter from one offer, or say why it has none."""
    match = matches[number]
    source, saved, inventory = match.there[name], match.saved(name), match.offer.inventory
    if saved is not None:
        other = misfit(_lineage(inventory, source), _lineage(match.model, name))
        return Planned(name, reason=SAVED_BY + other) if other else Planned(name, number, source.text, saved)
    if Name("dense_opt", source.optimizer) in inventory:
        return Planned(name, reason=f"{source.optimizer!r} there does not train {source.parameter!r}")
    if Name("extra", source.optimizer) in inventory:
        return Planned(name, reason=f"{source.optimizer!r} there has no names of parameters")
    return Planned(name, reason=f"{match.offer.label} has no {source.optimizer!r}")


def _lineage(inventory: Inventory, state: Name) -> Lineage:
    """Return the class of the dense optimizer that a state of a parameter is of."""
    return inventory.get(Name("dense_opt", state.optimizer), Thing()).lineage


def _checked_optimizer(item: Planned, model: Inventory, offers: Sequence[LoadCandidate]) -> Planned:
    """Leave out the scalars of another sparse optimizer, which is known by its slots."""
    if item.name.text != SPARSE_OPTIM or item.name.is_slot or item.offer is None:
        return item
    offer, live = offers[item.offer], _optimizer_slots(model)
    left_out = {slot for reduced in offer.reduced.values() for slot in reduced.slots if is_optimizer_slot(slot)}
    saved = sorted({*_optimizer_slots(offer.inventory), *left_out})  # a save that leaves slots out has their optimizer
    if saved == live:
        return item
    return Planned(item.name, reason=f"{SAVED_BY}an optimizer with slots {saved}, this one has {live}")


def _optimizer_slots(inventory: Inventory) -> list[str]:
    return sorted({name.slot for name in inventory if name.group == "sparse_opt" and name.is_slot})


def _check_filters(planned: Iterable[Planned], offers: Sequence[LoadCandidate], problems: Problems) -> None:
    """The slots that ``where`` looks at must be in the tables that are taken, and be one number a row."""
    for item in planned:
        if item.offer is None or not item.name.is_slot:
            continue
        offer, table = offers[item.offer], item.source.rpartition("@")[0]
        for slot in sorted(offer.entry.where.slots):
            thing = offer.inventory.get(slot_name(table, slot))
            if thing is None:
                problems.about_names(offer.entry, f"'where': {offer.label} has no '{table}@{slot}'")
            elif math.prod(thing.shape) != 1:
                problems.about_filter(offer.entry, f"'{table}@{slot}' is {thing}, expected one number a row")


def _excuse(offers: Sequence[LoadCandidate], items: Sequence[Planned], problems: Problems) -> None:
    """A run that resumes may do without a bank that is gone, where its own checkpoint has all that was asked of it."""
    own = {number for number, offer in enumerate(offers) if offer.entry.is_own}
    for entry, error in list(problems.not_found):
        asked = (item for item in items if entry.wants(item.name) and not item.name.parameter)
        if own and all(item.offer in own for item in asked):
            problems.not_found.remove((entry, error))
            problems.warn(entry, f"{error}; it is not needed, since the run resumes")


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
        left = [name for name in inventory if name not in self._known and entry.wants(name)]
        whole = [name for name in left if name.group == "dense" or name.slot == EMBEDDING]
        for name in (name for name in whole if name.group in entry.strict_groups):
            problems.surprise(entry, name.table or name.text)
        others = [name.table or name.text for name in whole if name.group not in entry.strict_groups]
        others += [n.text for n in left if n.slot not in ("", ID, EMBEDDING) and slot_name(n.table, ID) in self._known]
        if others:
            problems.warn(entry, f"{label} has what is not in the model: {first_few(others)}")
        taken = {source.table for source in self.there.values() if source in inventory}
        for line in descriptions_of({table: each for table, each in self.offer.reduced.items() if table in taken}):
            what = "training that goes on from there is not, bit for bit, the training that was saved"
            problems.warn(entry, f"{label} was saved with {line}: {what}")
        for line in self.offer.unsaved.descriptions if entry.is_own else ():
            problems.warn(entry, f"{label} lacks {line}")
        objects = [name.text for name in left if name.is_object]
        if entry.is_own and objects:
            remedy = "register it before it is loaded, or saves to come lack it"
            problems.warn(entry, f"{label} has the state of what is not registered: {first_few(objects)}; {remedy}")

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
        saved, live = self.offer.inventory[self.there[name]], self.model[name]
        if other := misfit(saved.lineage, live.lineage):
            return "", SAVED_BY + other
        takes_anything = "" in (saved.dtype, live.dtype) or name.text.endswith(_EXTRA_STATE)
        if not takes_anything and (saved.dtype, saved.shape) != (live.dtype, live.shape):
            action = self.offer.entry.action(name)
            if action == "skip":
                return "", f"{self.offer.label} has {saved}, the model {live}: skipped"
            return _conversion(saved, live, action, of_rows=name.is_slot), ""
        embedding = slot_name(name.table, EMBEDDING)
        if name.is_slot and name != embedding and embedding in self.there and self.saved(embedding):
            try:
                return "", self.fit(embedding)[1]  # a table without its embedding is of no use
            except ValueError:
                return "", ""  # the embedding itself is refused
        return "", ""

    def called(self, source: Name) -> str:
        """Return the table where all of it is missing, else the name itself."""
        is_missing = bool(source.table) and slot_name(source.table, ID) not in self.offer.inventory
        return source.table if is_missing else source.text


def _source(name: Name, tied: tuple[str, ...], offer: LoadCandidate) -> Name:
    """Return the name that the checkpoint has for one of the model, of a tied parameter for any that it has there."""
    renames = offer.entry.renames
    text = renames.source(Name("dense_opt", name.optimizer) if name.parameter else name)
    if name.parameter:
        names = _names_there([renames.source(Name("dense", one)) for one in (name.parameter, *tied)], text, offer)
        return next((one for one in names if one in offer.inventory), names[0])
    if name.group == "dense_opt" and Name("dense_opt", text) not in offer.inventory:
        return Name("extra", text)  # saved without the names of its parameters
    return slot_name(*text.rsplit("@", 1)) if name.is_slot and "@" in text else Name(name.group, text)


def _names_there(parameters: Sequence[str], optimizer: str, offer: LoadCandidate) -> list[Name]:
    """Return the names that the state of a parameter may have there, where it may be tied to others."""
    things = [offer.inventory.get(Name("dense", parameter), Thing()) for parameter in parameters]
    return [state_name(one, optimizer) for one in dict.fromkeys([*parameters, *(n for t in things for n in t.tied)])]


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
        steps.append(f"{_RESIZE} {step}" if allowed and (is_width or not of_rows) else "")
    if not all(steps):
        raise ValueError(str(saved), str(live))
    return ", ".join(steps)
