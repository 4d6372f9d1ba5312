"""Patterns of an entry that mean nothing, or not what they seem to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from recckpt.load.conf import Entry
from recckpt.load.problems import Problems, first_few
from recckpt.load.selection import GROUPS, Name, Pattern
from recckpt.text import nearest

_OF_OBJECTS = ("extra", "dense_opt")


def check_patterns(entry: Entry, model: Collection[Name], there: Collection[Name], problems: Problems) -> None:
    """Add what is wrong with the names in an entry.

    Args:
        entry: what is looked at.
        model: names of the model.
        there: names in the checkpoint.
        problems: what is wrong is added here.
    """
    for key, pattern, where in _patterns(entry, model, there):
        if pattern.is_everything or pattern.is_group:
            continue
        meant = [name for name in where if pattern.matches(name)]
        if meant:
            _check_objects(entry, key, pattern, meant, problems)
        elif pattern.is_explicit:
            hint = nearest(pattern.text, {*names_and_tables(model), *GROUPS})
            problems.about_names(entry, f"{key!r}: {pattern.text!r} is neither in the model nor a group{hint}")
        else:
            problems.warn(entry, f"{key!r}: {pattern.text!r} matches nothing in the model")


def _check_objects(entry: Entry, key: str, pattern: Pattern, meant: Collection[Name], problems: Problems) -> None:
    """Warn of ``dense*`` where nothing but ``dense_optim`` is called so, and of state that is asked for alone."""
    if key == "load" and all(name.parameter for name in meant):
        problems.warn(entry, f"'load': {pattern.text!r}: the state of a dense optimizer comes with its parameters only")
        return
    seems_wider = key in ("load", "exclude") and not pattern.is_explicit and "@" not in pattern.text
    if seems_wider and all(name.group in _OF_OBJECTS for name in meant):
        names = sorted({name.text for name in meant if not name.parameter})
        problems.warn(entry, f"{key!r}: {pattern.text!r} matches only registered objects: {first_few(names)}")


def _patterns(
    entry: Entry, model: Collection[Name], there: Collection[Name]
) -> Iterator[tuple[str, Pattern, Iterable[Name]]]:
    """Yield (key, pattern, names of which it has to match one)."""
    yield from (("load", pattern, model) for pattern in entry.load)
    yield from (("exclude", pattern, [*model, *there]) for pattern in entry.exclude)
    yield from (("oname", Pattern(side), model) for side, _ in entry.renames.rules)
    yield from (("on_mismatch", pattern, model) for pattern, _ in entry.on_mismatch)


def names_and_tables(names: Iterable[Name]) -> set[str]:
    """Return all that a name may be written as."""
    names = list(names)
    return {name.text for name in names} | {name.table for name in names if name.is_slot}
