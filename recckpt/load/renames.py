"""``oname``: what a name of the model is called in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from recckpt.load.selection import Name, star_regex


@dataclass(frozen=True)
class Renames:
    """Rules, model name -> name in the checkpoint; ``*`` on both sides, as often, or on neither.

    A rule for a table renames all of its slots, but for those that a rule for ``table@slot`` speaks of.
    """

    rules: tuple[tuple[str, str], ...] = ()

    def source(self, name: Name) -> str:
        """Return what ``name`` is called in the checkpoint; itself where no rule speaks of it.

        Raises:
            ValueError: it is given different names.
        """
        found = self._found(name.text, self._for_slots if name.is_slot else self._starred)
        if not found and name.is_slot:
            found = {f"{text}@{name.slot}": rule for text, rule in self._found(name.table, self._starred).items()}
        if len(found) > 1:
            rules = " and ".join(sorted({f"{rule[0]!r}: {rule[1]!r}" for rule in found.values()}))
            raise ValueError(f"{name.text!r} is ambiguous: {' or '.join(map(repr, sorted(found)))}, by {rules}")
        return next(iter(found), name.text)

    def is_explicit(self, text: str) -> bool:
        """Say whether a rule without ``*`` speaks of a name or table."""
        return text in self._explicit

    def _found(self, text: str, starred: Sequence[tuple[str, str]]) -> dict[str, tuple[str, str]]:
        """Return the names that rules give to a text, each with its rule."""
        found = {other: (text, other) for other in self._explicit.get(text, ())}
        for rule in starred:
            found |= dict.fromkeys(_renamed(*rule, text), rule)
        return found

    @cached_property
    def _explicit(self) -> dict[str, list[str]]:
        explicit: dict[str, list[str]] = {}
        for model_side, checkpoint_side in self.rules:
            if "*" not in model_side:
                explicit.setdefault(model_side, []).append(checkpoint_side)
        return explicit

    @cached_property
    def _starred(self) -> list[tuple[str, str]]:
        return [rule for rule in self.rules if "*" in rule[0]]

    @cached_property
    def _for_slots(self) -> list[tuple[str, str]]:
        return [rule for rule in self._starred if "@" in rule[0]]


def parse_renames(value: object) -> Renames:
    """Return the rules of an ``oname`` value.

    Raises:
        ValueError: not a dict or list of dicts of strings, or different numbers of stars on the two sides.
    """
    dicts = [value] if isinstance(value, Mapping) else value
    if not isinstance(dicts, Sequence) or isinstance(dicts, str) or not all(isinstance(d, Mapping) for d in dicts):
        raise ValueError(f"found {value!r}, expected a dict or a list of dicts, model name -> name in the checkpoint")
    rules = [rule for mapping in dicts for rule in mapping.items()]
    for rule in rules:
        if not all(isinstance(side, str) and side for side in rule):
            raise ValueError(f"found {rule[0]!r}: {rule[1]!r}, expected two names")
        if rule[0].count("*") != rule[1].count("*"):
            raise ValueError(f"{rule[0]!r}: {rule[1]!r} has not as many '*' on either side")
    return Renames(tuple(rules))


def _renamed(model_side: str, checkpoint_side: str, text: str) -> set[str]:
    """Return what a rule makes of a text: several names where its stars can share it out in several ways."""
    regexes = star_regex(model_side), star_regex(model_side, lazy=True)
    return {_fill(checkpoint_side, match.groups()) for regex in regexes if (match := regex.fullmatch(text))}


def _fill(text: str, runs: Sequence[str]) -> str:
    pieces = text.split("*")
    return pieces[0] + "".join(run + piece for run, piece in zip(runs, pieces[1:], strict=True))
