"""Which name of the model is taken from where: decided from names and shapes alone, before a row is read."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.format.names import ID, Name, slot_name
from recckpt.format.training import Lineage, misfit
from recckpt.load.conf import Entry
from recckpt.load.inventory import Inventory, LoadCandidate, Thing
from recckpt.load.match import RESIZE, Match, as_rows
from recckpt.load.problems import Problems
from recckpt.load.regrouping import regroups
from recckpt.load.report import OF_TRAINING, SAVED_BY, SETTINGS_STAY, UNASKED, LoadPlan, Planned
from recckpt.load.tensor_tables import with_tables_as_tensors, with_tensors_as_tables
from recckpt.types import EMBEDDING, is_optimizer_slot


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
    offers = [with_tables_as_tensors(model, with_tensors_as_tables(model, offer)) for offer in offers]
    matches = [Match(model, offer, problems) for offer in offers]
    for match in matches:
        match.check(problems)
    names = sorted(model, key=_order)
    planned = {name: _resolve_one(name, matches, problems) for name in names if not name.parameter}
    planned |= {name: _follow(name, model[name].tied, planned, matches) for name in names if name.parameter}
    for match in matches:
        match.advise(problems)
    items = [_checked_optimizer(planned[name], matches) for name in names]
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
            if not regroups(saved, match.model[name]):
                problems.advice.act(entry, name, saved, match.model[name])
            conversion = reason = ""
        if not reason:
            return Planned(name, number, source.text, saved, conversion)
        reasons.append(reason)
    if missing_in:
        problems.miss(missing_in, name.table or name.text)
    return Planned(name, reason="; ".join(reasons) or _why_unasked(name, matches))


def _why_unasked(name: Name, matches: Sequence[Match]) -> str:
    if name.is_settings:
        return SETTINGS_STAY
    is_left_out = name.is_of_training and all(match.offer.entry.serves for match in matches)
    return OF_TRAINING if matches and is_left_out else UNASKED


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
    if RESIZE in parameter.conversion:
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
        if other:
            return Planned(name, reason=SAVED_BY + other)
        return Planned(name, number, source.text, saved, as_rows(name, saved) if saved.table else "")
    if Name("dense_opt", source.optimizer) in inventory:
        return Planned(name, reason=f"{source.optimizer!r} there does not train {source.parameter!r}")
    if Name("extra", source.optimizer) in inventory:
        return Planned(name, reason=f"{source.optimizer!r} there has no names of parameters")
    return Planned(name, reason=f"{match.offer.label} has no {source.optimizer!r}")


def _lineage(inventory: Inventory, state: Name) -> Lineage:
    """Return the class of the dense optimizer that a state of a parameter is of."""
    return inventory.get(Name("dense_opt", state.optimizer), Thing()).lineage


def _checked_optimizer(item: Planned, matches: Sequence[Match]) -> Planned:
    """Leave out the scalars of another sparse optimizer, which is known by the slots of its tables."""
    if item.name.text != SPARSE_OPTIM or item.name.is_slot or item.offer is None:
        return item
    match = matches[item.offer]
    saved, live = sorted(_all_slots(match.offer)), sorted(_optimizer_slots(match.model))
    if saved == live or any(map(match.is_trained_alike, {name.table for name in match.model if name.is_slot})):
        return item
    return Planned(item.name, reason=f"{SAVED_BY}an optimizer with slots {saved}, this one has {live}")


def _all_slots(offer: LoadCandidate) -> set[str]:
    """Return the slots of the optimizer that saved, those among them that it has left out."""
    left_out = {slot for reduced in offer.reduced.values() for slot in reduced.slots if is_optimizer_slot(slot)}
    return _optimizer_slots(offer.inventory) | left_out


def _optimizer_slots(inventory: Inventory) -> set[str]:
    return {name.slot for name in inventory if name.group == "sparse_opt" and name.is_slot}


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
