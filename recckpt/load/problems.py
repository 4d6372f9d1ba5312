"""Collects the problems of a load, so that one error lists all problems and their remedies."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from recckpt.errors import LoadConfError, RecckptError, StateMismatchError
from recckpt.format.names import GLOBAL_STEP, GROUPS, Name, Pattern
from recckpt.format.tables import counted_table
from recckpt.load.conf import Entry
from recckpt.load.inventory import PLAIN, Inventory, Thing
from recckpt.text import first_few, nearest

_ACTIONS = ("cast", "resize", "skip")  # in order of preference
_SHOWN = 6
_MOST_PAIRS = 1_000  # pairs of names to compare at most, so that an error is not delayed
_RESIZE_KEEPS = "'resize' keeps the values at equal positions; of a tensor, the first rows"
_RENAME = "'oname': {'NAME IN THE MODEL': 'NAME IN THE CHECKPOINT'}"


@dataclass
class Problems:
    """Problems by kind, and warnings.

    Attributes:
        conf: problems with keys, values and names.
        missing: names of the model that a strict entry lacks.
        unexpected: names of a strict entry that the model lacks.
        mismatched: name -> (found, expected) of dtypes, shapes and numbers of shards.
        misfits: labels of the entries with names in ``mismatched``.
        not_found: entries whose checkpoint cannot be read, with the reasons.
    """

    conf: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[object, object]] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    not_found: list[tuple[Entry, RecckptError]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _mismatched_in: dict[str, str] = field(default_factory=dict)
    _renames: dict[str, Entry] = field(default_factory=dict)  # entries with missing or unexpected names
    _actions: dict[str, tuple[Entry, dict[str, str]]] = field(default_factory=dict)  # label -> name -> what to do

    def refuse(self, entry: Entry, problem: str, *, of_names: bool = False) -> None:
        """Add a problem; an entry may turn problems with names into warnings."""
        _add(self.warnings if of_names and entry.ignore_error else self.conf, f"{entry.label}: {problem}")

    def warn(self, entry: Entry, text: str) -> None:
        _add(self.warnings, f"{entry.label}: {text}")

    def misfit(
        self, entry: Entry, name: str, found: object, expected: object, action: tuple[str, str] | None = None
    ) -> None:
        """Add a name whose state does not fit; ``action`` is a remedy: (table or tensor, what to do with it)."""
        self.mismatched[name] = (found, expected)
        self._mismatched_in[name] = entry.label
        _add(self.misfits, entry.label)
        if action is not None:
            actions = self._actions.setdefault(entry.label, (entry, {}))[1]
            actions[action[0]] = max(actions.get(*action), action[1], key=_ACTIONS.index)

    def lack(self, entries: Iterable[Entry], name: str, *, in_model: bool = False) -> None:
        """Add a required name that ``entries`` lack or, with ``in_model``, a name in them that the model lacks."""
        (self.unexpected if in_model else self.missing).append(name)
        for entry in entries:
            _add(self.misfits, entry.label)
            self._renames[entry.label] = entry

    def raise_if_any(self, what: Sequence[str]) -> None:
        """Raise one error with all problems; ``what`` names the things that do not fit.

        Raises:
            LoadConfError: there are problems with names and keys, or of several kinds.
            StateMismatchError: the only problems are states that do not fit.
            CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: the only problem is one unreadable
                checkpoint.
        """
        mismatched = self.mismatched
        if not any((self.conf, self.missing, self.unexpected, mismatched, self.not_found)):
            return
        if len(self.misfits) > 1:
            mismatched = {
                name: (f"{found} in {self._mismatched_in[name]}", expected)
                for name, (found, expected) in mismatched.items()
            }
        # A table of counts is renamed, or left out, together with its table if that table is among the names.
        missing, unexpected = (
            [name for name in names if counted_table(name) not in names] for names in (self.missing, self.unexpected)
        )
        misfit = StateMismatchError(
            what,
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
            nearest=nearest_names(missing, unexpected),
            remedy=self.remedy(),
        )
        misfits = [misfit] if missing or unexpected or mismatched else []
        if not self.conf and not misfits and len(self.not_found) == 1:
            entry, error = self.not_found[0]
            if entry.path:  # the message begins with its entry
                error.args = (f"{entry.label}: {error}", *error.args[1:])
            raise error
        if misfits and not self.conf and not self.not_found:
            raise misfit
        texts = [*self.conf, *(f"{entry.label}: {error}" for entry, error in self.not_found), *map(str, misfits)]
        raise LoadConfError(texts)

    def remedy(self) -> str:
        parts = []
        if self.missing and self.unexpected:
            rules = ", ".join(_addition(entry, _RENAME) for entry in self._renames.values())
            parts.append(f"{rules} if names have changed; 'strict': False loads what fits by name")
        elif self.missing or self.unexpected:
            parts.append("pass load_conf={'strict': False} to load what fits by name")
        if self.mismatched:
            text = "say in 'on_mismatch' what to do where state differs"
            if any("resize" in actions.values() for _, actions in self._actions.values()):
                text = f"{_RESIZE_KEEPS}: {text}"
            rules = ", ".join(
                _addition(entry, f"'on_mismatch': {_as_code(actions)}") for entry, actions in self._actions.values()
            )
            parts.append(f"{text}: {rules}" if rules else text)
        return "; ".join(parts)


def _add(known: list[str], text: str) -> None:
    if text not in known:
        known.append(text)


def _addition(entry: Entry, keys: str) -> str:
    return f"add {keys} to {entry.label}" if entry.path else f"pass load_conf={{{keys}, 'strict': True}}"


def _as_code(values: Mapping[str, str]) -> str:
    """Return a dict as code; a single value if there are many entries and all values are equal."""
    items = [f"{key!r}: {value!r}" for key, value in values.items()]
    different = {*values.values()}
    if len(items) > _SHOWN and len(different) == 1:
        return repr(next(iter(different)))
    return f"{{{', '.join(items[:_SHOWN])}{', ...' if len(items) > _SHOWN else ''}}}"


def nearest_names(missing: Sequence[str], there: Sequence[str]) -> dict[str, str]:
    if len(missing) * len(there) > _MOST_PAIRS:
        return {}
    close = {name: difflib.get_close_matches(name, there, n=1) for name in missing}
    return {name: names[0] for name, names in close.items() if names}


def fitting_action(name: Name, saved: Thing, live: Thing) -> tuple[str, str]:
    """Return the table or tensor, and the action that keeps the most of a state of another dtype or shape.

    A tensor whose later dimensions differ is skipped: after a concatenation, a layer would get weights of another
    input.
    """
    key = name.table or name.text
    if PLAIN in (saved.dtype, live.dtype) or len(saved.shape) != len(live.shape):
        return key, "skip"
    if saved.shape == live.shape:
        return key, "cast"
    same = (saved.shape[:-1], live.shape[:-1]) if name.is_slot else (saved.shape[1:], live.shape[1:])
    return key, "resize" if same[0] == same[1] else "skip"


def check_patterns(entry: Entry, model: Inventory, there: Collection[Name], problems: Problems) -> None:
    everything = [*model, *there]
    patterns: list[tuple[str, Pattern, Collection[Name]]] = [("load", pattern, model) for pattern in entry.load]
    patterns += [("exclude", pattern, everything) for pattern in entry.exclude]
    patterns += [("oname", Pattern(side), model) for side, _ in entry.renames.rules]
    patterns += [("on_mismatch", pattern, model) for pattern, _ in entry.on_mismatch]
    for key, pattern, where in patterns:
        text = pattern.text
        if pattern.is_everything or pattern.is_group:
            is_named = any(text in (name.text, name.table) for name in where)
            if pattern.is_group and key != "oname" and text != GLOBAL_STEP and is_named:
                means = f"means the group; for an object of this name, write '[{text[0]}]{text[1:]}'"
                problems.warn(entry, f"{key!r}: {text!r} {means}")
            continue
        meant = [name for name in where if pattern.matches(name)]
        for doubt in _doubts(entry, key, pattern, meant, model):
            problems.warn(entry, f"{key!r}: {text!r}{doubt}")
        if not meant and pattern.is_explicit:
            tables = [name.table for name, thing in model.items() if name.is_slot and text in thing.tied]
            hint = f"; it is the live table {tables[0]!r} here" if tables else ""
            hint = hint or nearest(text, {*names_and_tables(model), *GROUPS})
            problems.refuse(entry, f"{key!r}: {text!r} is neither in the model nor a group{hint}", of_names=True)


def _doubts(
    entry: Entry, key: str, pattern: Pattern, meant: Collection[Name], model: Collection[Name]
) -> Iterator[str]:
    if not meant:
        if not pattern.is_explicit:
            yield " matches nothing in the model"
        return
    is_wide = key in ("load", "exclude") and not pattern.is_explicit and "@" not in pattern.text
    if key == "load" and all(name.parameter for name in meant):
        yield ": the state of a dense optimizer comes with its parameters only"
    elif is_wide and all(name.group in ("extra", "dense_opt") for name in meant):  # such as dense* for dense_optim
        names = sorted({name.text for name in meant if not name.parameter})
        yield f" matches only registered objects: {first_few(names)}"
    states = [name for name in model if name.parameter and name.optimizer == pattern.text]
    if key == "load" and states and not any(map(entry.wants, states)):
        yield " means the settings of the optimizer; a parameter's state comes with the parameter, as with 'dense'"


def names_and_tables(names: Iterable[Name]) -> set[str]:
    names = list(names)
    return {name.text for name in names} | {name.table for name in names if name.is_slot}
