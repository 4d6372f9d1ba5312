"""What names that the checkpoint lacks may be called there, by shapes and slots, as a rule for ``oname``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from recckpt.format.names import Name
from recckpt.load.inventory import Inventory, Thing
from recckpt.types import EMBEDDING

_MOST_PAIRS = 100_000  # of names, which take a second; an error is not to wait for more
_Slots = Mapping[str, tuple[str, tuple[int, ...]]]  # slot, or last part of the name of a tensor -> dtype, shape


@dataclass(frozen=True, order=True)
class _Pair:
    fit: int  # 2 where all slots are alike, 1 where embeddings are
    likeness: float  # of the two names
    model: str
    there: str


def likely_renames(
    model: Inventory, there: Inventory, *, missing: Collection[Name], left: Collection[Name]
) -> dict[str, str]:
    """Return rules of ``oname``: for tables, and for the tensors of modules.

    A pair is one whose slots, or tensors, are of the same dtypes and shapes; of several the one whose names are most
    alike. Where two are equally so, there is no rule.

    Args:
        model: the names of the model.
        there: those of the checkpoint.
        missing: of the model, which the checkpoint lacks.
        left: of the checkpoint, which the model lacks.
    """
    tables = _paired(_of_tables(model, missing), _of_tables(there, left))
    modules = _paired(_of_modules(model, missing), _of_modules(there, left))
    present = [name.text for name in model if name.group == "dense" and name not in missing]
    return tables | dict(_rule(here, other, present) for here, other in modules.items())


def _of_tables(inventory: Inventory, names: Iterable[Name]) -> dict[str, _Slots]:
    tables: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name.table: {} for name in names if name.is_slot}
    for name, thing in inventory.items():
        if name.table in tables:
            tables[name.table][name.slot] = _form(thing)
    return dict(tables)


def _of_modules(inventory: Inventory, names: Iterable[Name]) -> dict[str, _Slots]:
    modules: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name in names:
        if name.group == "dense":
            module, _, last = name.text.rpartition(".")
            modules.setdefault(module or name.text, {})[last if module else ""] = _form(inventory[name])
    return dict(modules)


def _form(thing: Thing) -> tuple[str, tuple[int, ...]]:
    return thing.dtype, thing.shape


def _paired(missing: Mapping[str, _Slots], left: Mapping[str, _Slots]) -> dict[str, str]:
    """Return the pairs that fit best; of those that fit equally well with another one, none."""
    if len(missing) * len(left) > _MOST_PAIRS:
        return {}
    pairs_of = {name: _letter_pairs(name) for name in (*missing, *left)}
    pairs = [
        _Pair(fit, _likeness(pairs_of[here], pairs_of[there]), here, there)
        for here, slots in missing.items()
        for there, others in left.items()
        if (fit := _fit(slots, others))
    ]
    renames: dict[str, str] = {}
    done: tuple[set[str], set[str]] = set(), set()
    for _, alike in groupby(sorted(pairs, reverse=True), key=lambda pair: (pair.fit, pair.likeness)):
        open_pairs = [pair for pair in alike if pair.model not in done[0] and pair.there not in done[1]]
        counts = Counter(pair.model for pair in open_pairs), Counter(pair.there for pair in open_pairs)
        for pair in open_pairs:
            if counts[0][pair.model] == counts[1][pair.there] == 1:
                renames[pair.model] = pair.there
            done[0].add(pair.model)
            done[1].add(pair.there)
    return renames


def _letter_pairs(name: str) -> frozenset[str]:
    text = f" {name} "
    return frozenset(text[i : i + 2] for i in range(len(text) - 1))


def _likeness(one: frozenset[str], other: frozenset[str]) -> float:
    """Return which share of their pairs of letters two names have in common (Dice's coefficient)."""
    return 2 * len(one & other) / (len(one) + len(other))


def _fit(slots: _Slots, others: _Slots) -> int:
    if slots == others:
        return 2
    return int(EMBEDDING in slots and slots[EMBEDDING] == others.get(EMBEDDING))


def _rule(here: str, there: str, present: Iterable[str]) -> tuple[str, str]:
    """Return the rule for a module, or for the one above it where that was renamed and nothing in it is present."""
    parts, others = here.split("."), there.split(".")
    while len(parts) > 1 and len(others) > 1 and parts[-1] == others[-1]:
        parts, others = parts[:-1], others[:-1]
    prefix = ".".join(parts)
    if any(name.startswith(f"{prefix}.") for name in present):
        return f"{here}.*", f"{there}.*"
    return f"{prefix}.*", f"{'.'.join(others)}.*"
