"""``oname``: what a name of the model is called in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recckpt.names import Name, star_regex


@dataclass(frozen=True)
class Renames:
    """Rules, model name -> name in the checkpoint; ``*`` on both sides, as often, or on neither.

    A rule for a table renames all of its slots; one for ``table@slot`` that slot alone.
    """

    rules: tuple[tuple[str, str], ...] = ()

    def source(self, name: Name) -> str:
        """Return what ``name`` is called in the checkpoint; itself where no rule speaks of it.

        Raises:
            ValueError: two rules give it different names.
        """
        found = {}
        for model_side, checkpoint_side in self.rules:
            renamed = _apply(model_side, checkpoint_side, name)
            if renamed is not None:
                found[renamed] = f"{model_side!r}: {checkpoint_side!r}"
        if len(found) > 1:
            raise ValueError(f"{name.text!r} is renamed by more than one rule: {' and '.join(found.values())}")
        return next(iter(found), name.text)

    def speaks_of(self, name: Name) -> bool:
        """Say whether a rule renames ``name``."""
        return any(_apply(*rule, name) is not None for rule in self.rules)


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


def _apply(model_side: str, checkpoint_side: str, name: Name) -> str | None:
    whole = star_regex(model_side).fullmatch(name.text)
    if whole:
        return _fill(checkpoint_side, whole.groups())
    if name.is_slot and "@" not in model_side:
        table = star_regex(model_side).fullmatch(name.table)
        if table:
            return f"{_fill(checkpoint_side, table.groups())}@{name.slot}"
    return None


def _fill(text: str, runs: Sequence[str]) -> str:
    pieces = text.split("*")
    return pieces[0] + "".join(run + piece for run, piece in zip(runs, pieces[1:], strict=True))
