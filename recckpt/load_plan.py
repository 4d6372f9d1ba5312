"""Which name of the model is taken from where: decided from names and shapes alone, before a row is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from recckpt.errors import LoadConfError, RecckptError, StateMismatchError
from recckpt.load_conf import Entry, nearest
from recckpt.names import GROUPS, ID, Name, Pattern, slot_name
from recckpt.types import EMBEDDING


@dataclass(frozen=True)
class Thing:
    """What is known of a name without reading it.

    Attributes:
        dtype: of a slot or tensor; "" for other state.
        shape: of one row of a slot, or of a tensor.
        rows: rows of the table; 0 for what is no slot.
        n_bytes: bytes to read, 0 where that is not known.
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()
    rows: int = 0
    n_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}" if self.dtype else "state"


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


@dataclass
class Problems:
    """What is wrong with a load, gathered so that one error can say all of it."""

    conf: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[object, object]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    not_found: list[RecckptError] = field(default_factory=list)

    def about_names(self, entry: Entry, problem: str) -> None:
        """Add a problem with names, which an entry may ask to be only warned of."""
        text = f"{entry.label}: {problem}"
        known = self.warnings if entry.ignore_error else self.conf
        if text not in known:
            known.append(text)

    def raise_if_any(self, what: str, remedy: str) -> None:
        """Raise one error that says all of it.

        Args:
            what: what does not fit, for the message.
            remedy: what to do about state that does not fit.

        Raises:
            LoadConfError: there are problems of several kinds, or with names and keys.
            StateMismatchError: there is nothing but state that does not fit.
            CheckpointNotFoundError, CorruptCheckpointError: there is nothing but a checkpoint that cannot be read.
        """
        misfit = StateMismatchError(
            what, missing=self.missing, unexpected=self.unexpected, mismatched=self.mismatched, remedy=remedy
        )
        has_misfit = bool(self.missing or self.unexpected or self.mismatched)
        if self.not_found and not (self.conf or has_misfit):
            raise self.not_found[0]
        if self.conf or self.not_found:
            raise LoadConfError([*self.conf, *map(str, self.not_found), *([str(misfit)] if has_misfit else [])])
        if has_misfit:
            raise misfit


def resolve(model: Inventory, offers: Sequence[Offer], problems: Problems) -> list[Planned]:
    """Take each name once, from the last offer that has it.

    Args:
        model: names of the model.
        offers: the entries of a bank in order, each with what its checkpoint has.
        problems: what is wrong is added here.
    """
    for offer in offers:
        _check_patterns(model, offer, problems)
    planned = [_resolve_one(name, thing, offers, problems) for name, thing in sorted(model.items())]
    taken = {(item.offer, item.source) for item in planned}
    for number, offer in enumerate(offers):
        left = [name for name in offer.inventory if offer.entry.wants(name) and (number, name.text) not in taken]
        for name in left:
            if name.group in offer.entry.strict_groups and (name.group == "dense" or name.slot == EMBEDDING):
                problems.unexpected.append(name.table or name.text)
    return planned


def _resolve_one(name: Name, thing: Thing, offers: Sequence[Offer], problems: Problems) -> Planned:
    reason = "nothing asks for it"
    is_missing = False
    for number in reversed(range(len(offers))):
        offer = offers[number]
        if not offer.entry.wants(name):
            continue
        try:
            source = _source(name, offer.entry)
        except ValueError as error:
            problems.about_names(offer.entry, str(error))
            continue
        found = offer.inventory.get(source)
        if found is not None:
            return _fitted(Planned(name, number, source.text, found), thing, offer, problems)
        reason = f"{offer.label} has no {_called(source, offer)!r}"
        is_missing |= name.group in offer.entry.strict_groups and name.slot in ("", EMBEDDING)
        _check_explicit(name, source, offer, problems)
    if is_missing:
        problems.missing.append(name.table or name.text)
    return Planned(name, reason=reason)


def _called(source: Name, offer: Offer) -> str:
    """Return the table where all of it is missing, else the name itself."""
    whole = source.is_slot and slot_name(source.table, ID) not in offer.inventory
    return source.table if whole else source.text


def _source(name: Name, entry: Entry) -> Name:
    text = entry.renames.source(name)
    return slot_name(*text.rsplit("@", 1)) if name.is_slot and "@" in text else Name(name.group, text)


def _fitted(item: Planned, live: Thing, offer: Offer, problems: Problems) -> Planned:
    """Return what becomes of a name that an offer has, by what its entry says of other dtypes and shapes."""
    found = item.thing
    if (found.dtype, found.shape) == (live.dtype, live.shape) or not live.dtype:
        return item
    action = offer.entry.action(item.name)
    if action == "skip":
        return Planned(item.name, reason=f"{offer.label} has {found}, the model {live}; skipped")
    conversion = _conversion(found, live, action)
    if not conversion:
        problems.mismatched[item.name.text] = (found, live)
    return replace(item, conversion=conversion)


def _conversion(found: Thing, live: Thing, action: str) -> str:
    """Say how ``found`` becomes ``live``; "" where the action does not allow it."""
    steps = []
    if found.dtype != live.dtype:
        if action not in ("cast", "resize"):
            return ""
        steps.append(f"cast {found.dtype} -> {live.dtype}")
    if found.shape != live.shape:
        if action != "resize" or not live.shape or len(found.shape) != len(live.shape):
            return ""
        if found.shape[:-1] != live.shape[:-1]:
            return ""
        steps.append(f"resize {found.shape[-1]} -> {live.shape[-1]}")
    return ", ".join(steps)


def _check_explicit(name: Name, source: Name, offer: Offer, problems: Problems) -> None:
    """An explicit name that the checkpoint lacks is an error; a whole table is missing only without its embedding."""
    for pattern in offer.entry.load:
        whole_table = name.is_slot and "@" not in pattern.text
        if pattern.is_explicit and pattern.matches(name) and (not whole_table or name.slot == EMBEDDING):
            hint = nearest(source.text, (other.text for other in offer.inventory))
            problems.about_names(offer.entry, f"{offer.label} has no {source.text!r}{hint}")


def _check_patterns(model: Inventory, offer: Offer, problems: Problems) -> None:
    """Patterns of ``load``, ``exclude`` and ``oname`` that mean nothing in the model."""
    entry = offer.entry
    texts = {name.text for name in model} | {name.table for name in model if name.is_slot}
    sides = [Pattern(side) for side, _ in entry.renames.rules]
    for pattern in (*entry.load, *entry.exclude, *sides):
        if pattern.is_group or pattern.text == "*" or any(pattern.matches(name) for name in model):
            continue
        if pattern.is_explicit:
            hint = nearest(pattern.text, {*texts, *GROUPS})
            problems.about_names(entry, f"{pattern.text!r} is neither in the model nor a group{hint}")
        else:
            problems.warnings.append(f"{entry.label}: {pattern.text!r} matches nothing in the model")
