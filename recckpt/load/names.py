"""Names of what a load can take: table slots, tensors, registered objects; patterns of names, and their renaming."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Any

from recckpt.format.layout import SPARSE_OPTIM
from recckpt.types import EMBEDDING, is_list, is_optimizer_slot

GROUPS = ("sparse", "dense", "extra", "sparse_opt", "dense_opt", "io_state", "global_step")
ID = "id"
GLOBAL_STEP = "global_step"
_POSITIONS = ("train_window_io", "eval_window_io", "train_epoch")  # objects that RecIS counts among its positions
_END = translate("")[-2:]  # the end of the text, in the regular expressions of this Python
_WILDCARD = re.compile(r"\*|\?|\[(?:!.|[^!])[^\]]*\]", re.DOTALL)
_Found = dict[str, tuple[str, str]]  # name in the checkpoint -> the rule that gives it


@dataclass(frozen=True, order=True)
class Name:
    """One thing that can be loaded.

    Attributes:
        group: one of :data:`GROUPS`.
        text: ``table@slot``, ``parameter@optimizer`` of the group ``dense_opt``, or the name of a tensor or
            registered object.
    """

    group: str
    text: str

    @cached_property
    def table(self) -> str:
        """The table of a slot; "" for everything else."""
        return self.text.rpartition("@")[0] if self.is_slot else ""

    @cached_property
    def slot(self) -> str:
        """The slot of a table; "" for everything else."""
        return self.text.rpartition("@")[2] if self.is_slot else ""

    @property
    def is_slot(self) -> bool:
        """Whether this is a slot of a table, its ids included."""
        return self.group == "sparse" or (self.group == "sparse_opt" and self.text != SPARSE_OPTIM)

    @cached_property
    def parameter(self) -> str:
        """The parameter whose state in a dense optimizer this is; "" for everything else."""
        return self.text.rpartition("@")[0] if self.group == "dense_opt" else ""

    @property
    def optimizer(self) -> str:
        """The dense optimizer whose state of :attr:`parameter` this is."""
        return self.text.rpartition("@")[2]

    @property
    def is_settings(self) -> bool:
        """Whether this is the hyper-parameters of an optimizer."""
        if self.group == "sparse_opt":
            return self.text == SPARSE_OPTIM
        return self.group == "dense_opt" and not self.parameter

    @property
    def is_position(self) -> bool:
        """Whether this is a position in the data."""
        return self.group == "io_state" or (self.group == "extra" and self.text in _POSITIONS)

    def is_in(self, group: str) -> bool:
        """Say whether a group means this: dense optimizers are registered objects, and some of those positions."""
        others = {"extra": self.group == "dense_opt", "io_state": self.is_position}
        return self.group == group or others.get(group, False)


def state_name(parameter: str, optimizer: str) -> Name:
    """Return the name of the state that a registered dense optimizer has for a parameter."""
    return Name("dense_opt", f"{parameter}@{optimizer}")


def slot_name(table: str, slot: str) -> Name:
    """Return the name of a slot of a table; its group is ``sparse_opt`` where the sparse optimizer owns it."""
    return Name("sparse_opt" if is_optimizer_slot(slot) else "sparse", f"{table}@{slot}")


@dataclass(frozen=True)
class Pattern:
    """A group, a name, or a pattern of names as in :mod:`fnmatch`, in which case matters.

    The name of a table means all of its slots. A group's name means the group, whatever else may be called so. What
    is called exactly as a pattern is written is meant by it, too.
    """

    text: str

    @property
    def is_group(self) -> bool:
        """Whether this names a group."""
        return self.text in GROUPS

    @property
    def is_explicit(self) -> bool:
        """Whether this names one thing, so that its absence is an error."""
        return not wildcards(self.text) and not self.is_group

    @property
    def is_everything(self) -> bool:
        """Whether there is no name that this does not match."""
        return not self.text.strip("*")

    def matches(self, name: Name) -> bool:
        """Say whether a name is meant."""
        if self.is_group:
            return name.is_in(self.text)
        if self.text in (name.text, name.table) or self.is_explicit:
            return self.text in (name.text, name.table)
        regex = wildcard_regex(self.text)
        if name.is_slot and regex.fullmatch(name.table):
            return True
        # The ids of all tables end in "id", which nobody means who writes "user_*id".
        return (name.slot != ID or "@" in self.text) and bool(regex.fullmatch(name.text))


def wildcards(text: str) -> list[str]:
    """Return the wildcards of a pattern: ``*``, ``?`` and ``[...]``."""
    return _WILDCARD.findall(text)


@lru_cache(maxsize=4096)
def wildcard_regex(text: str, *, lazy: bool = False) -> re.Pattern[str]:
    """Return a regular expression that matches what :mod:`fnmatch` does, with a group for each wildcard.

    With ``lazy`` the first stars match as little as they can, else as much.
    """
    run = "(.*?)" if lazy else "(.*)"
    groups = [run if found == "*" else "(.)" if found == "?" else _class_regex(found) for found in wildcards(text)]
    names = [re.escape(piece) for piece in _WILDCARD.split(text)]
    return re.compile("".join(map("".join, zip_longest(names, groups, fillvalue=""))), re.DOTALL)


def _class_regex(wildcard: str) -> str:
    """Return a group for ``[...]``; a range whose end lies before its begin means nothing."""
    return f"({translate(wildcard).removesuffix(_END)})"


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
            return _only(name.text, self._found(name.text, self._starred))
        found = self._found(name.text, self._for_slots)
        if found and name.slot not in (ID, EMBEDDING):
            return _only(name.text, found)
        tables = self._found(name.table, self._starred)
        for slot in (ID, EMBEDDING):
            renamed = self._found(f"{name.table}@{slot}", self._for_slots)
            tables |= {text.rpartition("@")[0] or text: rule for text, rule in renamed.items()}
        table = _only(name.table, tables)
        return _only(name.text, found) if found else f"{table}@{name.slot}"

    def is_explicit(self, text: str) -> bool:
        """Say whether a rule without wildcards speaks of a name or table."""
        return text in self._explicit

    def _found(self, text: str, starred: Sequence[tuple[str, str]]) -> _Found:
        """Return the names that rules give to a text, each with its rule."""
        found = {other: (text, other) for other in self._explicit.get(text, ())}
        for rule in starred:
            found |= dict.fromkeys(_renamed(*rule, text), rule)
        return found

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


def _only(text: str, found: _Found) -> str:
    """Return the one name that rules give to a text; itself where there is none."""
    if len(found) > 1:
        rules = " and ".join(sorted({f"{rule[0]!r}: {rule[1]!r}" for rule in found.values()}))
        raise ValueError(f"{text!r} is ambiguous: {' or '.join(map(repr, sorted(found)))}, by {rules}")
    return next(iter(found), text)


def _renamed(model_side: str, checkpoint_side: str, text: str) -> set[str]:
    """Return what a rule makes of a text: several names where its stars can share it out in several ways."""
    regexes = wildcard_regex(model_side), wildcard_regex(model_side, lazy=True)
    first, *rest = _WILDCARD.split(checkpoint_side)
    matches = [match for regex in regexes if (match := regex.fullmatch(text))]
    return {first + "".join(map("".join, zip(match.groups(), rest, strict=True))) for match in matches}
