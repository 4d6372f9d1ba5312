"""Parses a ``load_conf``, or a bank of them. Errors list all faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from os import PathLike
from typing import Any

from recckpt.errors import LoadConfError
from recckpt.format.names import GLOBAL_STEP, ID, WILDCARD, Name, Pattern, slot_name, wildcard_regex
from recckpt.format.tables import counted_table
from recckpt.policies.row_filter import RowFilter, parse_row_filter
from recckpt.text import nearest
from recckpt.types import EMBEDDING, is_list

_Matches = dict[str, tuple[str, str]]  # name in the checkpoint -> the rule that gives it
Bank = str | PathLike[str] | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
ACTIONS = ("error", "skip", "cast", "resize")


@dataclass(frozen=True)
class Renames:
    """The ``oname`` rules: model name -> name in the checkpoint. Both sides have the same wildcards, or none.

    A rule for a table renames all of its slots, except slots with their own rule (``table@slot``). A rule for the ids
    or embeddings of a table is taken as a rule for the table.
    """

    rules: tuple[tuple[str, str], ...] = ()

    def source(self, name: Name) -> str:
        """Return the name of ``name`` in the checkpoint; ValueError if rules give it different names."""
        if not self.rules:
            return name.text
        if not name.is_slot:
            return _only(name.text, self._matches(name.text))
        matches = self._matches(name.text, of_slots=True)
        if matches and name.slot not in (ID, EMBEDDING):
            return _only(name.text, matches)
        tables = self._matches(name.table)
        for slot in (ID, EMBEDDING):
            renamed = self._matches(f"{name.table}@{slot}", of_slots=True)
            tables |= {text.rpartition("@")[0] or text: rule for text, rule in renamed.items()}
        table = _only(name.table, tables)
        if not tables and (waited_for := counted_table(name.table)):  # a table of counts is renamed with its table
            table = _only(waited_for, self._matches(waited_for)) + name.table[len(waited_for) :]
        return _only(name.text, matches) if matches else f"{table}@{name.slot}"

    def is_explicit(self, text: str) -> bool:
        return text in self._sides[0]

    @cached_property
    def _sides(self) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
        explicit: dict[str, list[str]] = {}
        for model_side, checkpoint_side in self.rules:
            if not WILDCARD.findall(model_side):
                explicit.setdefault(model_side, []).append(checkpoint_side)
        return explicit, [rule for rule in self.rules if WILDCARD.findall(rule[0])]

    def _matches(self, text: str, *, of_slots: bool = False) -> _Matches:
        """Return the names that rules give to a text, each with its rule; wildcards can match in several ways."""
        explicit, starred = self._sides
        matches = {other: (text, other) for other in explicit.get(text, ())}
        for rule in starred:
            if of_slots and "@" not in rule[0]:
                continue
            first, *rest = WILDCARD.split(rule[1])
            for regex in (wildcard_regex(rule[0]), wildcard_regex(rule[0], lazy=True)):
                if match := regex.fullmatch(text):
                    matches[first + "".join(map("".join, zip(match.groups(), rest, strict=True)))] = rule
        return matches


def parse_renames(value: Any) -> Renames:
    dicts = [value] if isinstance(value, Mapping) else value
    if not is_list(dicts) or not all(isinstance(d, Mapping) for d in dicts):
        raise ValueError(f"found {value!r}, expected a dict or a list of dicts, model name -> name in the checkpoint")
    rules = [rule for mapping in dicts for rule in mapping.items()]
    for rule in rules:
        if not all(isinstance(side, str) and side for side in rule):
            raise ValueError(f"found {rule[0]!r}: {rule[1]!r}, expected two names")
        if WILDCARD.findall(rule[0]) != WILDCARD.findall(rule[1]):
            raise ValueError(f"{rule[0]!r}: {rule[1]!r}: the two sides need the same wildcards in the same order")
    return Renames(tuple(rules))


def _only(text: str, matches: _Matches) -> str:
    if len(matches) > 1:
        rules = " and ".join(sorted({f"{rule[0]!r}: {rule[1]!r}" for rule in matches.values()}))
        raise ValueError(f"{text!r} is ambiguous: {' or '.join(map(repr, sorted(matches)))}, by {rules}")
    return next(iter(matches), text)


@dataclass(frozen=True)
class Entry:
    """One source of a load, and which names to take from it.

    Attributes:
        label: its name in messages, such as ``bank[1]``.
        path: a checkpoint or an output dir, any URL; "" for the checkpoint that the call names.
        load: names to take ...
        exclude: ... except these names.
        hashtable_clear: whether tables are emptied first; otherwise loaded rows are merged in, and replace rows of the
            same ids.
        ignore_error: whether problems with names are warnings.
        is_dynamic: whether ``reload_dynamic`` checks this entry again.
        strict: whether names must match both ways; None: only names of dense tensors, if ``load`` names that group.
        on_mismatch: table or tensor pattern -> action if dtype or shape differ; an exact name wins over patterns.
        where: which rows are taken.
        convert: whether slots with one value per range of columns may be converted to other ranges, or to whole rows.
        out_of_range: what happens to ids that a table of fixed length has no row for.
        zch: what happens to ids beyond the size of a table with managed collisions.
        is_own: whether this is the run's own output dir, from which it resumes.
        keeps_settings: whether this run keeps its hyper-parameters of optimizers and base rates of schedulers.
        only: the names that may be taken; None for any name.
        serves: whether the model will be evaluated or served; then names that only training needs are not taken or
            required.
    """

    label: str = "load_conf"
    path: str = ""
    load: tuple[Pattern, ...] = (Pattern("*"),)
    exclude: tuple[Pattern, ...] = ()
    renames: Renames = field(default_factory=Renames)
    hashtable_clear: bool = True
    ignore_error: bool = False
    is_dynamic: bool = False
    strict: bool | None = None
    on_mismatch: tuple[tuple[Pattern, str], ...] = ()
    where: RowFilter = field(default_factory=RowFilter)
    convert: bool = False
    out_of_range: str = "error"
    zch: str = "error"
    is_own: bool = False
    keeps_settings: bool = False
    only: frozenset[Name] | None = None
    serves: bool = False

    def wants(self, name: Name, *, is_schedule: bool = False) -> bool:
        """Return whether the entry asks for ``name``.

        Embeddings include their ids, parameters include their state in a dense optimizer, and the own run includes the
        step. From another run, the step, positions, optimizer settings and schedules are taken only if named
        explicitly.
        """
        if (self.only is not None and name not in self.only) or self._excludes(name):
            return False
        if name.parameter:
            optimizer = Name("dense_opt", name.optimizer)
            return self.wants(Name("dense", name.parameter)) and not self._excludes(optimizer)
        if name.group == GLOBAL_STEP:
            return self.is_own or self.serves or Pattern(GLOBAL_STEP) in self.load
        if (name.is_settings or is_schedule) and not self.is_own:
            return Pattern(name.text) in self.load
        if name.is_position and not self.is_own:
            return any(pattern.matches(name) and not pattern.is_everything for pattern in self.load)
        names = (name, slot_name(name.table, EMBEDDING)) if name.slot == ID else (name,)
        return any(pattern.matches(asked) for pattern in self.load for asked in names)

    def _excludes(self, name: Name) -> bool:
        return (self.serves and name.is_of_training) or any(pattern.matches(name) for pattern in self.exclude)

    @property
    def strict_groups(self) -> frozenset[str]:
        if self.strict is None:
            return frozenset({"dense"} if Pattern("dense") in self.load else ())
        return frozenset({"dense", "sparse"} if self.strict else ())

    def action(self, name: Name) -> str:
        actions = [(not pattern.is_explicit, action) for pattern, action in self.on_mismatch if pattern.matches(name)]
        return min(actions, key=lambda rule: rule[0], default=(False, "error"))[1]


def parse_load_conf(conf: Mapping[str, Any] | None, *, own: bool = False) -> Entry:
    """Return the entry for a ``load_conf``; None as ``load_conf`` requests everything, strictly.

    Raises one LoadConfError that lists all unknown keys and all values of a wrong type.
    """
    if conf is None:
        return Entry(strict=True, is_own=own)
    problems: list[str] = []
    entry = _parse("load_conf", conf, problems, with_path=False, own=own)
    if problems:
        raise LoadConfError(problems)
    return entry or Entry(load=(), is_own=own)  # None: ``load_conf`` is "skip"


def as_bank(bank: Bank, conf: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return the entries of a bank: a list of entries, one entry, a path whose entry has ``conf`` as its rest, or None.

    Raises LoadConfError if ``conf`` is not a dict, or is given without a path.
    """
    if isinstance(bank, str | PathLike):
        if not isinstance(conf, Mapping | None):
            raise LoadConfError([f"conf: found {type(conf).__name__}, expected a dict"])
        return [{**(conf or {}), "path": bank}]
    if conf is not None:
        raise LoadConfError([f"conf: found {conf!r} and a bank; give conf= only if the bank is a path"])
    if bank is None:
        return []
    return [bank] if isinstance(bank, Mapping) else bank


def parse_bank(bank: Sequence[Mapping[str, Any]], problems: list[str]) -> list[Entry]:
    if not is_list(bank):
        problems.append(f"bank: found {type(bank).__name__}, expected a list of dicts")
        return []
    entries = [_parse(f"bank[{i}]", conf, problems, with_path=True, own=False) for i, conf in enumerate(bank)]
    return [entry for entry in entries if entry is not None]


def _parse(label: str, conf: Any, problems: list[str], *, with_path: bool, own: bool) -> Entry | None:
    """Return an entry; None if the entry is to be skipped. A wrong value adds a problem and leaves the default."""
    if not isinstance(conf, Mapping):
        problems.append(f"{label}: found {type(conf).__name__}, expected a dict")
        return None
    parsers: dict[str, Callable[[Any], Any]] = {**_PARSERS, "path": _PATH} if with_path else _PARSERS
    values: dict[str, Any] = {}
    for key, value in conf.items():
        if key not in parsers:
            problems.append(f"{label}: unknown key {key!r}; allowed are {', '.join(parsers)}{nearest(key, parsers)}")
            continue
        try:
            values[key] = parsers[key](value)
        except ValueError as error:
            problems.append(f"{label}[{key!r}]: {error}")
    if with_path and "path" not in conf:
        problems.append(f"{label}: no 'path', expected a checkpoint or an output dir")
    values["renames"], values["path"] = values.pop("oname", Renames()), str(values.get("path", ""))
    return None if values.pop("skip", False) else Entry(label=label, is_own=own, **values)


def _checked(is_valid: Callable[[Any], bool], expected: str, value: Any) -> Any:
    if not is_valid(value):
        raise ValueError(f"found {value!r}, expected {expected}")
    return value


def _patterns(value: Any) -> tuple[Pattern, ...]:
    is_many = is_list(value) or isinstance(value, Set)
    if not is_many or not all(isinstance(name, str) and name for name in value):
        raise ValueError(f"found {value!r}, expected a list of names or a set, such as ['sparse', 'tower.*']")
    return tuple(Pattern(name) for name in (sorted(value) if isinstance(value, Set) else value))


def _on_mismatch(value: Any) -> tuple[tuple[Pattern, str], ...]:
    actions = {"*": value} if isinstance(value, str) else value
    if not isinstance(actions, Mapping):
        raise ValueError(f"found {value!r}, expected one of {', '.join(ACTIONS)}, or a dict, name -> one of them")
    for action in actions.values():
        if action not in ACTIONS:
            raise ValueError(f"found {action!r}, expected one of {', '.join(ACTIONS)}{nearest(action, ACTIONS)}")
    return tuple((Pattern(str(name)), str(action)) for name, action in actions.items())


_FLAG = partial(_checked, lambda value: type(value) is bool, "true or false")
_PATH = partial(
    _checked, lambda value: isinstance(value, str | PathLike) and bool(str(value)), "a checkpoint or an output dir"
)
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "load": _patterns,
    "exclude": _patterns,
    "oname": parse_renames,
    "hashtable_clear": _FLAG,
    "ignore_error": _FLAG,
    "skip": _FLAG,
    "is_dynamic": _FLAG,
    "strict": _FLAG,
    "on_mismatch": _on_mismatch,
    "where": parse_row_filter,
    "convert": _FLAG,
    "out_of_range": partial(_checked, ("error", "skip").__contains__, "'error' or 'skip'"),
    "zch": partial(_checked, ("error", "drop").__contains__, "'error' or 'drop'"),
}
