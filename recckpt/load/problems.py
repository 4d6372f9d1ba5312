"""What is wrong with a load, gathered so that one error can say all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from recckpt.errors import LoadConfError, RecckptError, StateMismatchError
from recckpt.format.names import GROUPS, Name, Pattern
from recckpt.load.advice import Advice
from recckpt.load.conf import Entry
from recckpt.load.inventory import Inventory
from recckpt.text import first_few, nearest

_OF_OBJECTS = ("extra", "dense_opt")


@dataclass
class Problems:
    """Problems by kind, and what deserves a warning.

    Attributes:
        conf: with keys, values and names.
        missing: what the model has, and the checkpoints that must have it lack.
        unexpected: what a checkpoint has, and the model that must have it lacks.
        mismatched: name -> (found, expected) of dtypes, shapes and numbers of shards.
        misfits: labels of the entries that these are about.
        not_found: entries whose checkpoint cannot be read, with the reason.
        warnings: what is not an error.
        advice: what could be said in a ``load_conf``.
    """

    conf: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple[object, object]] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    not_found: list[tuple[Entry, RecckptError]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    advice: Advice = field(default_factory=Advice)
    _mismatched_in: dict[str, str] = field(default_factory=dict)

    def about_names(self, entry: Entry, problem: str) -> None:
        """Add a problem with names, which an entry may ask to be only warned of."""
        self._add(self.warnings if entry.ignore_error else self.conf, f"{entry.label}: {problem}")

    def about_filter(self, entry: Entry, problem: str) -> None:
        """Add a problem with the conditions of rows."""
        self._add(self.conf, f"{entry.label}: 'where': {problem}")

    def warn(self, entry: Entry, text: str) -> None:
        """Add a warning."""
        self._add(self.warnings, f"{entry.label}: {text}")

    def misfit(self, entry: Entry, name: str, found: object, expected: object) -> None:
        """Add a name whose state does not fit."""
        self.mismatched[name] = (found, expected)
        self._mismatched_in[name] = entry.label
        self._add(self.misfits, entry.label)

    def miss(self, entries: Sequence[Entry], name: str) -> None:
        """Add a name of the model that entries must have and lack."""
        self.missing.append(name)
        for entry in entries:
            self._add(self.misfits, entry.label)

    def surprise(self, entry: Entry, name: str) -> None:
        """Add a name that the model must have and lacks."""
        self.unexpected.append(name)
        self._add(self.misfits, entry.label)

    def _add(self, known: list[str], text: str) -> None:
        if text not in known:
            known.append(text)

    def raise_if_any(self, what: Sequence[str]) -> None:
        """Raise one error that says all of it; ``what`` does not fit.

        Raises:
            LoadConfError: there are problems with names and keys, or of several kinds.
            StateMismatchError: there is nothing but state that does not fit.
            CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError: there is nothing but one checkpoint
                that cannot be read.
        """
        mismatched = self.mismatched
        if len(self.misfits) > 1:
            mismatched = {
                name: (f"{found} in {self._mismatched_in[name]}", expected)
                for name, (found, expected) in mismatched.items()
            }
        remedies = [self.advice.of_names()] if self.missing or self.unexpected else []
        remedy = "; ".join([*remedies, self.advice.of_values()] if mismatched else remedies)
        misfit = StateMismatchError(
            what, missing=self.missing, unexpected=self.unexpected, mismatched=mismatched, remedy=remedy
        )
        misfits = [misfit] if self.missing or self.unexpected or self.mismatched else []
        if not self.conf and not misfits and len(self.not_found) == 1:
            raise _named(*self.not_found[0])
        if misfits and not self.conf and not self.not_found:
            raise misfit
        texts = [*self.conf, *(f"{entry.label}: {error}" for entry, error in self.not_found), *map(str, misfits)]
        if texts:
            raise LoadConfError(texts)


def _named(entry: Entry, error: RecckptError) -> RecckptError:
    """Return an error whose message begins with the entry that it is about."""
    if entry.path:
        error.args = (f"{entry.label}: {error}", *error.args[1:])
    return error


def check_patterns(entry: Entry, model: Inventory, there: Collection[Name], problems: Problems) -> None:
    """Add what is wrong with the names in an entry, beside those of the model and of the checkpoint."""
    for key, pattern, where in _patterns(entry, model, there):
        if pattern.is_everything or pattern.is_group:
            continue
        meant = [name for name in where if pattern.matches(name)]
        if meant:
            _check_objects(entry, key, pattern, meant, problems)
            _check_optimizer(entry, key, pattern, model, problems)
        elif pattern.is_explicit:
            hint = _as_table(pattern.text, model) or nearest(pattern.text, {*names_and_tables(model), *GROUPS})
            problems.about_names(entry, f"{key!r}: {pattern.text!r} is neither in the model nor a group{hint}")
        else:
            problems.warn(entry, f"{key!r}: {pattern.text!r} matches nothing in the model")


def _as_table(tensor: str, model: Inventory) -> str:
    """Return a hint at the live table that has the rows of a dense tensor, nothing where there is none."""
    tables = [name.table for name, thing in model.items() if name.is_slot and tensor in thing.tied]
    return f"; it is the live table {tables[0]!r} here" if tables else ""


def _check_objects(entry: Entry, key: str, pattern: Pattern, meant: Collection[Name], problems: Problems) -> None:
    """Warn of ``dense*`` where nothing but ``dense_optim`` is called so, and of state that is asked for alone."""
    if key == "load" and all(name.parameter for name in meant):
        problems.warn(entry, f"'load': {pattern.text!r}: the state of a dense optimizer comes with its parameters only")
        return
    seems_wider = key in ("load", "exclude") and not pattern.is_explicit and "@" not in pattern.text
    if seems_wider and all(name.group in _OF_OBJECTS for name in meant):
        names = sorted({name.text for name in meant if not name.parameter})
        problems.warn(entry, f"{key!r}: {pattern.text!r} matches only registered objects: {first_few(names)}")


def _check_optimizer(entry: Entry, key: str, pattern: Pattern, model: Collection[Name], problems: Problems) -> None:
    """Warn where a dense optimizer is named, and none of the parameters whose state comes with them."""
    states = [name for name in model if name.parameter and name.optimizer == pattern.text]
    if key == "load" and states and not any(map(entry.wants, states)):
        text = "means the settings of the optimizer; the state of a parameter comes with it, such as by 'dense'"
        problems.warn(entry, f"'load': {pattern.text!r} {text}")


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
