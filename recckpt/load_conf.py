"""What a load takes: ``load`` minus ``exclude`` over groups, checked in full before anything is read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from recckpt.errors import LoadConfError

GROUPS = ("sparse", "dense", "extra", "sparse_opt", "io_state")
_KEYS = ("load", "exclude", "strict")


@dataclass(frozen=True)
class Selection:
    """The groups to load.

    Attributes:
        groups: a subset of :data:`GROUPS`, each independent of the others.
        strict: whether dense names must match both ways.
    """

    groups: frozenset[str] = frozenset(GROUPS)
    strict: bool = True

    def __contains__(self, group: str) -> bool:
        return group in self.groups


def parse_load_conf(conf: Mapping[str, Any] | None) -> Selection:
    """Return the selection that a ``load_conf`` asks for; None asks for everything.

    Args:
        conf: ``load`` (default ``["*"]``) and ``exclude`` (default ``[]``), lists of group names or ``"*"``;
            ``strict`` (default true).

    Raises:
        LoadConfError: an unknown key or group, or a value of another type; names the nearest match.
    """
    if conf is None:
        return Selection()
    if not isinstance(conf, Mapping):
        raise LoadConfError(f"load_conf: found {type(conf).__name__}, expected a dict with keys {', '.join(_KEYS)}")
    check_keys(conf, _KEYS)
    strict = conf.get("strict", True)
    if type(strict) is not bool:
        raise LoadConfError(f"load_conf['strict']: found {strict!r}, expected true or false")
    loaded = _groups("load", conf.get("load", ["*"]))
    return Selection(loaded - _groups("exclude", conf.get("exclude", [])), strict)


@dataclass(frozen=True)
class BankEntry:
    """One source of a warm start.

    Attributes:
        path: a checkpoint, or an output dir, whose newest is meant; any URL.
        selection: what to take of it.
    """

    path: str
    selection: Selection


def parse_entry(conf: Mapping[str, Any]) -> BankEntry:
    """Return what an entry of a model bank asks for: a ``load_conf`` with a ``path``.

    The dataset positions of another run are left out unless ``load`` names them.

    Raises:
        LoadConfError: an unknown key or group, a value of another type, or no ``path``.
    """
    if not isinstance(conf, Mapping):
        raise LoadConfError(f"model bank: found {type(conf).__name__}, expected a dict with a 'path'")
    check_keys(conf, ("path", *_KEYS))
    path = conf.get("path")
    if not isinstance(path, str) or not path:
        raise LoadConfError(f"model bank: 'path' must be a checkpoint or an output dir, found {path!r}")
    selection = parse_load_conf({key: value for key, value in conf.items() if key != "path"})
    if "io_state" not in conf.get("load", []):
        selection = Selection(selection.groups - {"io_state"}, selection.strict)
    return BankEntry(path, selection)


def check_keys(conf: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Refuse keys that mean nothing.

    Raises:
        LoadConfError: names the key, what is allowed and the nearest match.
    """
    allowed = list(allowed)
    for key in conf:
        if key not in allowed:
            raise LoadConfError(
                f"load_conf: unknown key {key!r}; allowed are {', '.join(allowed)}{nearest(key, allowed)}"
            )


def _groups(key: str, names: Any) -> frozenset[str]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise LoadConfError(f"load_conf[{key!r}]: found {names!r}, expected a list of group names, such as ['sparse']")
    for name in names:
        if name not in ("*", *GROUPS):
            raise LoadConfError(
                f"load_conf[{key!r}]: unknown group {name!r}; allowed are {', '.join(GROUPS)} and '*'"
                f"{nearest(name, GROUPS)}"
            )
    return frozenset(GROUPS) if "*" in names else frozenset(names)


def nearest(name: object, allowed: Iterable[str]) -> str:
    """Return a hint at the name that was probably meant, or nothing."""
    close = difflib.get_close_matches(str(name), list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
