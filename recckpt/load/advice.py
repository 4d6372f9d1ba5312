"""What a user can say in a ``load_conf`` or in an entry of a bank about state that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recckpt.format.names import Name
from recckpt.load.conf import Entry
from recckpt.load.inventory import PLAIN, Thing

_ACTIONS = ("cast", "resize", "skip")  # the later one does what the ones before do not
_SHOWN = 6


@dataclass
class Advice:
    """Values of ``oname`` and ``on_mismatch`` that would do, of the entries of a load.

    Attributes:
        renames: label of an entry -> its ``oname``.
        actions: label of an entry -> table or tensor -> what could be done.
    """

    renames: dict[str, Mapping[str, str]] = field(default_factory=dict)
    actions: dict[str, dict[str, str]] = field(default_factory=dict)
    _banks: set[str] = field(default_factory=set)

    def rename(self, entry: Entry, renames: Mapping[str, str]) -> None:
        """Note what names of the model are probably called in the checkpoint of an entry."""
        if renames:
            self.renames[self._label(entry)] = renames

    def act(self, entry: Entry, name: Name, saved: Thing, live: Thing) -> None:
        """Note what an entry could do with state of another dtype or shape."""
        actions = self.actions.setdefault(self._label(entry), {})
        key, action = name.table or name.text, _action(name, saved, live)
        actions[key] = max(actions.get(key, action), action, key=_ACTIONS.index)

    def of_names(self) -> str:
        """Return what to do about names that only one side has."""
        if not self.renames:
            return "pass load_conf={'strict': False} to load what fits by name"
        rules = (self._say(label, f"'oname': {_dict(renames)}") for label, renames in self.renames.items())
        return f"{', '.join(rules)} if names have changed; 'strict': False loads what fits by name"

    def of_values(self) -> str:
        """Return what to do about state that differs."""
        text = "say in 'on_mismatch' what to do where state differs"
        if not self.actions:
            return text
        values = ((label, f"'on_mismatch': {_dict(actions)}") for label, actions in self.actions.items())
        return f"{text}: {', '.join(self._say(*value) for value in values)}"

    def _label(self, entry: Entry) -> str:
        if entry.path:
            self._banks.add(entry.label)
        return entry.label

    def _say(self, label: str, keys: str) -> str:
        return f"add {keys} to {label}" if label in self._banks else f"pass load_conf={{{keys}, 'strict': True}}"


def _action(name: Name, saved: Thing, live: Thing) -> str:
    """Return the action that keeps most."""
    if PLAIN in (saved.dtype, live.dtype) or len(saved.shape) != len(live.shape):
        return "skip"
    if saved.shape == live.shape:
        return "cast"
    return "skip" if name.is_slot and saved.shape[:-1] != live.shape[:-1] else "resize"


def _dict(values: Mapping[str, str]) -> str:
    """Return a dict as code; one value for all where they are many and alike."""
    items = [f"{key!r}: {value!r}" for key, value in values.items()]
    different = {*values.values()}
    if len(items) > _SHOWN and len(different) == 1 and different <= {*_ACTIONS}:
        return repr(next(iter(different)))
    return f"{{{', '.join(items[:_SHOWN])}{', ...' if len(items) > _SHOWN else ''}}}"
