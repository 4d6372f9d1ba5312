"""Which name of the model is taken from where: decided from names and shapes alone, before a row is read."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.load.conf import Entry
from recckpt.load.inventory import Inventory, Offer
from recckpt.load.matching import Match
from recckpt.load.names import ID, Name, slot_name
from recckpt.load.problems import Problems
from recckpt.load.report import SETTINGS_STAY, LoadPlan, Planned
from recckpt.types import EMBEDDING


def plan_load(
    model: Inventory,
    offers: Sequence[Offer],
    problems: Problems,
    check: Callable[[Sequence[Planned], Problems], None] = lambda items, problems: None,
) -> LoadPlan:
    """Decide what is loaded from where.

    Args:
        model: names of the model.
        offers: what the checkpoints have, in the order of the bank; of those that have a name, the last one counts.
        problems: what is wrong with the bank already.
        check: adds what only the live objects can tell.

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


def resolve(model: Inventory, offers: Sequence[Offer], problems: Problems) -> list[Planned]:
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
        entry, label, source, found = match.offer.entry, match.offer.label, match.there[name], match.found(name)
        if found is None:
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
            return Planned(name, number, source.text, found, conversion)
        reasons.append(reason)
    if missing_in:
        problems.miss(missing_in, name.table or name.text)
    unasked = SETTINGS_STAY if name.is_settings else "nothing asks for it"
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
        return Planned(name, reason="nothing asks for it")
    if parameter.conversion.rpartition(", ")[2].startswith("resize"):
        return Planned(name, reason="its parameter is resized")
    return _state_of(name, parameter.offer, matches)


def _state_of(name: Name, number: int, matches: Sequence[Match]) -> Planned:
    """Take the state of a parameter from one offer, or say why it has none."""
    match = matches[number]
    source, found, inventory = match.there[name], match.found(name), match.offer.inventory
    if found is not None:
        return Planned(name, number, source.text, found)
    if Name("dense_opt", source.optimizer) in inventory:
        return Planned(name, reason=f"{source.optimizer!r} there does not train {source.parameter!r}")
    if Name("extra", source.optimizer) in inventory:
        return Planned(name, reason=f"{source.optimizer!r} there has no names of parameters")
    return Planned(name, reason=f"{match.offer.label} has no {source.optimizer!r}")


def _checked_optimizer(item: Planned, model: Inventory, offers: Sequence[Offer]) -> Planned:
    """Leave out the scalars of another sparse optimizer, which is known by its slots."""
    if item.name.text != SPARSE_OPTIM or item.name.is_slot or item.offer is None:
        return item
    saved, live = _optimizer_slots(offers[item.offer].inventory), _optimizer_slots(model)
    if saved == live:
        return item
    return Planned(item.name, reason=f"saved by an optimizer with slots {saved}, this one has {live}")


def _optimizer_slots(inventory: Inventory) -> list[str]:
    return sorted({name.slot for name in inventory if name.group == "sparse_opt" and name.is_slot})


def _check_filters(planned: Iterable[Planned], offers: Sequence[Offer], problems: Problems) -> None:
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
                problem = f"{offer.entry.label}: 'where': '{table}@{slot}' is {thing}, expected one number a row"
                problems.conf += [problem] if problem not in problems.conf else []


def _excuse(offers: Sequence[Offer], items: Sequence[Planned], problems: Problems) -> None:
    """A run that resumes may do without a bank that is gone, where its own checkpoint has all that was asked of it."""
    own = {number for number, offer in enumerate(offers) if offer.entry.is_own}
    for entry, error in list(problems.not_found):
        asked = (item for item in items if entry.wants(item.name) and not item.name.parameter)
        if own and all(item.offer in own for item in asked):
            problems.not_found.remove((entry, error))
            problems.warn(entry, f"{error}; it is not needed, since the run resumes")
