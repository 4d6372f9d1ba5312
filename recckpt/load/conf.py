"""What a load takes, as people write it: a ``load_conf``, or a bank of them; parsed with every fault named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any

from recckpt.errors import LoadConfError
from recckpt.format.names import GLOBAL_STEP, ID, Name, Pattern, slot_name
from recckpt.load.renames import Renames, parse_renames
from recckpt.sparse.files.row_filter import RowFilter, parse_row_filter
from recckpt.text import nearest
from recckpt.types import EMBEDDING, is_list

Bank = str | PathLike[str] | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
ACTIONS = ("error", "skip", "cast", "resize")


@dataclass(frozen=True)
class Entry:
    """One source of a load, and what to take of it.

    Attributes:
        label: how messages call it, such as ``bank[1]``.
        path: a checkpoint or an output dir, any URL; "" for the checkpoint that the call names.
        load: what is taken ...
        exclude: ... but for these.
        renames: what names of the model are called there.
        hashtable_clear: whether tables are emptied first; otherwise rows are merged in and the loaded ones win.
        ignore_error: whether problems with names are warnings.
        is_dynamic: whether ``reload_dynamic`` looks at it again.
        strict: whether names must match both ways; None: those of ``dense``, where that group is named.
        on_mismatch: table or tensor pattern -> what to do where dtype or shape differ; a name goes before patterns.
        where: which rows are taken.
        convert: whether slots with a value for each range of columns may be brought to other ranges, or to whole rows.
        out_of_range: what becomes of ids that a table with a fixed number of rows has no row for.
        zch: what becomes of ids that are more than a table of managed collisions has rows.
        is_own: whether this is the run's own output dir, from which a run is resumed.
        keeps_settings: whether hyper-parameters of optimizers, and base rates of schedulers, stay those of this run.
        only: the names that may be taken at all, None for any.
        serves: whether the model is to be evaluated or served: what only training needs is neither taken nor missed.
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

    def wants(self, name: Name) -> bool:
        """Say whether the entry asks for ``name``.

        Ids come along with the embeddings, the state of a dense optimizer with its parameters, and the step with the
        own run. The step, the positions and the settings of optimizers of another run are only taken where they are
        named.
        """
        if (self.only is not None and name not in self.only) or self._excludes(name):
            return False
        if name.parameter:
            optimizer = Name("dense_opt", name.optimizer)
            return self.wants(Name("dense", name.parameter)) and not self._excludes(optimizer)
        if name.group == GLOBAL_STEP:
            return self.is_own or self.serves or Pattern(GLOBAL_STEP) in self.load
        if name.is_settings and not self.is_own:
            return Pattern(name.text) in self.load
        if name.is_position and not self.is_own:
            return any(pattern.matches(name) and not pattern.is_everything for pattern in self.load)
        names = (name, slot_name(name.table, EMBEDDING)) if name.slot == ID else (name,)
        return any(pattern.matches(asked) for pattern in self.load for asked in names)

    def _excludes(self, name: Name) -> bool:
        return (self.serves and name.is_of_training) or any(pattern.matches(name) for pattern in self.exclude)

    @property
    def strict_groups(self) -> frozenset[str]:
        """The groups whose names must match both ways."""
        if self.strict is None:
            return frozenset({"dense"} if Pattern("dense") in self.load else ())
        return frozenset({"dense", "sparse"} if self.strict else ())

    def action(self, name: Name) -> str:
        """Return what to do where dtype or shape of ``name`` differ: a rule for it alone goes first."""
        actions = [(not pattern.is_explicit, action) for pattern, action in self.on_mismatch if pattern.matches(name)]
        return min(actions, key=lambda rule: rule[0], default=(False, "error"))[1]


def parse_load_conf(conf: Mapping[str, Any] | None, *, own: bool = False) -> Entry:
    """Return what a ``load_conf`` asks for; None asks for everything, strictly.

    Raises:
        LoadConfError: unknown keys, or values of another type; all of them.
    """
    if conf is None:
        return Entry(strict=True, is_own=own)
    problems: list[str] = []
    entry = _parse("load_conf", conf, problems, with_path=False, own=own)
    if problems:
        raise LoadConfError(problems)
    return entry or Entry(load=(), is_own=own)  # it says "skip"


def as_bank(bank: Bank, conf: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return the entries of a bank that may be given as one entry, or as a path and the rest of its entry, or as None.

    Raises:
        LoadConfError: the rest of an entry is not a dict, or there is no path that it belongs to.
    """
    if isinstance(bank, str | PathLike):
        if not isinstance(conf, Mapping | None):
            raise LoadConfError([f"conf: found {type(conf).__name__}, expected a dict"])
        return [{**(conf or {}), "path": bank}]
    if conf is not None:
        raise LoadConfError([f"conf: found {conf!r} beside a whole bank; it belongs to a path"])
    if bank is None:
        return []
    return [bank] if isinstance(bank, Mapping) else bank


def parse_bank(bank: Sequence[Mapping[str, Any]], problems: list[str]) -> list[Entry]:
    """Return the entries of a bank that are not skipped, in order; what is wrong with them is added to ``problems``."""
    if not is_list(bank):
        problems.append(f"bank: found {type(bank).__name__}, expected a list of dicts")
        return []
    entries = [_parse(f"bank[{i}]", conf, problems, with_path=True, own=False) for i, conf in enumerate(bank)]
    return [entry for entry in entries if entry is not None]


def _parse(label: str, conf: Any, problems: list[str], *, with_path: bool, own: bool) -> Entry | None:
    """Return an entry, None where it is to be skipped; a value that is wrong leaves its default and a problem."""
    if not isinstance(conf, Mapping):
        problems.append(f"{label}: found {type(conf).__name__}, expected a dict")
        return None
    parsers = {**_PARSERS, "path": _path} if with_path else _PARSERS
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
    renames = values.pop("oname", Renames())
    return None if values.pop("skip", False) else Entry(label=label, renames=renames, is_own=own, **values)


def _path(value: Any) -> str:
    if not isinstance(value, str | PathLike) or not str(value):
        raise ValueError(f"found {value!r}, expected a checkpoint or an output dir")
    return str(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"found {value!r}, expected true or false")
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


def _error_or(other: str, value: Any) -> str:
    if value not in ("error", other):
        raise ValueError(f"found {value!r}, expected 'error' or {other!r}")
    return str(value)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "load": _patterns,
    "exclude": _patterns,
    "oname": parse_renames,
    "hashtable_clear": _flag,
    "ignore_error": _flag,
    "skip": _flag,
    "is_dynamic": _flag,
    "strict": _flag,
    "on_mismatch": _on_mismatch,
    "where": parse_row_filter,
    "convert": _flag,
    "out_of_range": partial(_error_or, "skip"),
    "zch": partial(_error_or, "drop"),
}
