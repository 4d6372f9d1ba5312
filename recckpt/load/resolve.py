"""Which name of the model is taken from where: decided from names and shapes alone, before a row is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.load.conf import Entry
from recckpt.load.matching import SETTINGS_STAY, Inventory, Match, Offer, Planned, called
from recckpt.load.parameter_states import follow
from recckpt.load.problems import Problems
from recckpt.load.selection import ID, Name, slot_name
from recckpt.types import EMBEDDING


def resolve(model: Inventory, offers: Sequence[Offer], problems: Problems) -> list[Planned]:
    """Take each name once, from the last offer that has it.

    Args:
        model: names of the model.
        offers: the entries of a bank in order, each with what its checkpoint has.
        problems: what is wrong is added here.
    """
    matches = [Match(model, offer, problems) for offer in offers]
    for match in matches:
        match.check(problems)
    names = sorted(model, key=_order)
    planned = {name: _resolve_one(name, matches, problems) for name in names if not name.parameter}
    planned |= {name: follow(name, planned, matches) for name in names if name.parameter}
    items = [_checked_optimizer(planned[name], model, offers) for name in names]
    _check_filters(items, offers, problems)
    return items


def _resolve_one(name: Name, matches: Sequence[Match], problems: Problems) -> Planned:
    reasons: list[str] = []
    missing_in: list[Entry] = []
    for number in reversed(range(len(matches))):
        match, offer = matches[number], matches[number].offer
        if name not in match.there:
            continue
        source = match.there[name]
        found = offer.inventory.get(source)
        if found is None:
            reasons.append(
                f"{offer.label} has no {called(source, offer)!r}" if source != name else f"not in {offer.label}"
            )
            if name.group in offer.entry.strict_groups and name.slot in ("", EMBEDDING):
                missing_in.append(offer.entry)
            continue
        try:
            conversion, reason = match.fit(name)
        except ValueError as error:
            problems.misfit(offer.entry, name.text, *error.args)
            conversion = reason = ""
        if not reason:
            return Planned(name, number, source.text, found, conversion)
        reasons.append(reason)
    if missing_in:
        problems.miss(missing_in, name.table or name.text)
    unasked = SETTINGS_STAY if name.is_settings else "nothing asks for it"
    return Planned(name, reason="; ".join(reasons) or unasked)


def _order(name: Name) -> tuple[object, ...]:
    """Sort tables first, each with its ids and embeddings before the optimizer's slots."""
    return not name.is_slot, name.table, name.slot != ID, name.slot != EMBEDDING, name


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
