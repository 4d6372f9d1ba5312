"""Which name of the model is taken from where: decided from names and shapes alone, before a row is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.load.conf import Entry
from recckpt.load.problems import Problems, first_few
from recckpt.load.selection import GROUPS, ID, Name, Pattern, slot_name
from recckpt.text import nearest
from recckpt.types import EMBEDDING

PLAIN = "plain data"  # in place of a dtype: state that is no tensor
_EXTRA_STATE = "_extra_state"  # torch's: what a module gives it takes back, of whatever shape


@dataclass(frozen=True)
class Thing:
    """What is known of a name without reading it.

    Attributes:
        dtype: of a slot or tensor, or :data:`PLAIN`; "" where it is not known or does not matter.
        shape: of one row of a slot, or of a tensor.
        rows: rows of the table; 0 for what is no slot.
        n_bytes: bytes to read, 0 where that is not known.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()
    rows: int = 0
    n_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" if self.dtype not in ("", PLAIN) else self.dtype or "state"


Inventory = Mapping[Name, Thing]


@dataclass(frozen=True)
class Offer:
    """An entry and what its checkpoint has."""

    entry: Entry
    label: str
    inventory: Inventory


@dataclass(frozen=True)
class Planned:
    """Where one name of the model comes from, or why it stays as it is.

    Attributes:
        name: of the model.
        offer: number of the offer that it is taken from, None where it stays.
        source: name in that checkpoint.
        thing: what is there.
        conversion: "", or what is done to it, such as ``cast float32 -> float16``.
        reason: why it stays; "" where it is taken.
    """

    name: Name
    offer: int | None = None
    source: str = ""
    thing: Thing = field(default_factory=Thing)
    conversion: str = ""
    reason: str = ""


def resolve(model: Inventory, offers: Sequence[Offer], problems: Problems) -> list[Planned]:
    """Take each name once, from the last offer that has it.

    Args:
        model: names of the model.
        offers: the entries of a bank in order, each with what its checkpoint has.
        problems: what is wrong is added here.
    """
    matches = [_Match(model, offer, problems) for offer in offers]
    for match in matches:
        match.check(problems)
    planned = [_resolve_one(name, matches, problems) for name in sorted(model, key=_order)]
    planned = [_checked_optimizer(item, model, offers) for item in planned]
    _check_filters(planned, offers, problems)
    return planned


class _Match:
    """An offer beside the names of the model.

    Attributes:
        there: name of the model that is wanted -> its name in the checkpoint.
    """

    def __init__(self, model: Inventory, offer: Offer, problems: Problems) -> None:
        self.offer, self._model = offer, model
        self.there: dict[Name, Name] = {}
        self._known: set[Name] = set()  # names in the checkpoint that have a partner, wanted or not
        for name in model:
            wanted = offer.entry.wants(name)
            try:
                source = _source(name, offer.entry)
            except ValueError as error:
                if wanted:
                    problems.about_names(offer.entry, f"'oname': {error}")
                continue
            self._known.add(source)
            if wanted:
                self.there[name] = source

    def check(self, problems: Problems) -> None:
        """Add what is wrong with the entry by itself, whatever the others offer."""
        _check_patterns(self._model, self.offer, problems)
        for name, source in self.there.items():
            if source not in self.offer.inventory and self._is_explicit(name):
                hint = nearest(_called(source, self.offer), _texts(self.offer.inventory))
                problem = f"{self.offer.label} has no {_called(source, self.offer)!r}{hint}"
                problems.about_names(self.offer.entry, problem)
        entry = self.offer.entry
        left = [name for name in self.offer.inventory if name not in self._known and entry.wants(name)]
        whole = [name for name in left if name.group == "dense" or name.slot == EMBEDDING]
        problems.unexpected += [name.table or name.text for name in whole if name.group in entry.strict_groups]
        others = [name.table or name.text for name in whole if name.group not in entry.strict_groups]
        others += [n.text for n in left if n.slot not in ("", ID, EMBEDDING) and slot_name(n.table, ID) in self._known]
        if others:
            problems.warn(entry, f"{self.offer.label} has what is not in the model: {first_few(others)}")

    def _is_explicit(self, name: Name) -> bool:
        """Say whether somebody asked for just this; of a whole table the embedding is what must be there."""
        entry = self.offer.entry
        asked = {pattern.text for pattern in entry.load if pattern.is_explicit}
        if name.text in asked or entry.renames.is_explicit(name.text):
            return True
        return name.slot == EMBEDDING and (name.table in asked or entry.renames.is_explicit(name.table))

    def fit(self, name: Name) -> tuple[str, str]:
        """Return (conversion, why it is left out) of a name that the checkpoint has.

        Raises:
            ValueError: it does not fit, and nothing is said of that.
        """
        found, live = self.offer.inventory[self.there[name]], self._model[name]
        takes_anything = "" in (found.dtype, live.dtype) or name.text.endswith(_EXTRA_STATE)
        if not takes_anything and (found.dtype, found.shape) != (live.dtype, live.shape):
            action = self.offer.entry.action(name)
            if action == "skip":
                return "", f"{self.offer.label} has {found}, the model {live}: skipped"
            return _conversion(found, live, action), ""
        embedding = slot_name(name.table, EMBEDDING)
        if name.is_slot and name != embedding and self._has(embedding):
            try:
                return "", self.fit(embedding)[1]  # a table without its embedding is of no use
            except ValueError:
                return "", ""  # which is said where the embedding is looked at
        return "", ""

    def _has(self, name: Name) -> bool:
        return name in self.there and self.there[name] in self.offer.inventory


def _resolve_one(name: Name, matches: Sequence[_Match], problems: Problems) -> Planned:
    reasons, is_missing = [], False
    for number in reversed(range(len(matches))):
        match, offer = matches[number], matches[number].offer
        if name not in match.there:
            continue
        source = match.there[name]
        found = offer.inventory.get(source)
        if found is None:
            reasons.append(
                f"{offer.label} has no {_called(source, offer)!r}" if source != name else f"not in {offer.label}"
            )
            is_missing |= name.group in offer.entry.strict_groups and name.slot in ("", EMBEDDING)
            continue
        try:
            conversion, reason = match.fit(name)
        except ValueError as error:
            problems.mismatched[name.text] = error.args
            conversion = reason = ""
        if not reason:
            return Planned(name, number, source.text, found, conversion)
        reasons.append(reason)
    if is_missing:
        problems.missing.append(name.table or name.text)
    return Planned(name, reason="; ".join(reasons) or "nothing asks for it")


def _order(name: Name) -> tuple[object, ...]:
    """Sort tables first, each with its ids and embeddings before the optimizer's slots."""
    return not name.is_slot, name.table, name.slot != ID, name.slot != EMBEDDING, name


def _called(source: Name, offer: Offer) -> str:
    """Return the table where all of it is missing, else the name itself."""
    whole = bool(source.table) and slot_name(source.table, ID) not in offer.inventory
    return source.table if whole else source.text


def _source(name: Name, entry: Entry) -> Name:
    text = entry.renames.source(name)
    return slot_name(*text.rsplit("@", 1)) if name.is_slot and "@" in text else Name(name.group, text)


def _conversion(found: Thing, live: Thing, action: str) -> str:
    """Say how ``found`` becomes ``live``.

    Raises:
        ValueError: the action does not allow it.
    """
    steps = []
    if found.dtype != live.dtype:
        allowed = action in ("cast", "resize") and PLAIN not in (found.dtype, live.dtype)
        steps.append(f"cast {found.dtype} -> {live.dtype}" if allowed else "")
    if found.shape != live.shape:
        allowed = action == "resize" and len(found.shape) == len(live.shape) and found.shape[:-1] == live.shape[:-1]
        steps.append(f"resize {found.shape[-1]} -> {live.shape[-1]}" if allowed else "")
    if not all(steps):
        raise ValueError(str(found), str(live))
    return ", ".join(steps)


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


def _texts(inventory: Iterable[Name]) -> set[str]:
    names = list(inventory)
    return {name.text for name in names} | {name.table for name in names if name.is_slot}


def _check_patterns(model: Inventory, offer: Offer, problems: Problems) -> None:
    """Patterns that mean nothing: in the model, or, of what is left out, in the checkpoint."""
    entry = offer.entry
    for key, pattern, where in _patterns(entry, model, offer.inventory):
        if pattern.is_everything or pattern.is_group or any(map(pattern.matches, where)):
            continue
        if pattern.is_explicit:
            hint = nearest(pattern.text, {*_texts(model), *GROUPS})
            problems.about_names(entry, f"{key!r}: {pattern.text!r} is neither in the model nor a group{hint}")
        else:
            problems.warn(entry, f"{key!r}: {pattern.text!r} matches nothing in the model")


def _patterns(entry: Entry, model: Inventory, there: Inventory) -> Iterator[tuple[str, Pattern, Iterable[Name]]]:
    """Yield (key, pattern, names of which it has to match one)."""
    yield from (("load", pattern, model) for pattern in entry.load)
    yield from (("exclude", pattern, [*model, *there]) for pattern in entry.exclude)
    yield from (("oname", Pattern(side), model) for side, _ in entry.renames.rules)
    yield from (("on_mismatch", pattern, model) for pattern, _ in entry.on_mismatch)
