"""``oname``: what names of the model are called in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recckpt.format.names import ID, WILDCARD, Name, wildcard_regex, wildcards
from recckpt.types import EMBEDDING, is_list

_Matches = dict[str, tuple[str, str]]  # name in the checkpoint -> the rule that gives it


@dataclass(frozen=True)
class Renames:
    """``oname``: rules, model name -> name in the checkpoint, with the same wildcards on both sides, or none.

    A rule for a table renames all of its slots, but for those that a rule for ``table@slot`` speaks of. A rule for
    the ids or embeddings of a table is one for the table: its rows come from one.
    """

    rules: tuple[tuple[str, str], ...] = ()

    def source(self, name: Name) -> str:
        """Return what ``name`` is called in the checkpoint, or raise ValueError where rules give it different names."""
        if not name.is_slot:
            return _only(name.text, self._matches(name.text, self._starred))
        matches = self._matches(name.text, self._for_slots)
        if matches and name.slot not in (ID, EMBEDDING):
            return _only(name.text, matches)
        tables = self._matches(name.table, self._starred)
        for slot in (ID, EMBEDDING):
            renamed = self._matches(f"{name.table}@{slot}", self._for_slots)
            tables |= {text.rpartition("@")[0] or text: rule for text, rule in renamed.items()}
        table = _only(name.table, tables)
        return _only(name.text, matches) if matches else f"{table}@{name.slot}"

    def is_explicit(self, text: str) -> bool:
        """Say whether a rule without wildcards speaks of a name or table."""
        return text in self._explicit

    def _matches(self, text: str, starred: Sequence[tuple[str, str]]) -> _Matches:
        """Return the names that rules give to a text, each with its rule."""
        matches = {other: (text, other) for other in self._explicit.get(text, ())}
        for rule in starred:
            matches |= dict.fromkeys(_renamed(*rule, text), rule)
        return matches

    @cached_property
    def _explicit(self) -> dict[str, list[str]]:
        explicit: dict[str, list[str]] = {}
        for model_side, checkpoint_side in self.rules:
            if not wildcards(model_side):
                explicit.setdefault(model_side, []).append(checkpoint_side)
        return explicit

    @cached_property
    def _starred(self) -> list[tuple[str, str]]:
        return [rule for rule in self.rules if wildcards(rule[0])]

    @cached_property
    def _for_slots(self) -> list[tuple[str, str]]:
        return [rule for rule in self._starred if "@" in rule[0]]


def parse_renames(value: Any) -> Renames:
    """Return the rules of an ``oname`` value, or raise ValueError where it has none."""
    dicts = [value] if isinstance(value, Mapping) else value
    if not is_list(dicts) or not all(isinstance(d, Mapping) for d in dicts):
        raise ValueError(f"found {value!r}, expected a dict or a list of dicts, model name -> name in the checkpoint")
    rules = [rule for mapping in dicts for rule in mapping.items()]
    for rule in rules:
        if not all(isinstance(side, str) and side for side in rule):
            raise ValueError(f"found {rule[0]!r}: {rule[1]!r}, expected two names")
        if wildcards(rule[0]) != wildcards(rule[1]):
            raise ValueError(f"{rule[0]!r}: {rule[1]!r}: the two sides need the same wildcards in the same order")
    return Renames(tuple(rules))


def _only(text: str, matches: _Matches) -> str:
    """Return the one name that rules give to a text; itself where there is none."""
    if len(matches) > 1:
        rules = " and ".join(sorted({f"{rule[0]!r}: {rule[1]!r}" for rule in matches.values()}))
        raise ValueError(f"{text!r} is ambiguous: {' or '.join(map(repr, sorted(matches)))}, by {rules}")
    return next(iter(matches), text)


def _renamed(model_side: str, checkpoint_side: str, text: str) -> set[str]:
    """Return what a rule makes of a text: several names where its stars can share it out in several ways."""
    regexes = wildcard_regex(model_side), wildcard_regex(model_side, lazy=True)
    first, *rest = WILDCARD.split(checkpoint_side)
    matches = [match for regex in regexes if (match := regex.fullmatch(text))]
    return {first + "".join(map("".join, zip(match.groups(), rest, strict=True))) for match in matches}
