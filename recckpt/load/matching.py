"""The names of a model beside what one checkpoint has of them."""

from __future__ import annotations

from recckpt.load.inventory import PLAIN, Inventory, Offer, Thing
from recckpt.load.names import ID, Name, slot_name, state_name
from recckpt.load.problems import Problems, check_patterns, first_few, names_and_tables
from recckpt.text import nearest
from recckpt.types import EMBEDDING

_EXTRA_STATE = "_extra_state"  # torch's: what a module gives it takes back, of whatever shape


class Match:
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
                source = _source(name, model[name].tied, offer)
            except ValueError as error:
                if wanted:
                    problems.about_names(offer.entry, f"'oname': {error}")
                continue
            self._known.add(source)
            if wanted:
                self.there[name] = source

    def check(self, problems: Problems) -> None:
        """Add what is wrong with the entry by itself, whatever the others offer."""
        entry, label, inventory = self.offer.entry, self.offer.label, self.offer.inventory
        check_patterns(entry, self._model, inventory, problems)
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

    def _is_explicit(self, name: Name) -> bool:
        """Say whether somebody asked for just this; of a whole table the embedding is what must be there."""
        entry = self.offer.entry
        asked = {pattern.text for pattern in entry.load if pattern.is_explicit}
        if name.text in asked or entry.renames.is_explicit(name.text):
            return True
        return name.slot == EMBEDDING and (name.table in asked or entry.renames.is_explicit(name.table))

    def found(self, name: Name) -> Thing | None:
        """Return what the checkpoint has of a wanted name."""
        return self.offer.inventory.get(self.there[name])

    def fit(self, name: Name) -> tuple[str, str]:
        """Return (conversion, why it is left out) of a name that the checkpoint has.

        Raises:
            ValueError: it does not fit, and nothing is said of that: (found, expected).
        """
        found, live = self.offer.inventory[self.there[name]], self._model[name]
        takes_anything = "" in (found.dtype, live.dtype) or name.text.endswith(_EXTRA_STATE)
        if not takes_anything and (found.dtype, found.shape) != (live.dtype, live.shape):
            action = self.offer.entry.action(name)
            if action == "skip":
                return "", f"{self.offer.label} has {found}, the model {live}: skipped"
            return _conversion(found, live, action), ""
        embedding = slot_name(name.table, EMBEDDING)
        if name.is_slot and name != embedding and embedding in self.there and self.found(embedding):
            try:
                return "", self.fit(embedding)[1]  # a table without its embedding is of no use
            except ValueError:
                return "", ""  # which is said where the embedding is looked at
        return "", ""

    def called(self, source: Name) -> str:
        """Return the table where all of it is missing, else the name itself."""
        is_missing = bool(source.table) and slot_name(source.table, ID) not in self.offer.inventory
        return source.table if is_missing else source.text


def _source(name: Name, tied: tuple[str, ...], offer: Offer) -> Name:
    """Return the name that the checkpoint has for one of the model, of a tied parameter for any that it has there."""
    renames = offer.entry.renames
    text = renames.source(Name("dense_opt", name.optimizer) if name.parameter else name)
    if name.parameter:
        names = (state_name(renames.source(Name("dense", one)), text) for one in (name.parameter, *tied))
        first = next(names)
        return first if first in offer.inventory else next((n for n in names if n in offer.inventory), first)
    if name.group == "dense_opt" and Name("dense_opt", text) not in offer.inventory:
        return Name("extra", text)  # saved without the names of its parameters
    return slot_name(*text.rsplit("@", 1)) if name.is_slot and "@" in text else Name(name.group, text)


def _conversion(found: Thing, live: Thing, action: str) -> str:
    """Say how ``found`` becomes ``live``.

    Raises:
        ValueError: the action does not allow it: (found, expected).
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
